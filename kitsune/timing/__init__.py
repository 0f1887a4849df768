"""How long things take on this device: the timer, and the cache of measured times on disk."""

from kitsune.timing.cache import CostCache
from kitsune.timing.timer import device_us, replayed_us

__all__ = ["CostCache", "device_us", "replayed_us"]
