"""Cross-entropy and embeddings against float64: the references, the kernels in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from kitsune.graph import dataflow
from kitsune.graph.verify import refuse_graph
from kitsune.kernels import vocabulary
from tests.kitsune.kernels.interpreter import as_laid_out, interpreted, normal, patch_interpreter

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (7, 70)  # rows, classes
BLOCKS = [(1, 32, 1), (1, 128, 2)]  # forms of which a row takes several or one
TILES = [(2, 16, 1), (4, 8, 1), (16, 16, 2)]


class Machine:
    """A device, and the operators as they run there; the kernels in a form that may be set."""

    def __init__(self, device: str, launches: ModuleType | None) -> None:
        self.device, self._launches = device, launches
        self._form: Any = None

    def use(self, form: tuple[int, int, int]) -> None:
        if self._launches is not None:
            self._form = self._launches.Form(*form)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if self._launches is None:
            return getattr(torch.ops.kitsune, name).default

        def launch(*arguments: Any, **options: Any) -> Any:
            check = "_check_in_place" if name.endswith("_") else f"_outputs_of_{name}"
            outputs = getattr(vocabulary, check)(*arguments, **options)
            getattr(self._launches, name)(outputs, *arguments, **options, form=self._form)
            return outputs

        return launch


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted("linear_triton", "vocabulary_triton")


@pytest.fixture(params=["reference", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if request.param == "reference":
        return Machine("cpu", None)
    if request.param == "interpreted":
        module = request.getfixturevalue("kernels")
        patch_interpreter(monkeypatch)
        return Machine("cpu", module)
    return Machine("cuda", pytest.importorskip("kitsune.kernels.vocabulary_triton", reason="Triton is not installed"))


def assert_as_accurate(found: Tensor, eager: Tensor, exact: Tensor, what: object = "") -> None:
    """The error is at most twice that of eager and one unit in the last place of the largest value."""
    unit = torch.finfo(found.dtype).eps * exact.abs().max()
    error, allowed = (found.double() - exact).abs().max(), (eager.double() - exact).abs().max()
    assert error <= 2 * allowed + unit, f"{what}: {error} where eager has {allowed}, one unit {unit}"


# Cross-entropy


class Loss:
    """The cross-entropy of random logits, of which some targets are ignored."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: str, scale: float = 3.0) -> None:
        self.logits = normal(shape, dtype, device, 0, scale)
        self.targets = torch.arange(shape[0], device=device) * 17 % shape[1]
        self.targets[3:4] = -100
        self.grad_loss = torch.tensor(8.0, device=device)
        self.options: dict[str, Any] = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0}

    def outcome(self, machine: Machine, in_place: bool = False) -> tuple[Tensor, Tensor]:
        """The loss and the gradient."""
        loss, *saved = machine.cross_entropy(self.logits, self.targets, **self.options)
        arguments = self.grad_loss, self.logits, self.targets, *saved
        if not in_place:
            return loss, machine.cross_entropy_backward(*arguments, **self.options)
        written = torch.empty_strided(
            self.logits.shape, self.logits.stride(), device=self.logits.device, dtype=self.logits.dtype
        )
        written.copy_(self.logits)
        machine.cross_entropy_backward_(self.grad_loss, written, *arguments[2:], **self.options)
        return loss, written

    def by_torch(self, compute: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = self.logits.to(compute).detach().requires_grad_()
        loss = functional.cross_entropy(wide, self.targets, **self.options)
        (grad,) = torch.autograd.grad(loss, wide, self.grad_loss.to(compute))
        return loss.detach(), grad

    def check(self, machine: Machine, what: object = "") -> None:
        exact, (loss, grad) = self.by_torch(torch.float64), self.by_torch(torch.float32)
        found = self.outcome(machine)
        assert_as_accurate(found[0], loss, exact[0], what)
        assert_as_accurate(found[1], grad.to(self.logits.dtype), exact[1], what)


@pytest.mark.parametrize("form", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", vocabulary.REDUCTIONS)
def test_cross_entropy(machine: Machine, form: tuple[int, int, int], dtype: torch.dtype, reduction: str) -> None:
    machine.use(form)
    for shape in (SHAPE, (5, 1), (1, 33), (2, 16), (3, 64)):
        for label_smoothing in (0.0, 0.1):
            loss = Loss(shape, dtype, machine.device)
            loss.options |= {"reduction": reduction, "label_smoothing": label_smoothing}
            loss.check(machine, (shape, label_smoothing))


@pytest.mark.parametrize("form", BLOCKS, ids=str)
def test_what_the_backward_keeps(machine: Machine, form: tuple[int, int, int]) -> None:
    machine.use(form)
    loss = Loss(SHAPE, torch.float32, machine.device)
    _, row_max, log_sum, num_counted = machine.cross_entropy(loss.logits, loss.targets, **loss.options)
    assert torch.equal(row_max, loss.logits.amax(1))
    torch.testing.assert_close((row_max + log_sum).double(), loss.logits.double().logsumexp(1), rtol=1e-6, atol=0)
    assert num_counted == 6


@pytest.mark.parametrize("form", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_gradient_may_take_the_place_of_the_logits(
    machine: Machine, form: tuple[int, int, int], dtype: torch.dtype
) -> None:
    machine.use(form)
    for layout in ("contiguous", "sliced"):
        loss = Loss(SHAPE, dtype, machine.device)
        loss.logits = as_laid_out(loss.logits, layout)
        (_, apart), (_, in_place) = loss.outcome(machine), loss.outcome(machine, in_place=True)
        assert torch.equal(apart, in_place)
        assert apart.is_contiguous()


@pytest.mark.parametrize("form", BLOCKS, ids=str)
def test_slices_and_repetition_do_not_change_a_bit(machine: Machine, form: tuple[int, int, int]) -> None:
    machine.use(form)
    loss = Loss(SHAPE, torch.bfloat16, machine.device)
    expected = loss.outcome(machine)
    assert all(map(torch.equal, loss.outcome(machine), expected))
    loss.logits, loss.targets = as_laid_out(loss.logits, "sliced"), loss.targets.repeat_interleave(2)[::2]
    for one, other in zip(loss.outcome(machine), expected, strict=True):
        tolerance = 16 * torch.finfo(one.dtype).eps if one.is_cuda else 0.0  # sums may be compiled differently
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize("form", BLOCKS, ids=str)
def test_confident_rows(machine: Machine, form: tuple[int, int, int]) -> None:
    """Where the target is all but certain, loss and gradient are differences of large numbers."""
    machine.use(form)
    loss = Loss(SHAPE, torch.float32, machine.device, scale=1.0)
    loss.targets.clamp_min_(0)
    loss.logits += 100
    loss.logits.scatter_add_(1, loss.targets[:, None], torch.full((SHAPE[0], 1), 15.0, device=machine.device))
    loss.check(machine)


@pytest.mark.parametrize("form", BLOCKS, ids=str)
def test_every_target_ignored(machine: Machine, form: tuple[int, int, int]) -> None:
    machine.use(form)
    loss = Loss(SHAPE, torch.float32, machine.device)
    loss.targets.fill_(7)
    for reduction in vocabulary.REDUCTIONS:
        loss.options |= {"reduction": reduction, "ignore_index": 7}
        value, grad = loss.outcome(machine)
        assert value.isnan() if reduction == "mean" else value == 0
        assert not grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("form", BLOCKS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [2, 3])  # the latter's target is ignored
def test_logits_that_are_not_finite(machine: Machine, form: tuple[int, int, int], bad: float, row: int) -> None:
    machine.use(form)
    for columns in (slice(5, 6), slice(0, 40), slice(0, None)):  # one, a whole block, all
        loss = Loss(SHAPE, torch.float32, machine.device)
        loss.logits[row, columns] = bad
        for one, other in zip(loss.outcome(machine), loss.by_torch(torch.float32), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_no_rows_of_logits(machine: Machine) -> None:
    loss = Loss((0, 5), torch.bfloat16, machine.device)
    value, grad = loss.outcome(machine)
    assert value.isnan()
    assert (grad.shape, grad.dtype) == ((0, 5), torch.bfloat16)


def test_a_target_out_of_range_is_an_error_on_the_cpu() -> None:
    loss = Loss(SHAPE, torch.float32, "cpu")
    loss.targets[5] = SHAPE[1]
    with pytest.raises(IndexError):
        vocabulary.cross_entropy(loss.logits, loss.targets, reduction="mean")


# Embeddings


@pytest.mark.parametrize("form", TILES, ids=str)
@pytest.mark.parametrize("of_indices", [torch.int32, torch.int64], ids=str)
def test_embedding(machine: Machine, form: tuple[int, int, int], of_indices: torch.dtype) -> None:
    machine.use(form)
    for dtype in DTYPES:
        weight, added = (normal((11, 20), dtype, machine.device, seed) for seed in range(2))
        indices = torch.arange(15, device=machine.device, dtype=of_indices).view(3, 5) * 4 % 11
        positions = torch.arange(5, device=machine.device).flip(0)
        plain = weight[indices.long()]
        assert torch.equal(machine.embedding(weight, indices, None, None), plain)
        for shape in ((5,), (1, 5)):
            found = machine.embedding(weight, indices, added, positions.view(shape))
            assert torch.equal(found, plain + added[positions])
        same = machine.embedding(weight, indices, added, indices)
        assert torch.equal(same, plain + added[indices.long()])


def test_embedding_of_slices(machine: Machine) -> None:
    machine.use(TILES[1])
    weight = as_laid_out(normal((11, 20), torch.float32, machine.device, 0), "sliced")
    indices = (torch.arange(18, device=machine.device) % 11).view(3, 6)[:, 1:]
    added = weight[::2]
    positions = torch.tensor(3, device=machine.device)
    found = machine.embedding(weight, indices, added, positions)
    assert torch.equal(found, weight[indices] + added[positions])
    assert found.is_contiguous()
    assert machine.embedding(weight, indices[:, :0], None, None).shape == (3, 0, 20)


def test_an_index_out_of_range_is_an_error_on_the_cpu() -> None:
    with pytest.raises(IndexError):
        vocabulary.embedding(torch.ones(3, 4), torch.tensor([0, 3]))


def gradient_in(
    dtype: torch.dtype, grad: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int = -1
) -> Tensor:
    """By PyTorch, of indices that are in range."""
    return torch.ops.aten.embedding_dense_backward(grad.to(dtype), indices.long(), num_embeddings, padding_idx, False)


@pytest.mark.slow
@pytest.mark.parametrize("form", TILES, ids=str)
@pytest.mark.parametrize("padding_idx", [-1, 3])
def test_embedding_backward(machine: Machine, form: tuple[int, int, int], padding_idx: int) -> None:
    """Indices come once, not at all, or so often that they fill runs; -1 is no index by itself."""
    machine.use(form)
    for dtype, of_indices in zip(DTYPES, (torch.int64, torch.int32, torch.int64), strict=True):
        repeated = [torch.full((count,), index) for index, count in ((3, 150), (0, 20), (4, 70), (9, 1), (10, 1))]
        indices = torch.cat(repeated)[torch.randperm(242)].to(machine.device, of_indices).view(2, 121)
        grad = as_laid_out(normal((2, 121, 10), dtype, machine.device, 0), "sliced")
        options = {"num_embeddings": 12, "padding_idx": padding_idx}
        exact = gradient_in(torch.float64, grad.flatten(0, 1), indices.flatten(), 12, padding_idx)
        eager = gradient_in(torch.float32, grad.flatten(0, 1), indices.flatten(), 12, padding_idx)
        found = machine.embedding_backward(grad, indices, **options, dtype=dtype)
        assert found.dtype == dtype
        assert_as_accurate(found, eager.to(dtype), exact, dtype)
        assert not found[[1, 2, 11]].any()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_precisions_of_the_gradient_of_a_table(machine: Machine, dtype: torch.dtype) -> None:
    machine.use(TILES[0])
    grad = normal((9, 10), torch.bfloat16, machine.device, 0)
    indices = torch.arange(9, device=machine.device) % 4
    exact, eager = (gradient_in(compute, grad, indices, 5) for compute in (torch.float64, torch.float32))
    options = {"num_embeddings": 5, "padding_idx": -1, "dtype": dtype}
    found = machine.embedding_backward(grad, indices, **options)
    assert_as_accurate(found, eager.to(dtype), exact)
    assert torch.equal(machine.embedding_backward(grad, indices, **options), found)


@pytest.mark.parametrize("form", TILES, ids=str)
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float16, torch.bfloat16)]
)
def test_the_gradient_of_a_table_is_added_to_another(
    machine: Machine, form: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Also to rows of which no index is, and to that of the padding."""
    machine.use(form)
    added = as_laid_out(normal((12, 10), dtypes[0], machine.device, 1), "sliced")
    grad = normal((150, 10), torch.bfloat16, machine.device, 0)
    indices = torch.arange(150, device=machine.device) ** 2 % 11
    options = {"num_embeddings": 12, "padding_idx": 5, "dtype": dtypes[1]}
    exact, eager = (gradient_in(compute, grad, indices, 12, 5) for compute in (torch.float64, torch.float32))
    found = machine.embedding_backward(grad, indices, added, **options)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtypes[1], (12, 10), True)
    assert_as_accurate(found, (eager + added).to(dtypes[1]), exact + added.double())
    assert torch.equal(found[[5, 11]], added[[5, 11]].to(dtypes[1]))


@pytest.mark.parametrize("count", [63, 64, 65, 128, 200])
def test_one_index_alone(machine: Machine, count: int) -> None:
    machine.use(TILES[1])
    grad = normal((count, 8), torch.float32, machine.device, 0)
    indices = torch.zeros(count, dtype=torch.int64, device=machine.device)
    found = machine.embedding_backward(grad, indices, num_embeddings=1, padding_idx=-1, dtype=torch.float32)
    torch.testing.assert_close(found.double(), grad.double().sum(0, keepdim=True), rtol=1e-6, atol=1e-5)


def test_indices_out_of_range_count_for_nothing(machine: Machine) -> None:
    machine.use(TILES[1])
    indices = torch.tensor([2, -1, 5, 0, 2**40, -(2**40), 4, 2] * 20, device=machine.device)
    grad = normal((160, 8), torch.float32, machine.device, 0)
    legal = (indices >= 0) & (indices < 5)
    exact = gradient_in(torch.float64, grad[legal], indices[legal], 5)
    found = machine.embedding_backward(grad, indices, num_embeddings=5, padding_idx=-1, dtype=torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_not_finite_reach_their_index_alone(machine: Machine) -> None:
    machine.use(TILES[1])
    grad = normal((150, 8), torch.float32, machine.device, 0)
    indices = torch.arange(150, device=machine.device) % 2
    grad[6, 1], grad[7, 2] = float("nan"), float("inf")
    found = machine.embedding_backward(grad, indices, num_embeddings=3, padding_idx=-1, dtype=torch.float32)
    finite = torch.ones(3, 8, dtype=torch.bool, device=machine.device)
    finite[0, 1] = finite[1, 2] = False
    assert torch.equal(found.isfinite(), finite)


def test_no_indices(machine: Machine) -> None:
    indices = torch.zeros(0, dtype=torch.int64, device=machine.device)
    grad = torch.ones(0, 8, device=machine.device)
    found = machine.embedding_backward(grad, indices, num_embeddings=3, padding_idx=-1, dtype=torch.float16)
    assert torch.equal(found, torch.zeros(3, 8, dtype=torch.float16, device=machine.device))


# On a GPU


@pytest.mark.gpu
def test_all_forms_of_losses_work() -> None:
    launches = pytest.importorskip("kitsune.kernels.vocabulary_triton", reason="Triton is not installed")
    machine = Machine("cuda", launches)
    loss = Loss((33, 50257), torch.bfloat16, "cuda")
    for form in launches.loss_forms(50257):
        machine.use(form)
        loss.check(machine, form)


@pytest.mark.gpu
def test_all_forms_of_embeddings_work() -> None:
    launches = pytest.importorskip("kitsune.kernels.vocabulary_triton", reason="Triton is not installed")
    machine = Machine("cuda", launches)
    weight = normal((1000, 768), torch.float32, "cuda", 0)
    indices = torch.randint(1000, (4, 512), device="cuda").clamp_max_(900)
    grad = normal((4, 512, 768), torch.bfloat16, "cuda", 1)
    exact = gradient_in(torch.float64, grad.flatten(0, 1), indices.flatten(), 1000)
    eager = gradient_in(torch.float32, grad.flatten(0, 1), indices.flatten(), 1000)
    options = {"num_embeddings": 1000, "padding_idx": -1, "dtype": torch.float32}
    for form in launches.embedding_forms(2048, 768):
        machine.use(form)
        assert torch.equal(machine.embedding(weight, indices, None, None), weight[indices])
        found = machine.embedding_backward(grad, indices, **options)
        assert_as_accurate(found, eager, exact, form)
        assert torch.equal(machine.embedding_backward(grad, indices, **options), found)


@pytest.mark.gpu
def test_trials_do_not_change_the_logits() -> None:
    pytest.importorskip("kitsune.kernels.vocabulary_triton", reason="Triton is not installed")
    loss = Loss((65, 4099), torch.float32, "cuda")
    value, *saved = vocabulary.cross_entropy(loss.logits, loss.targets, reduction="mean")
    written = loss.logits.clone()
    vocabulary.cross_entropy_backward_(loss.grad_loss, written, loss.targets, *saved, reduction="mean")
    exact, eager = loss.by_torch(torch.float64), loss.by_torch(torch.float32)
    assert_as_accurate(value, eager[0], exact[0])
    assert_as_accurate(written, eager[1], exact[1])


@pytest.mark.gpu
def test_more_logits_than_32_bits_count() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 30 * 2**30:
        pytest.skip("needs 30 GB of device memory")
    logits = torch.empty((2**31 // 65536 + 8, 65536), dtype=torch.bfloat16, device="cuda").normal_()
    targets = torch.arange(len(logits), device="cuda")
    last, grad_loss = logits[-2:].clone(), torch.ones((), device="cuda")
    _, *saved = vocabulary.cross_entropy(logits, targets, reduction="sum")
    vocabulary.cross_entropy_backward_(grad_loss, logits, targets, *saved, reduction="sum")
    exact = last.double().softmax(1)
    exact[[0, 1], targets[-2:]] -= 1
    torch.testing.assert_close(logits[-2:].double(), exact, rtol=2**-8, atol=1e-9)


# The forms


@pytest.mark.parametrize("num_cols", [1, 64, 768, 50257, 10**6])
def test_forms(kernels: ModuleType, num_cols: int) -> None:
    for found in (kernels.loss_forms(num_cols), *(kernels.embedding_forms(rows, num_cols) for rows in (1, 64, 10**5))):
        assert 1 <= len(found) <= 12
        assert len(set(found)) == len(found)
        for form in found:
            assert form.block_cols < 2 * num_cols
            for number in form:
                assert number & (number - 1) == 0
    assert all(kernels.RUN % form.block_rows == 0 for form in kernels.embedding_forms(kernels.RUN, num_cols))


# The operators


def calls(dtype: torch.dtype = torch.float32) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Arguments for each operator."""
    loss = Loss(SHAPE, dtype, "cpu")
    loss.logits = as_laid_out(loss.logits, "sliced")
    _, *saved = vocabulary.cross_entropy(loss.logits, loss.targets, reduction="mean")
    backward = [loss.grad_loss, loss.logits, loss.targets, *saved]
    weight, indices = normal((9, 4), dtype, "cpu", 0), torch.arange(6).view(2, 3)
    options = {"num_embeddings": 9, "padding_idx": -1, "dtype": torch.float32}
    return {
        "cross_entropy": ([loss.logits, loss.targets], loss.options),
        "cross_entropy_backward": (backward, loss.options),
        "cross_entropy_backward_": (backward, loss.options),
        "embedding": ([weight, indices, weight[::2], indices[0]], {}),
        "embedding_backward": ([weight[:6].view(2, 3, 4), indices.t().contiguous().t(), weight], options),
    }


NAMES = tuple(calls())


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_what_they_declare(name: str) -> None:
    arguments, options = calls(torch.bfloat16)[name]
    operator = getattr(torch.ops.kitsune, name).default
    torch.library.opcheck(operator, tuple(arguments), options, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_")])
def test_fakes_are_laid_out_like_results(name: str) -> None:
    arguments, options = calls(torch.float16)[name]
    real = getattr(vocabulary, name)(*arguments, **options)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in arguments]
        fake = getattr(vocabulary, name)(*faked, **options)
    pairs = [(fake, real)] if isinstance(real, Tensor) else list(zip(fake, real, strict=True))
    for one, other in pairs:
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_each_operator_is_one_node_of_a_legal_graph(name: str) -> None:
    arguments, options = calls()[name]
    operator = getattr(torch.ops.kitsune, name).default
    graph = make_fx(lambda *tensors: operator(*tensors, **options), tracing_mode="fake")(*arguments).graph
    assert [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)] == [operator]
    assert refuse_graph(graph) is None
    assert set(dataflow.written_inputs(graph)) == ({1} if name.endswith("_") else set())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_operators_run_the_kernels(name: str) -> None:
    arguments, options = calls()[name]
    on_device = [one.cuda() for one in arguments]
    found, expected = (getattr(torch.ops.kitsune, name)(*given, **options) for given in (on_device, arguments))
    if name.endswith("_"):
        found, expected = on_device[1], arguments[1]
    pairs = [(found, expected)] if isinstance(expected, Tensor) else list(zip(found, expected, strict=True))
    for one, other in pairs:
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"logits": torch.ones(5)}, r"takes logits of two dimensions, \(M, V\): got \(5,\)"),
        ({"logits": torch.ones(3, 0)}, r"takes logits of .* 1 to .* columns: got \(3, 0\)"),
        ({"logits": torch.ones(3, 5).double()}, "takes logits in float32, bfloat16 or float16: got torch.float64"),
        ({"logits": torch.ones(5, 3).t()}, "takes logits with contiguous, evenly spaced rows"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"takes 3 targets of torch.int64 on cpu: got \(2,\)"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, "takes 3 targets of torch.int64 on cpu: got .* torch.int32"),
        ({"reduction": "none"}, "knows the reductions mean, sum: got 'none'"),
        ({"label_smoothing": 1.5}, "takes a label_smoothing of 0 to 1: got 1.5"),
    ],
)
def test_what_cross_entropy_refuses(changes: dict[str, Any], problem: str) -> None:
    given = {"logits": torch.ones(3, 5), "targets": torch.zeros(3, dtype=torch.int64), "reduction": "mean"}
    with pytest.raises(ValueError, match=f"cross_entropy {problem}"):
        vocabulary.cross_entropy(**{**given, **changes})


def test_what_its_backward_refuses() -> None:
    arguments, options = calls()["cross_entropy_backward"]
    for index, bad, problem in (
        (0, torch.ones(2), r"takes grad_loss of shape \(\) in torch.float32 on cpu: got \(2,\)"),
        (3, torch.ones(6), r"takes row_max of shape \(7,\)"),
        (4, torch.ones(7).half(), "takes log_sum of shape .* in torch.float16"),
        (5, torch.ones((), dtype=torch.int64), "takes num_counted .* in torch.int64"),
    ):
        given = [*arguments[:index], bad, *arguments[index + 1 :]]
        with pytest.raises(ValueError, match=f"cross_entropy_backward {problem}"):
            vocabulary.cross_entropy_backward(*given, **options)
    arguments[1] = torch.ones(1, 70).expand(7, 70)
    with pytest.raises(ValueError, match="writes over logits whose rows do not overlap"):
        vocabulary.cross_entropy_backward_(*arguments, **options)


TABLE, INDICES = torch.ones(6, 4), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((torch.ones(4), INDICES), r"takes weight of two dimensions, \(V, N\): got \(4,\)"),
        ((TABLE.double(), INDICES), "takes weight in float32, bfloat16 or float16"),
        ((TABLE, INDICES.half()), "takes indices in torch.int32 or torch.int64 on cpu: got torch.float16"),
        ((TABLE, INDICES, TABLE), "takes both added_weight and added_indices or none"),
        ((TABLE, INDICES, TABLE.half(), INDICES), r"takes added_weight of 4 columns of torch.float32: got \(6, 4\)"),
        ((TABLE, INDICES, TABLE[:, :3], INDICES), r"takes added_weight of 4 columns .* got \(6, 3\)"),
        ((TABLE, INDICES, TABLE, INDICES[:, :1]), r"takes added_indices of the shape of indices, \(2, 3\)"),
        ((TABLE, INDICES, TABLE, INDICES[None]), r"of its last dimensions: got \(1, 2, 3\)"),
    ],
)
def test_what_embedding_refuses(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=f"embedding {problem}" if problem.startswith("takes") else problem):
        vocabulary.embedding(*arguments)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"grad": torch.ones(2, 2, 4)}, r"takes grad of shape \(2, 3, 4\) on cpu: got \(2, 2, 4\)"),
        ({"indices": INDICES.bool()}, "takes indices in torch.int32 or torch.int64 on cpu: got torch.bool"),
        ({"num_embeddings": 0}, "takes a table of at least one row: got num_embeddings=0"),
        ({"dtype": torch.float64}, "gives results in float32, bfloat16 or float16: got torch.float64"),
        ({"added": torch.ones(5, 4)}, r"takes added of shape \(6, 4\) on cpu: got \(5, 4\)"),
    ],
)
def test_what_the_backward_of_embedding_refuses(changes: dict[str, Any], problem: str) -> None:
    given = {"grad": torch.ones(2, 3, 4), "indices": INDICES, "num_embeddings": 6, "dtype": torch.float32}
    with pytest.raises(ValueError, match=f"embedding_backward {problem}"):
        vocabulary.embedding_backward(**{**given, **changes})
