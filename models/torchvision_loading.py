"""Import torchvision even where its compiled operators do not load.

torchvision's wheels are compiled against one build of torch. Beside another (a CPU build of torch, say) the compiled
library cannot be loaded; torchvision tolerates that, except that it describes some of the library's operators to
torch's fake tensors without asking whether they exist, and `import torchvision` ends with "operator torchvision::nms
does not exist". Neither the classification models nor the data sets use any of these operators, so declaring their
schemas is enough. They get no implementation: calling one still says that the compiled operators are missing.
"""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

_DESCRIBED_UNASKED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def missing() -> str | None:
    """Why torchvision cannot be imported, and what to do; None if it can be."""
    if importlib.util.find_spec("torchvision") is not None:
        return None
    return f"torchvision is not installed: install the release made for torch {torch.__version__}"


def import_torchvision(submodule: str) -> ModuleType:
    """`torchvision.<submodule>`, with torchvision's compiled operators where they load and without where they do not.

    Raises ModuleNotFoundError where torchvision is not installed.
    """
    if "torchvision" not in sys.modules:
        _declare_missing_operators()
    return importlib.import_module(f"torchvision.{submodule}")


@functools.cache
def _declare_missing_operators() -> torch.library.Library | None:
    """The declarations, which last as long as the returned value (the cache keeps it); None if nothing is missing."""
    reason = missing()
    if reason is not None:
        raise ModuleNotFoundError(reason, name="torchvision")
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.submodule_search_locations
    if _loads_compiled_operators(Path(spec.submodule_search_locations[0])):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _DESCRIBED_UNASKED:
        library.define(schema)
    return library


def _loads_compiled_operators(package: Path) -> bool:
    """Loads torchvision's library of operators (`_C` or `_C_stable`) as torchvision does, if this torch can."""
    for library in sorted(package.glob("_C*")):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
    return hasattr(torch.ops.torchvision, "nms")
