"""Kitsune: a drop-in accelerator for PyTorch training.

Public names are imported when they are first used: `import kitsune` takes no time, also in a script that may not train.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "bucketed": "bucketing",
    "Config": "config",
    "ConfigError": "errors",
    "Difference": "verification",
    "KitsuneError": "errors",
    "KitsuneOptimizer": "optimizer",
    "Plan": "plan",
    "prefetch": "memory.prefetch",
    "Refusal": "errors",
    "Status": "status",
    "status": "status_of",
    "TrainStep": "step",
    "Verification": "verification",
    "verify": "verify",
}
"""The module of each public name."""

__all__ = list(_HOMES)


class _Face(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{self.__name__}.{_HOMES[name]}"), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):  # importing a module puts it here, as `verify`
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


sys.modules[__name__].__class__ = _Face
