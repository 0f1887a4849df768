"""Templates for the optimizer's update: with the gradients of linear layers in it, and without casts before it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Builder, Match
from kitsune.fusion.nodes import arguments, aten, calls
from kitsune.fusion.operands import allows_tf32
from kitsune.graph import dataflow
from kitsune.kernels import adam, grouped_update  # noqa: F401 - define the operators
from kitsune.kernels.linear import DTYPES

kitsune = torch.ops.kitsune

# What computes the gradients as well, and which of its options the update's name tells.
_WITH_GRADIENTS: Mapping[torch._ops.OpOverload, tuple[torch._ops.OpOverload, Mapping[str, bool]]] = {
    kitsune.adam_.default: (kitsune.linear_adam_.default, {}),
    aten._fused_adam_.tensor_lr: (kitsune.linear_adam_.default, {"decoupled": False}),
    aten._fused_adamw_.tensor_lr: (kitsune.linear_adam_.default, {"decoupled": True}),
    aten._fused_sgd_.tensor_lr: (kitsune.linear_sgd_.default, {}),
}
_SQUARES = ("exp_avg_sqs", "max_exp_avg_sqs")
_NOT_TAKEN = ("amsgrad", "grad_scale", "is_first_step")

# A library multiplies large matrices faster than a kernel that updates what it computes. How large, the judge finds
# out: layers that take more than these parts of the work of the largest one keep their gradients.
_PARTS_OF_LARGEST = (1.0, 1 / 4, 1 / 16, 1 / 64)

_LARGE = 2**28
"""Multiplications, which take about a microsecond. All ways are compared if a layer takes more."""

_LARGE_CAST = 2**20
"""Bytes of layers' inputs in float32. Each of a kernel's programs casts what it reads: from here on, casting them once
may be faster."""


class _Update(NamedTuple):
    """The call of an optimizer's update.

    Attributes:
        lists: parameters, gradients, and what else has one entry a parameter; some may be empty.
        options: the keyword arguments.
        written: what it changes.
        memory: the storages of `written`.
        squares: of its arguments, those that are sums of squares.
    """

    node: fx.Node
    target: torch._ops.OpOverload
    lists: Sequence[Sequence[fx.Node]]
    options: Mapping[str, Any]
    written: frozenset[fx.Node]
    memory: frozenset[int]
    squares: Sequence[fx.Node]

    @classmethod
    def of(cls, node: fx.Node) -> _Update:
        assert isinstance(node.target, torch._ops.OpOverload)
        schema = node.target._schema.arguments
        given = list(zip(schema, arguments(node), strict=True))
        lists = [value for argument, value in given if not argument.kwarg_only]
        options = {argument.name: value for argument, value in given if argument.kwarg_only}
        written = frozenset(dataflow.written(node))
        memory = frozenset(storage for one in written for storage in dataflow.storages(one))
        squares = [value for argument, value in given if argument.name in _SQUARES]
        return cls(node, node.target, lists, options, written, memory, [one for value in squares for one in value])

    def selected(self, places: Sequence[int]) -> list[list[fx.Node]]:
        """The lists, of some parameters only."""
        return [[entries[place] for place in places] if entries else [] for entries in self.lists]

    def overwrites(self, nodes: Collection[fx.Node]) -> bool:
        """Whether it changes the memory of any of `nodes`."""
        return any(self.memory & dataflow.storages(node) for node in nodes)


class _Gradient(NamedTuple):
    """What the gradient of a parameter is computed from: `grad_output.T @ x`, or `grad_output.sum(0)`.

    Attributes:
        grad_output: of shape (M, N).
        x: of shape (M, K); None for a bias.
        transposed: `grad_output.T`; None for a bias.
        nodes: from the gradient back to the product or the sum.
    """

    grad_output: fx.Node
    x: fx.Node | None
    transposed: fx.Node | None
    nodes: Sequence[fx.Node]

    def operands(self) -> list[fx.Node]:
        return [self.grad_output] if self.x is None else [self.grad_output, self.x]

    def shape(self) -> tuple[int, ...]:
        return tuple(operand.meta["val"].shape[1] for operand in self.operands())

    def work(self) -> int:
        """Multiplications, or additions for a bias."""
        return int(self.grad_output.meta["val"].shape[0] * torch.Size(self.shape()).numel())

    def is_kept(self) -> bool:
        """Whether it has users beside the update."""
        return len(self.nodes[0].users) > 1


def linear(node: fx.Node) -> Iterator[Match]:
    """Matches of an update of linear layers' parameters and of their gradients, with fewer and fewer layers.

    Gradients that others use as well are made for them.
    """
    if not calls(node, *_WITH_GRADIENTS):
        return
    update = _Update.of(node)
    if not _is_plain(update.options):
        return
    found = {place: _gradient(grad) for place, grad in enumerate(update.lists[1])}
    fitting = {place: one for place, one in found.items() if one is not None and _fits(update, place, one)}
    for places in _choices(fitting):
        gradients = {place: fitting[place] for place in places}
        uncast = _before_casts(update, gradients)
        yield _linear(update, gradients, uncast)
        if _are_large(uncast):
            yield _linear(update, gradients, {})


def without_casts(node: fx.Node) -> Iterator[Match]:
    """Matches of an update and of the casts of gradients that only it uses."""
    if not calls(node, kitsune.adam_.default):
        return
    update = _Update.of(node)
    casts = [grad for grad in dict.fromkeys(update.lists[1]) if _is_exact_cast(grad) and len(grad.users) == 1]
    sources = [cast.all_input_nodes[0] for cast in casts]
    if not casts:
        return
    uncast = dict(zip(casts, sources, strict=True))
    grads = [uncast.get(grad, grad) for grad in update.lists[1]]
    places_of: dict[torch.dtype, list[int]] = {}
    for place, grad in enumerate(grads):
        places_of.setdefault(grad.meta["val"].dtype, []).append(place)

    def build(builder: Builder) -> list[fx.Node]:
        for places in places_of.values():
            params, _, *state = update.selected(places)
            builder.call(
                kitsune.adam_.default, params, [grads[place] for place in places], *state, **dict(update.options)
            )
        return []

    yield Match.of("adam without casts", [node, *casts], [], build, squares=update.squares)


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Whether an update neither scales gradients nor sets momentum up."""
    return options.get("grad_scale") is None and not options.get("is_first_step", False)


def _is_exact_cast(node: fx.Node) -> bool:
    """Whether `node` is a half-precision value in float32, laid out like it."""
    if not calls(node, aten._to_copy.default):
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    strides = zip(value.size(), value.stride(), source.stride(), strict=True)
    return (
        value.dtype == torch.float32
        and source.dtype in (torch.bfloat16, torch.float16)
        and value.device == source.device
        and all(size == 1 or one == other for size, one, other in strides)
    )


def _is_cast_from_float32(node: fx.Node) -> bool:
    if not calls(node, aten._to_copy.default):
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return bool(source.dtype == torch.float32 and value.dtype in DTYPES and value.device == source.device)


def _gradient(node: fx.Node) -> _Gradient | None:
    """How `node` is computed, by operators whose results nothing else uses; None if not as a linear layer's."""
    nodes = [node]
    for target in (aten._to_copy.default, aten.view.default):
        if calls(nodes[-1], target):
            nodes.append(nodes[-1].all_input_nodes[0])
    if any(len(inner.users) > 1 for inner in nodes[1:]):
        return None
    made = nodes[-1]
    if calls(made, aten.mm.default):
        transposed, x = arguments(made)
        grad_output = _before_transpose(transposed)
        return None if grad_output is None else _Gradient(grad_output, x, transposed, nodes)
    if not calls(made, aten.sum.dim_IntList):
        return None
    (summed,) = made.all_input_nodes
    value, dims = summed.meta["val"], arguments(made)[1]
    is_over_rows = value.dim() == 2 and dims in ([0], [-2]) and made.meta["val"].dtype == value.dtype
    return _Gradient(summed, None, None, nodes) if is_over_rows else None


def _before_transpose(node: fx.Node) -> fx.Node | None:
    """What `node` is the transpose of; None if it is none."""
    if not calls(node, aten.t.default, aten.transpose.int, aten.permute.default):
        return None
    source = node.all_input_nodes[0]
    one, other = node.meta["val"], source.meta["val"].t()
    return source if (one.size(), one.stride()) == (other.size(), other.stride()) else None


def _fits(update: _Update, place: int, gradient: _Gradient) -> bool:
    """Whether the kernels take this parameter with what its gradient is computed from.

    They read layers' inputs while they write parameters, and leave everything as it is where gradients are infinite.
    Gradients that others use as well they store in float32.
    """
    state = [entries[place].meta["val"] for entries in update.lists if entries and entries[place] in update.written]
    operands = [node.meta["val"] for node in gradient.operands()]
    return (
        all(one.dtype == torch.float32 and one.shape == gradient.shape() and one.is_contiguous() for one in state)
        and all(one.dtype in DTYPES and one.device == state[0].device and _has_dense_rows(one) for one in operands)
        and not update.overwrites(gradient.operands())
        and not (gradient.is_kept() and update.options["found_inf"] is not None)
        and not (gradient.is_kept() and update.lists[1][place].meta["val"].dtype != torch.float32)
    )


def _has_dense_rows(matrix: torch.Tensor) -> bool:
    return matrix.shape[1] == 1 or matrix.stride(1) == 1


def _choices(gradients: Mapping[int, _Gradient]) -> Iterator[list[int]]:
    """Places of parameters that may be worth it together, the most first."""
    work = {place: gradient.work() for place, gradient in gradients.items()}
    before = None
    for part in _PARTS_OF_LARGEST:
        chosen = [place for place in work if work[place] <= part * max(work.values())]
        if chosen and chosen != before:
            yield chosen
        before = chosen


def _linear(update: _Update, gradients: Mapping[int, _Gradient], uncast: Mapping[fx.Node, fx.Node]) -> Match:
    """The update of all parameters, with these gradients, and the casts `uncast` of layers' inputs."""
    places = list(gradients)
    others = [place for place in range(len(update.lists[0])) if place not in gradients]
    target, told = _WITH_GRADIENTS[update.target]
    options = {name: value for name, value in update.options.items() if name not in _NOT_TAKEN}
    nodes = _inside(update, gradients)
    layers, indices = _layers(list(gradients.values()), uncast)
    kept = [index for index, gradient in enumerate(gradients.values()) if gradient.is_kept()]

    def build(builder: Builder) -> list[fx.Node]:
        params, _, *state = update.selected(places)
        grads = [builder.call(aten.empty_like.default, param) for param in params] if kept else []
        builder.call(
            target, [layer[0] for layer in layers], [layer[1] for layer in layers], indices,
            params, *state, grads, [], **options, **told, allow_tf32=allows_tf32(),
        )  # fmt: skip
        if others:
            builder.call(update.target, *update.selected(others), **dict(update.options))
        return [grads[index] for index in kept]

    views = dict.fromkeys(one.transposed for one in gradients.values() if one.transposed is not None)
    shared = [view for view in views if not view.users.keys() <= nodes]
    return Match.of(
        f"gradients of linear layers + {'sgd' if target is kitsune.linear_sgd_.default else 'adam'}",
        [*nodes, *uncast, *(view for view in views if view not in shared)],
        [update.lists[1][places[index]] for index in kept],
        build,
        [operand for layer in layers for operand in layer],
        shared,
        update.squares,
        has_rivals=_are_large(uncast) or max(gradient.work() for gradient in gradients.values()) > _LARGE,
    )


def _inside(update: _Update, gradients: Mapping[int, _Gradient]) -> set[fx.Node]:
    """The update, and what computes the gradients."""
    return {update.node, *(node for gradient in gradients.values() for node in gradient.nodes)}


def _before_casts(update: _Update, gradients: Mapping[int, _Gradient]) -> dict[fx.Node, fx.Node]:
    """For layers' inputs that are casts for none but these gradients: what the kernels can cast themselves."""
    users = _inside(update, gradients)
    outputs = {gradient.grad_output for gradient in gradients.values()}
    xs = [gradient.x for gradient in gradients.values() if gradient.x is not None and gradient.x not in outputs]
    casts = [x for x in xs if _is_cast_from_float32(x) and all(user in users for user in x.users)]
    sources = {cast: cast.all_input_nodes[0] for cast in casts}
    return {
        cast: source
        for cast, source in sources.items()
        if _has_dense_rows(source.meta["val"]) and not update.overwrites([source])
    }


def _are_large(uncast: Mapping[fx.Node, fx.Node]) -> bool:
    return any(source.meta["val"].nbytes > _LARGE_CAST for source in uncast.values())


def _layers(
    gradients: Sequence[_Gradient], uncast: Mapping[fx.Node, fx.Node]
) -> tuple[list[tuple[fx.Node, fx.Node]], list[int]]:
    """Gradients of outputs and inputs, each pair once, and for each gradient which of them it is computed from."""
    inputs = {one.grad_output: uncast.get(one.x, one.x) for one in reversed(gradients) if one.x is not None}
    layers: dict[tuple[fx.Node, fx.Node], int] = {}
    indices = []
    for gradient in gradients:
        output, x = gradient.grad_output, gradient.x
        # A bias needs no input: where no weight has one, anything with as many rows will do.
        layer = output, inputs.get(output, output) if x is None else uncast.get(x, x)
        indices.append(layers.setdefault(layer, len(layers)))
    return list(layers), indices
