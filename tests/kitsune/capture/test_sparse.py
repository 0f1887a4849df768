"""Sparse gradients of embeddings: what a replayed call leaves is, to the bit, what autograd leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from kitsune.capture.sparse import SparseGradient

STEPS = 8
ROWS, PADDING = 20, 3


class Text(nn.Module):
    """Looks words up in one way or another, and classifies them."""

    def __init__(self, look_up: Callable[[Text, Tensor], Tensor], padding: int | None = None) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(ROWS, 6, padding, sparse=True), nn.EmbeddingBag(ROWS, 6, sparse=True)
        self.head = nn.Linear(6, 4)
        self._look_up = look_up

    def forward(self, words: Tensor) -> Tensor:
        found = self._look_up(self, words)
        return self.head(found.mean(1) if found.dim() == 3 else found)


def plainly(model: Text, words: Tensor) -> Tensor:
    return model.table(words)


def beside(model: Text, words: Tensor) -> Tensor:
    """Of two lookups the one that gives a gradient has no padding."""
    with torch.no_grad():
        other = functional.embedding(words, model.table.weight, PADDING, sparse=True)
    return other + functional.embedding(words, model.table.weight.clone(), sparse=True)


def batches(place: str, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Of words with padding among them, of padding alone in one batch."""
    generator = torch.Generator().manual_seed(1)
    for index in range(steps):
        words = torch.randint(ROWS, (5, 7), generator=generator)
        words[:, index % 7] = PADDING
        labels = torch.randint(4, (5,), generator=generator)
        yield (torch.full_like(words, PADDING) if index == 5 else words).to(place), labels.to(place)


def train(
    build: Callable[[], Text],
    wrap: Callable[..., Any] | None,
    *,
    place: str = "cpu",
    num_backward: int = 1,
    kept: bool = False,
) -> tuple[list[Tensor], Text, Any]:
    """The losses, gradients and weights of a loop of updates by SparseAdam and Adam; `kept` ones are kept for good."""
    torch.manual_seed(0)
    model = build().to(place)
    tables = [model.table.weight, model.bag.weight]
    others = [param for param in model.parameters() if all(param is not table for table in tables)]
    optimizers: list[Any] = [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(others, lr=0.1)]
    if wrap is not None:
        optimizers[0] = wrap(optimizers[0])
    seen, grads = list[Tensor](), list[Tensor]()
    for words, labels in batches(place):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(num_backward):
            loss = functional.cross_entropy(model(words), labels)
            loss.backward()
        seen.append(loss.detach())
        for param in model.parameters():
            if param.grad is not None:
                (grads if kept else seen).append(param.grad if kept else param.grad.clone())
        for optimizer in optimizers:
            optimizer.step()
    return [*seen, *grads, *model.parameters()], model, optimizers[0]


def parts(tensor: Tensor) -> list[Any]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values(), torch.tensor(tensor.size()), torch.tensor(tensor.is_coalesced())]
    return [tensor]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert [one.layout for one in found] == [one.layout for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        for part, expected in zip(parts(one), parts(other), strict=True):
            torch.testing.assert_close(part, expected, rtol=0.0, atol=0.0)


LOOKUPS: dict[str, Callable[[], Text]] = {
    "without padding": lambda: Text(plainly),
    "padding": lambda: Text(plainly, PADDING),
    "padding counted from the end": lambda: Text(plainly, PADDING - ROWS),
    "int32": lambda: Text(lambda model, words: model.table(words.int()), PADDING),
    "what is looked up is computed": lambda: Text(lambda model, words: model.table((words + 1) % ROWS), PADDING),
    "norms are bounded": lambda: Text(
        lambda model, words: functional.embedding(words, model.table.weight, PADDING, 1.5, sparse=True), PADDING
    ),
    "norms are bounded, without padding": lambda: Text(
        lambda model, words: functional.embedding(words, model.table.weight, None, 1.5, 1.0, sparse=True)
    ),
    "one text": lambda: Text(lambda model, words: model.table(words[0])[:5], PADDING),
    "one word": lambda: Text(lambda model, words: model.table(words[0, 0]).expand(5, -1)),
    "one word, of a copy": lambda: Text(
        lambda model, words: functional.embedding(
            words[:1, :1], model.table.weight.clone(), PADDING, sparse=True
        ).expand(5, -1, -1)
    ),
    "not contiguous": lambda: Text(lambda model, words: model.table(words.t()).transpose(0, 1), PADDING),
    "without nn.functional": lambda: Text(
        lambda model, words: torch.embedding(model.table.weight, words, -1, False, True)
    ),
    "beside one without gradients": lambda: Text(beside),
    "beside one that is detached": lambda: Text(
        lambda model, words: (
            model.table(words) + functional.embedding(words, model.table.weight, 4, sparse=True).detach()
        ),
        PADDING,
    ),
    "expanded gradients": lambda: Text(lambda model, words: model.table(words).sum(1, keepdim=True).expand(-1, 3, -1)),
}


@pytest.mark.filterwarnings("error:.*[Ss]parse")
@pytest.mark.parametrize("options", [{}, {"verify": 2}, {"defer_loss": True}], ids=str)
@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup(name: str, options: dict[str, Any], place: str) -> None:
    wanted, _, _ = train(LOOKUPS[name], None, place=place)
    found, _, optimizer = train(
        LOOKUPS[name], lambda one: kitsune.KitsuneOptimizer(one, mode="replay", **options), place=place
    )
    assert_same(found, wanted)
    status = optimizer.status()
    assert status.replays == STEPS - 2
    assert status.covered == ("forward", "backward")
    assert any("sparse, so the update runs eagerly" in refusal for refusal in status.refusals)
    assert any("not deferred: a gradient is sparse" in refusal for refusal in status.refusals) == bool(
        options.get("defer_loss")
    )


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize(("num_backward", "kept"), [(3, False), (1, True), (2, True)])
def test_gradients_that_are_added_up_or_kept(num_backward: int, kept: bool, padding: int | None, place: str) -> None:
    """None of them is overwritten by a later replay."""

    def build() -> Text:
        return Text(plainly, padding)

    wanted, _, _ = train(build, None, place=place, num_backward=num_backward, kept=kept)
    found, _, optimizer = train(
        build,
        lambda one: kitsune.KitsuneOptimizer(one, mode="replay"),
        place=place,
        num_backward=num_backward,
        kept=kept,
    )
    assert_same(found, wanted)
    assert optimizer.status().covered == ("forward", "backward")


REFUSED: dict[str, tuple[Callable[[Text, Tensor], Tensor], str]] = {
    "twice": (lambda model, words: model.table(words) + model.table(words + 0), "is what aten.add.Tensor gives"),
    "twice, with several paddings": (
        lambda model, words: model.table(words) + functional.embedding(words, model.table.weight, 4, sparse=True),
        "is what aten.add.Tensor gives",
    ),
    "scaled": (
        lambda model, words: functional.embedding(words, model.table.weight * 2, sparse=True),
        "is what aten.mul.Tensor gives",
    ),
    "padding without nn.functional": (
        lambda model, words: torch.embedding(model.table.weight, words, PADDING, False, True),
        "depends on the values",
    ),
    "bag": (lambda model, words: model.bag(words), "is what aten._embedding_bag_backward.default gives"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name: str) -> None:
    look_up, reason = REFUSED[name]
    wanted, _, _ = train(lambda: Text(look_up, PADDING), None)
    found, _, optimizer = train(
        lambda: Text(look_up, PADDING), lambda one: kitsune.KitsuneOptimizer(one, mode="replay")
    )
    assert_same(found, wanted)
    status = optimizer.status()
    assert status.replays == 0
    assert reason in status.reason
    assert ("sparse=False" in status.reason) == ("depends" not in reason)


def test_a_backward_pass_that_is_differentiated_leaves_padding_out_too() -> None:
    model, other = Text(plainly, PADDING), Text(plainly, PADDING)
    other.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mode="replay")
    for index, (words, labels) in enumerate(batches("cpu", 5)):
        for one, its in ((model, optimizer), (other, plain)):
            its.zero_grad()
            functional.cross_entropy(one(words), labels).backward(create_graph=index == 4)
            grad = one.table.weight.grad
            assert grad is not None
            assert PADDING not in grad._indices()
            its.step()
        assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert optimizer.status().replays == 3


@pytest.mark.parametrize(
    "words",
    [
        torch.tensor([[3, 5], [1, 3]]),
        torch.tensor([[3, 5], [1, 3]], dtype=torch.int32),
        torch.tensor([[3, 5], [1, 3]]).t(),
    ],
    ids=["int64", "int32", "not contiguous"],
)
@pytest.mark.parametrize("padding", [None, PADDING])
def test_words_that_are_edited_before_the_backward_pass(words: Tensor, padding: int | None) -> None:
    """Which autograd keeps, and replays have copies of."""
    model = Text(plainly, padding)
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mode="replay")
    for index in range(5):
        optimizer.zero_grad()
        loss = model(words).sum()
        if index in (0, 4):
            words[0, 0] = 2
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
    assert optimizer.status().replays >= 2


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_replay_is_verified_with_its_sparse_gradients(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Text(plainly, PADDING)
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mode="replay")

    def iteration(words: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
        return loss

    *earlier, last = batches("cpu", 5)
    for words, labels in earlier:
        iteration(words, labels)
    if is_wrong:
        made = SparseGradient.made
        monkeypatch.setattr(SparseGradient, "made", lambda self, values, saved: made(self, values * 2, saved))
    before = [param.detach().clone() for param in model.parameters()]
    found = kitsune.verify(iteration, *last, optimizer=optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    assert found.replayed
    assert found.agrees is not is_wrong
    assert any("table.weight" in one.name for one in found.differences) is is_wrong


@pytest.mark.parametrize("beside", [False, True])
def test_a_check_puts_sparse_momentum_back(beside: bool) -> None:
    """Which is the wrapped optimizer's, or that of one `beside` it."""
    torch.manual_seed(0)
    model = Text(plainly, PADDING)
    momentum = torch.optim.SGD((model.table if beside else model).parameters(), lr=0.1, momentum=0.9)
    others = [torch.optim.SGD(model.head.parameters(), lr=0.1), momentum] if beside else [momentum]
    wrapped = kitsune.KitsuneOptimizer(others[0], mode="replay")

    def iteration(words: Tensor, labels: Tensor) -> Tensor:
        model.zero_grad()
        loss = functional.cross_entropy(model(words), labels)
        loss.backward()
        for optimizer in (wrapped, *others[1:]):
            optimizer.step()
        return loss

    *earlier, last = batches("cpu", 5)
    for words, labels in earlier:
        iteration(words, labels)
    buffer = momentum.state[model.table.weight]["momentum_buffer"]
    assert buffer.is_sparse
    before = [one.detach().clone() for one in (*model.parameters(), buffer)]
    found = kitsune.verify(iteration, *last, optimizer=wrapped)
    assert found.replayed
    assert found.agrees
    assert not found.written
    assert_same([*model.parameters(), momentum.state[model.table.weight]["momentum_buffer"]], before)


class Edges(nn.Module):
    """Has a sparse buffer, which is never laid out whole: it would not fit anywhere."""

    def __init__(self) -> None:
        super().__init__()
        edges = torch.tensor([[0, 5, 7], [1, 2, 3]])
        made = torch.sparse_coo_tensor(edges, torch.ones(3), (10**8, 10**5), check_invariants=True)
        self.register_buffer("edges", made)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * torch.sparse.sum(self.edges))


def test_a_check_goes_past_a_sparse_buffer() -> None:
    torch.manual_seed(0)
    model = Edges()
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mode="replay", model=model.head)

    def iteration() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(5):
        iteration()
    found = kitsune.verify(iteration, optimizer=optimizer)
    assert found.agrees
    assert not found.written


class Pairs(nn.Module):
    """Two outputs, each of a lookup in the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.heads = (
            nn.Embedding(ROWS, 6, PADDING, sparse=True),
            nn.ModuleList([nn.Linear(6, 4) for _ in "12"]),
        )

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.heads
        return first(self.table(words).mean(1)), second(self.table(words + 0).mean(1))


def test_outputs_that_have_a_lookup_each(place: str) -> None:
    """Of which one has a loss in some steps, the other one in others, and both in the rest."""
    torch.manual_seed(0)
    model, other = Pairs().to(place), Pairs().to(place)
    other.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mode="replay")
    for index, (words, labels) in enumerate(batches(place, 12)):
        for one, its in ((model, optimizer), (other, plain)):
            its.zero_grad()
            losses = [functional.cross_entropy(output, labels) for output in one(words)]
            torch.stack([losses[:1], losses[1:], losses][index % 3]).sum().backward()
            its.step()
        assert_same([model.table.weight.grad], [other.table.weight.grad])
        torch.testing.assert_close(list(model.parameters()), list(other.parameters()))
        other.load_state_dict(model.state_dict())  # on a GPU sparse gradients are added in any order
    assert optimizer.status().replays == 10


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 6, PADDING, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        return functional.linear(self.table(words).mean(1), self.table.weight)


def test_a_sum_of_a_sparse_and_a_dense_gradient_is_refused() -> None:
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    other.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mode="replay")
    for words, labels in batches("cpu", 5):
        for one, its in ((model, optimizer), (other, plain)):
            its.zero_grad()
            functional.cross_entropy(one(words), labels).backward()
            its.step()
        assert torch.equal(model.table.weight, other.table.weight)
    assert "is sparse, and is given to aten.add.Tensor" in optimizer.status().reason
