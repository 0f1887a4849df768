"""The examples at a size that takes a second, and how closely a run with Kitsune follows one without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from examples import chargpt, cifar10, cifar10_loop, data_parallel, finetune, gan, mnist, text, with_profiler
from examples.run import Run


@dataclass(frozen=True)
class Case:
    """A run of an example.

    Attributes:
        learns: the figure that falls; empty where the run is too short for that.
        tolerance: the largest relative difference of any figure from the run without Kitsune.
        accuracy: the largest difference of an accuracy.
        refused: why nothing is replayed; empty where all passes are.
        settles: whether the last steps have shapes that were seen before.
    """

    name: str
    main: Callable[[Sequence[str]], Run]
    options: str
    learns: str = "loss"
    tolerance: float = 1e-5
    accuracy: float = 0.0
    refused: str = ""
    settles: bool = True

    def run(self, *more: str) -> Run:
        return self.main([*self.options.split(), "--device", "cpu", *more])


_MNIST = "--synthetic --limit 2 --batch-size 8 --gamma 0.9"
_RESNET = "--synthetic --batch-size 16 --width 4 --lr 0.02"
_GPT = (
    "--iterations 20 --batch-size 4 --context 32 --width 32 --layers 2 --accumulate 2 --warmup 5 --lr 3e-3 "
    "--log-interval 5 --eval-interval 10 --eval-batches 2 --generate 10"
)
_TEXTS = "--texts 110 --batch-size 16 --width 16 --longest 32 --lr 0.01"

# At these sizes a residual network with batch norm is chaotic: weights that differ by 1e-7 give losses that differ by
# up to 1e-2 after 20 updates in float32, and after fewer in half precision. The update of a momentum that changes at
# each step differs from torch's in the last bits, since it is composed of other operators.
MNIST = Case("mnist", mnist.main, f"{_MNIST} --epochs 6 --lr 0.3")
MNIST_ADAM = Case("mnist_adam", mnist.main, f"{_MNIST} --epochs 5 --optimizer adam")
RESNET = Case("cifar10_loop", cifar10_loop.main, f"{_RESNET} --epochs 2 --limit 6", tolerance=1e-3, accuracy=0.02)
BFLOAT16 = Case(
    "bfloat16", cifar10_loop.main, f"{_RESNET} --epochs 1 --limit 5 --precision bfloat16", "", 2e-3, accuracy=0.05
)
FLOAT16 = Case(
    "float16", cifar10_loop.main, f"{_RESNET} --epochs 1 --limit 5 --precision float16", "", 2e-3, accuracy=0.05
)
DATA_PARALLEL = Case(
    "data_parallel", data_parallel.main, "--synthetic --limit 20 --batch-size 8 --epochs 2 --accumulate 2", learns=""
)
WHOLE_STEP = Case(
    "cifar10", cifar10.main, "--synthetic --epochs 1 --limit 3 --batch-size 2 --lr 0.02", "", 1e-3, accuracy=0.2
)
GPT = Case("chargpt", chargpt.main, _GPT)
GAN = Case("gan", gan.main, "--iterations 60 --batch-size 64 --width 32 --log-interval 10", learns="distance")
TEXT = Case("text", text.main, f"{_TEXTS} --epochs 4")
ANY_LENGTH = Case(
    "text_of_any_length", text.main, f"{_TEXTS} --epochs 2 --texts 70 --longest 12 --pad-to 1", settles=False
)
PACKED = Case("text_packed", text.main, f"{_TEXTS} --epochs 4 --model lstm", refused="pack_padded_sequence")
PROFILED = Case(
    "with_profiler", with_profiler.main, "--synthetic --limit 14 --batch-size 8 --epochs 1 --wait 6", learns=""
)
FINETUNE = Case("finetune", finetune.main, "--batches 20 --batch-size 16 --width 8 --lr 3e-3")


def parametrize(*cases: Case) -> pytest.MarkDecorator:
    """Runs a test once for each of `cases`."""
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@cache
def plain(case: Case) -> Run:
    """The run without Kitsune."""
    return case.run("--plain")


def assert_same(run: Run, case: Case) -> None:
    """Every figure that was logged is that of the run without Kitsune, as closely as the case says."""
    expected = plain(case)
    assert [list(figures) for figures in run.figures] == [list(figures) for figures in expected.figures]
    for name in sorted({name for figures in run.figures for name in figures}):
        relative, absolute = (0.0, case.accuracy) if name == "accuracy" else (case.tolerance, 0.0)
        assert run.series(name) == pytest.approx(expected.series(name), rel=relative, abs=absolute), name
