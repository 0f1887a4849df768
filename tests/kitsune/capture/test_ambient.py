"""Every switch is seen, by signatures and by facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from kitsune.capture.ambient import ambient, ambient_facts
from kitsune.native.build import facts_type


@contextmanager
def switched(write: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


def setting(owner: Any, name: str, value: object) -> AbstractContextManager[None]:
    return switched(lambda present: setattr(owner, name, present), value, getattr(owner, name))


COMMON: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
}
CUDA: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "matmul tf32": lambda: setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "conv ieee": lambda: setting(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "rnn ieee": lambda: setting(torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
    "fp16 reduction": lambda: setting(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduction": lambda: setting(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation": lambda: setting(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "cudnn": lambda: setting(torch.backends.cudnn, "enabled", False),
    "cudnn benchmark": lambda: setting(torch.backends.cudnn, "benchmark", True),
    "cudnn deterministic": lambda: setting(torch.backends.cudnn, "deterministic", True),
    "flash": lambda: switched(torch.backends.cuda.enable_flash_sdp, False, True),
    "memory-efficient": lambda: switched(torch.backends.cuda.enable_mem_efficient_sdp, False, True),
    "math": lambda: switched(torch.backends.cuda.enable_math_sdp, False, True),
    "cudnn attention": lambda: switched(torch.backends.cuda.enable_cudnn_sdp, False, True),
}
SWITCHES = {
    **{("cpu", name): switch for name, switch in COMMON.items()},
    **{("cuda", name): switch for name, switch in {**COMMON, **CUDA}.items()},
    ("cpu", "autocast"): lambda: torch.autocast("cpu"),
}


def check(device: torch.device, switch: AbstractContextManager[Any]) -> None:
    """`switch` is seen by those who looked before, and its end by those who looked inside."""
    before, facts = ambient(device), facts_type()(ambient_facts(device))
    assert facts.hold()
    with switch:
        assert ambient(device) != before
        assert not facts.hold()
        inside = facts_type()(ambient_facts(device))
        assert inside.hold()
    assert ambient(device) == before
    assert facts.hold()
    assert not inside.hold()


@pytest.mark.parametrize(("kind", "name"), SWITCHES)
def test_a_switch_is_seen(kind: str, name: str) -> None:
    check(torch.device(kind), SWITCHES[kind, name]())


def test_the_dtype_of_autocast_counts_where_it_is_on() -> None:
    device = torch.device("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(device, torch.autocast("cpu", dtype=torch.float16))
    before, facts = ambient(device), facts_type()(ambient_facts(device))
    with switched(lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16, torch.bfloat16):
        assert ambient(device) == before
        assert facts.hold()
