"""What keeps replays right where Dynamo alone would have them go wrong, by name: a test takes one of them back.

Without it replays are wrong for a kind of program. That shows whether a check finds such a kind.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from kitsune.capture import (
    aliases,
    apart,
    attribute_reads,
    autograd_functions,
    dict_attributes,
    equality,
    identity,
    lookups,
    protocols,
    set_order,
    side_effects,
    split_program,
    transforms,
)
from kitsune.capture.called import Called
from kitsune.capture.frontend import GuardedFunction
from kitsune.capture.late_reads import LateReads
from kitsune.graph import verify
from kitsune.loop import following, step_loop
from kitsune.loop.accumulation import Accumulators


class _Part(NamedTuple):
    """What stands `instead` of the attribute `name` of `place`, once a mend is taken back."""

    place: Any
    name: str
    instead: Any


def _always_fits(guarded: GuardedFunction, *args: Any) -> bool:
    _fits(guarded, *args)
    guarded.misfits = guarded.stale = False
    return True


_fits = GuardedFunction.fits

MENDS: dict[str, tuple[_Part, ...]] = {
    "aliases": (_Part(aliases, "guarded", nullcontext),),
    "apart": (_Part(apart, "guarded", nullcontext),),
    "identity": (_Part(identity, "guarded", nullcontext),),
    "attributes": (_Part(attribute_reads, "noted", lambda _called: nullcontext()),),
    "protocols": (_Part(protocols, "refused", nullcontext),),
    "attributes of dictionaries": (_Part(dict_attributes, "guarded", nullcontext),),
    "lookups": (_Part(lookups, "guarded", nullcontext),),
    "called": (_Part(Called, "facts", lambda _called: iter(())),),
    "equality": (_Part(equality, "strict", nullcontext),),
    "side effects": (_Part(side_effects, "written_or_refused", nullcontext),),
    "order of sets": (_Part(set_order, "known_or_refused", nullcontext),),
    "functions": (_Part(autograd_functions, "called_themselves", lambda _called: nullcontext()),),
    "missing gradients": (_Part(split_program, "going_back_from", lambda _tangents: nullcontext()),),
    "late reads": (_Part(split_program, "read_by", lambda _module: LateReads()),),
    "transforms": (_Part(transforms, "requires_grad_asked", nullcontext),),
    "detours": (
        _Part(following, "go_on_from_detours", lambda: None),
        _Part(torch.autograd, "_engine_run_backward", torch.autograd.graph._engine_run_backward),
    ),
    "exchanged memory": (_Part(verify, "_EXCHANGES", frozenset()),),
    "gradients of what was exchanged": (_Part(step_loop, "_addresses", lambda _params: []),),
    "gradients that are read": (_Part(Accumulators, "begin", lambda _sums, _phase: None),),
    "variants": (_Part(GuardedFunction, "fits", _always_fits),),
}


def take_back(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Has what is captured from now on, and what replays it, do without these mends."""
    for name in names:
        for part in MENDS[name]:
            patch.setattr(part.place, part.name, part.instead)


NEEDED: dict[str, tuple[str, ...]] = {
    "under two names": ("aliases",),
    "come to be one": ("apart",),
    "list in a tuple": ("equality",),
    "is the same": ("aliases", "identity"),
    "tells functions apart": ("identity",),
    "sign of zero": ("equality",),
    "missing attribute": ("lookups",),
    "replaced method": ("called",),
    "recently used": ("side effects",),
    "assigns to a class": ("side effects",),
    "first of a set": ("order of sets",),
    "key by value": ("identity",),
    "epochs": ("protocols",),
    "annotated": ("attributes",),
    "settings": ("attributes of dictionaries",),
    "absent gradients": ("functions",),
    "gradient in the call": ("functions",),
    "asks in the call": ("transforms",),
    "exchanged memory": ("exchanged memory",),
    "looks at gradients": ("gradients that are read",),
    "experts": ("variants",),
    "momentum by turns": ("variants",),
}
"""For peculiar layers (`tests.kitsune.differential.peculiar`), the mends without which replays of them go wrong."""

FORMS = ("drop_in", "deferred", "train_step")
IN_STEPS_ALONE = ("looks at gradients",)
"""The layers of which that is so in a `TrainStep` alone."""


def forms_of(layer: str) -> tuple[str, ...]:
    return ("train_step",) if layer in IN_STEPS_ALONE else FORMS
