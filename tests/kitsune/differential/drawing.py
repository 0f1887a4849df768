"""Draws programs: what hypothesis may choose, and what it shrinks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tests.kitsune.differential.actions import AT_TIMES, BEFORE, IN_THE_LOOP, MORE_GROUPS, WITH_SCALER
from tests.kitsune.differential.peculiar import PECULIAR, TRANSFORMS, WITH_STATE
from tests.kitsune.differential.programs import (
    CYCLING,
    LAYERS,
    NESTED,
    SCHEDULERS,
    Layer,
    Program,
    has_experts,
    shares_weights,
)


@st.composite
def programs(draw: st.DrawFn, form: str) -> Program:
    """Programs that can run in `form`."""
    in_a_loop = form == "drop_in"
    names = ({*BEFORE, *IN_THE_LOOP} if in_a_loop else {*BEFORE}) - WITH_SCALER
    optimizer, options, bias_options = draw(_optimizers())
    scheduler = draw(st.sampled_from((None, None, None, *CYCLING, *CYCLING, *sorted(SCHEDULERS))))
    if optimizer == "Adagrad" and not _adagrad_takes_groups():
        names -= MORE_GROUPS
    if scheduler is not None:
        names -= MORE_GROUPS  # a scheduler knows the rates of those groups only that were there when it was made
    if scheduler in CYCLING and optimizer in ("SGD", "RMSprop"):
        options = {**options, "momentum": 0.9}
    scaler = draw(st.sampled_from((None, *SCALERS)))
    unscale = scaler is not None and (not in_a_loop or draw(st.booleans()))
    clips = (None, None, "norm", "value") if in_a_loop else (None, "norm")
    clip = draw(st.sampled_from(clips)) if scaler is None or unscale else None  # of scaled gradients it means nothing
    if scaler is not None and (options.get("fused") or not in_a_loop):
        names -= MORE_GROUPS  # in a step that is skipped, some optimizers make the state of new parameters, others none
        if not unscale:
            names.discard("keep_gradients")  # those of such a step are not unscaled by hand
    iterations = draw(st.integers(5, 8))
    events = draw(st.lists(st.tuples(st.integers(2, iterations - 1), st.sampled_from(sorted(names))), max_size=3))
    if scaler is not None and in_a_loop and draw(st.booleans()):
        events.append((draw(st.integers(2, iterations - 1)), "overflow"))
    micro_batches = draw(st.sampled_from((1, 1, 1, 2, 3, 4)))
    sizes = ("constant", "constant", "smaller last", "alternating", "in turn")
    sizes += ("ragged",) if micro_batches > 1 else ()
    # Many of the peculiar layers are refused, and a call that is refused says little about the other layers.
    peculiar = draw(st.sampled_from((True, True, False) if in_a_loop else (True, False, False)))
    layers = tuple(draw(st.lists(_layers(PECULIAR if peculiar else ()), max_size=4)))
    if optimizer == "SGD" and options.get("momentum") and has_experts(layers):
        options = {**options, "fused": False}  # torch's raises where a parameter has no momentum yet, and others have
    losses = draw(st.lists(st.sampled_from(("cross_entropy", "smoothed", "mse")), min_size=1, max_size=2, unique=True))
    # In a loop, the gradient of a shared weight with a penalty has three terms, and a replay adds up the model's first.
    if not (in_a_loop and shares_weights(layers)) and draw(st.booleans()):
        losses.insert(draw(st.integers(0, len(losses))), "penalty")
    # Of a weight with several terms, a replay adds up those of each call first.
    may_call_again = in_a_loop and not shares_weights(layers) and "penalty" not in losses
    return Program(
        inputs=draw(st.sampled_from(("features", "images", "tokens"))),
        layers=layers,
        unused=draw(st.booleans()),
        calls=draw(st.sampled_from((1, 1, 2, 3))) if may_call_again else 1,
        losses=tuple(losses),
        optimizer=optimizer,
        options=options,
        bias_options=bias_options,
        scheduler=scheduler,
        rate_is_tensor=draw(st.booleans()) if _takes_tensor_rate(optimizer, options) else False,
        autocast=draw(st.sampled_from((None, None, "bfloat16", "float16"))),
        scaler=scaler,
        unscale=unscale,
        micro_batches=micro_batches,
        clip=clip,
        zero=draw(st.sampled_from(("before", "before", "after", "between", "model"))) if in_a_loop else "before",
        set_to_none=draw(st.sampled_from((True, True, False))) if in_a_loop else True,
        sizes=draw(st.sampled_from(sizes)),
        habits=tuple(draw(st.lists(st.sampled_from(sorted(names - AT_TIMES)), max_size=2, unique=True))),
        events=tuple(sorted(set(events))),
        iterations=iterations,
        max_graphs=draw(st.sampled_from((8, 8, 8, 2, 1))),
        defer_loss=draw(st.sampled_from((True, True, False))) if in_a_loop else False,
        static_memory=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


def _layers(peculiar: Collection[str]) -> st.SearchStrategy[Layer]:
    # What a call keeps is kept again where a checkpoint calls it again; transforms of functions raise there.
    in_checkpoints = {*peculiar} - {*WITH_STATE, *TRANSFORMS}
    others = [name for name in NESTED if name != "checkpoint"]
    simple = _simple(peculiar)
    return simple | simple | _nested(others, simple) | _nested(["checkpoint"], _simple(in_checkpoints))


def _simple(peculiar: Collection[str]) -> st.SearchStrategy[Layer]:
    plain = st.sampled_from(["tied", *LAYERS])
    return plain | plain | plain | st.sampled_from(sorted(peculiar)) if peculiar else plain


def _nested(names: Sequence[str], simple: st.SearchStrategy[Layer]) -> st.SearchStrategy[Layer]:
    several = st.lists(simple, min_size=1, max_size=3)
    return st.tuples(st.sampled_from(names), several).map(lambda drawn: (drawn[0], *drawn[1]))


@st.composite
def _optimizers(draw: st.DrawFn) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    kind = draw(st.sampled_from(("SGD", "Adam", "AdamW")) | st.sampled_from(sorted(OPTIMIZERS)))
    options = {"lr": 0.02, **draw(st.sampled_from(OPTIMIZERS[kind]))}
    options |= draw(st.sampled_from(({}, {"weight_decay": 0.1}, {"maximize": True})))
    bias_options = draw(st.sampled_from((None, {"lr": 0.01, "weight_decay": 0.0}, {"weight_decay": 0.2})))
    if kind == "Rprop":
        options.pop("weight_decay", None)
        bias_options = None
    forms: list[dict[str, Any]] = [{}, {"foreach": True}]
    if kind in FUSED:
        forms += [{"fused": True}] * 3
    return kind, {**draw(st.sampled_from(forms)), **options}, bias_options


@cache
def _adagrad_takes_groups() -> bool:
    """Whether it makes the state of parameters that come later; torch 2.11 does not, and its step raises."""
    first, later = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adagrad([first])
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def _takes_tensor_rate(optimizer: str, options: Mapping[str, Any]) -> bool:
    """Some demand `capturable` for it where they have `foreach`, which is for GPUs."""
    return not (optimizer in ("Adam", "AdamW") and options.get("foreach"))


SCALERS: list[dict[str, Any]] = [
    {"init_scale": 256.0, "growth_factor": 8.0, "growth_interval": 1},  # float16 soon overflows by itself
    {"init_scale": 1024.0, "growth_interval": 2},
    {"init_scale": 1024.0, "growth_interval": 3, "backoff_factor": 0.25},
]
FUSED = ("SGD", "Adam", "AdamW")
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.3},
    ],
    "Adam": [{}, {"betas": (0.8, 0.9)}, {"amsgrad": True}, {"eps": 1e-3}],
    "AdamW": [{}, {"betas": (0.8, 0.9)}, {"amsgrad": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True}, {"momentum_decay": 0.1}],
    "RAdam": [{}, {"decoupled_weight_decay": True}, {"betas": (0.5, 0.7)}],
    "Adamax": [{}, {"betas": (0.8, 0.9)}],
    "Adagrad": [{}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.1}],
    "Adadelta": [{"lr": 1.0}, {"rho": 0.8}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}],
    "Rprop": [{}, {"etas": (0.6, 1.1)}],
    "ASGD": [{}, {"lambd": 0.1, "t0": 3}],
}
