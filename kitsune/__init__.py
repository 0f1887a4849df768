"""Kitsune: a drop-in accelerator for PyTorch training."""

from kitsune.bucketing import bucketed as bucketed
from kitsune.config import Config as Config
from kitsune.errors import ConfigError as ConfigError
from kitsune.errors import KitsuneError as KitsuneError
from kitsune.errors import Refusal as Refusal
from kitsune.memory.prefetch import prefetch as prefetch
from kitsune.optimizer import KitsuneOptimizer as KitsuneOptimizer
from kitsune.plan import Plan as Plan
from kitsune.status import Status as Status
from kitsune.status_of import status as status
from kitsune.step import TrainStep as TrainStep
from kitsune.verification import Difference as Difference
from kitsune.verification import Verification as Verification
from kitsune.verify import verify as verify

__version__ = "0.1.0"
