"""The synthetic texts: deterministic everywhere, fresh for every number, and with a structure that can be learned."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.synthetic_text import SyntheticDocuments, SyntheticText
from models.workload import Data
from tests.models.test_synthetic import fingerprint

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = SyntheticDocuments(128, 1000)
TEXT = SyntheticText(64, 1000, num_states=16)


def test_documents_are_tokens_and_a_class() -> None:
    x, y = DOCUMENTS.batch(5, index=2)
    assert (x.shape, x.dtype, x.is_contiguous()) == ((5, 128), torch.int64, True)
    assert (y.shape, y.dtype) == ((5,), torch.int64)


def test_texts_are_tokens_and_the_tokens_after_them() -> None:
    x, y = TEXT.batch(5, index=2)
    assert (x.shape, x.dtype, x.is_contiguous()) == ((5, 64), torch.int64, True)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((5, 64), torch.int64, True)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_documents_use_the_whole_vocabulary_as_texts_do() -> None:
    x, y = DOCUMENTS.batch(3000)
    counts = torch.bincount(x.flatten(), minlength=1000)
    assert len(counts) == 1000
    assert (counts > 0).all()
    assert counts.max() > 20 * counts.median()
    assert torch.bincount(y, minlength=2).min() > 1200


def test_the_signal_is_what_the_classes_of_documents_differ_by() -> None:
    frequencies = []
    for signal in (0.3, 0.6):
        x, y = SyntheticDocuments(128, 1000, signal=signal).batch(3000)
        counts = [torch.bincount(x[y == label].flatten(), minlength=1000).double() for label in (0, 1)]
        frequencies.append([count / count.sum() for count in counts])
    weak, strong = ((a - b).abs().sum().item() for a, b in frequencies)
    assert weak > 0.3
    assert strong / weak == pytest.approx(2, rel=0.1)


def test_four_tokens_follow_each_token_of_a_text_and_all_equally_often() -> None:
    x, y = TEXT.batch(400)
    states = torch.unique(x)
    assert len(states) == 16
    for state in states:
        _, counts = torch.unique(y[x == state], return_counts=True)
        assert len(counts) == 4
        share = counts / counts.sum()
        assert -(share * share.log()).sum().item() == pytest.approx(math.log(4), rel=0.01)


@pytest.mark.parametrize("kind", [SyntheticDocuments, SyntheticText])
class TestBothKinds:
    @given(index=st.integers(0, 2**40), batch_size=st.integers(1, 9), seed=st.integers(-(2**40), 2**40))
    def test_the_same_number_is_the_same_batch(
        self, kind: type[SyntheticDocuments | SyntheticText], index: int, batch_size: int, seed: int
    ) -> None:
        data = kind(32, 300, seed=seed)
        first = fingerprint(*data.batch(batch_size, index=index))
        torch.rand(1)
        assert fingerprint(*data.batch(batch_size, index=index)) == first
        assert fingerprint(*data.batch(batch_size, index=index + 1)) != first

    def test_another_process_draws_the_same_batch(self, kind: type[SyntheticDocuments | SyntheticText]) -> None:
        program = (
            f"from models.synthetic_text import {kind.__name__}\n"
            "from tests.models.test_synthetic import fingerprint\n"
            f"print(fingerprint(*{kind.__name__}(32, 300).batch(16, index=7)))"
        )
        other = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        assert other.stdout.strip() == fingerprint(*kind(32, 300).batch(16, index=7))

    def test_batches_belong_to_the_caller(self, kind: type[SyntheticDocuments | SyntheticText]) -> None:
        data = kind(32, 300)
        x, y = data.batch(4)
        expected = fingerprint(x, y)
        x.zero_()
        y.zero_()
        assert fingerprint(*data.batch(4)) == expected

    def test_global_state_neither_matters_nor_changes(self, kind: type[SyntheticDocuments | SyntheticText]) -> None:
        expected = fingerprint(*kind(32, 300, seed=5).batch(4))
        state = torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                x, y = kind(32, 301, seed=5).batch(4)
                again = kind(32, 300, seed=5).batch(4)
        finally:
            torch.set_default_dtype(torch.float32)
        assert x.device.type == y.device.type == "cpu"
        assert fingerprint(*again) == expected
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize(("batch_size", "index", "message"), [(0, 0, "at least 1, not 0"), (1, -2, "negative")])
    def test_impossible_batches_are_refused(
        self, kind: type[SyntheticDocuments | SyntheticText], batch_size: int, index: int, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            kind(32, 300).batch(batch_size, index=index)


def test_impossible_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1, not be 0"):
        SyntheticDocuments(8, 10, signal=0)
    for num_states in (3, 11):
        with pytest.raises(ValueError, match=f"between 4 and the vocabulary's 10, not be {num_states}"):
            SyntheticText(8, 10, num_states=num_states)


@pytest.mark.gpu
@pytest.mark.parametrize("data", [DOCUMENTS, TEXT])
def test_the_gpu_gets_the_same_batch(data: Data) -> None:
    x, y = data.batch(8, index=1, device="cuda")
    assert x.is_cuda
    assert y.is_cuda
    assert fingerprint(x.cpu(), y.cpu()) == fingerprint(*data.batch(8, index=1))
