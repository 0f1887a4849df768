"""What the server of fresh processes imports before it forks: slow imports, none of which touches a device.

CUDA cannot be used in a process forked from one that has used it, so nothing here may ask for a device, not even
whether there is one.
"""

import torch
import torch._dynamo

from harness import measure

__all__ = ["measure", "torch"]
