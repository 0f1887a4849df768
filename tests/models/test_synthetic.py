"""The synthetic images: deterministic everywhere, fresh for every number, and without side effects."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.synthetic import SyntheticImages

ROOT = Path(__file__).resolve().parents[2]
GRAY = SyntheticImages((1, 28, 28))
COLOUR = SyntheticImages((3, 32, 32))


def fingerprint(x: torch.Tensor, y: torch.Tensor) -> str:
    return hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("data", [GRAY, COLOUR])
def test_batches_have_the_shapes_and_types_of_the_real_sets(data: SyntheticImages) -> None:
    x, y = data.batch(5, index=2)
    assert (x.shape, x.dtype, x.is_contiguous()) == ((5, *data.shape), torch.float32, True)
    assert (y.shape, y.dtype) == ((5,), torch.int64)
    assert not x.requires_grad


def test_pixels_are_normalized_and_classes_balanced() -> None:
    x, y = COLOUR.batch(2000)
    assert abs(x.mean().item()) < 0.02
    assert abs(x.var().item() - 1) < 0.05
    assert torch.bincount(y, minlength=10).min() > 100


@given(index=st.integers(0, 2**40), batch_size=st.integers(1, 9), seed=st.integers(-(2**40), 2**40))
def test_the_same_number_is_the_same_batch(index: int, batch_size: int, seed: int) -> None:
    data = SyntheticImages((1, 28, 28), seed=seed)
    torch.rand(1)
    first = data.batch(batch_size, index=index)
    torch.rand(1)
    assert fingerprint(*data.batch(batch_size, index=index)) == fingerprint(*first)
    assert fingerprint(*data.batch(batch_size, index=index + 1)) != fingerprint(*first)


def test_images_may_be_large_and_classes_many() -> None:
    x, y = SyntheticImages((3, 224, 224), num_classes=1000).batch(8)
    assert (x.shape, y.max().item() < 1000) == ((8, 3, 224, 224), True)
    assert torch.unique(y).numel() > 4
    assert (x.mean((1, 2, 3)).abs() < 0.02).all()
    assert ((x.var((1, 2, 3)) - 1).abs() < 0.05).all()


def test_sets_of_different_seeds_show_different_classes() -> None:
    means = [SyntheticImages((1, 28, 28), seed=seed).batch(4000)[0].mean(0) for seed in (0, 1)]
    assert not torch.allclose(means[0], means[1], atol=0.02)


def test_another_process_draws_the_same_batch() -> None:
    program = (
        "from models.synthetic import SyntheticImages\n"
        "from tests.models.test_synthetic import fingerprint\n"
        "print(fingerprint(*SyntheticImages((3, 32, 32)).batch(16, index=7)))"
    )
    other = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == fingerprint(*COLOUR.batch(16, index=7))


def test_batches_belong_to_the_caller() -> None:
    x, y = GRAY.batch(4)
    expected = fingerprint(x, y)
    x.zero_()
    y.zero_()
    assert fingerprint(*GRAY.batch(4)) == expected


def test_global_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    COLOUR.batch(4)
    SyntheticImages((1, 28, 28), seed=123).batch(4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("batch_size", "index", "message"), [(0, 0, "at least 1, not 0"), (-1, 0, "not -1"), (1, -2, "negative, not -2")]
)
def test_impossible_batches_are_refused(batch_size: int, index: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRAY.batch(batch_size, index=index)


def test_an_impossible_signal_is_refused() -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1, not be 1\.5"):
        SyntheticImages((1, 28, 28), signal=1.5)


@pytest.mark.gpu
def test_the_gpu_gets_the_same_batch() -> None:
    state = torch.cuda.get_rng_state()
    x, y = COLOUR.batch(8, index=1, device="cuda")
    assert x.is_cuda
    assert y.is_cuda
    assert fingerprint(x.cpu(), y.cpu()) == fingerprint(*COLOUR.batch(8, index=1))
    assert torch.equal(torch.cuda.get_rng_state(), state)
