"""The options of Kitsune. This module is the only reader of `KITSUNE_*` environment variables."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import torch

from kitsune.errors import ConfigError

Mode = Literal["auto", "replay", "eager"]

_log = logging.getLogger("kitsune")

_DEFAULT_STREAMS = 4
_AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_PREFIX, _CACHE_VARIABLE = "KITSUNE_", "KITSUNE_CACHE_DIR"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Config:
    """Options of `TrainStep` and `KitsuneOptimizer`.

    Where `TrainStep` and `KitsuneOptimizer` get no `config`, an option that is not given takes the
    environment variable `KITSUNE_<OPTION>` (for example `KITSUNE_MODE=eager`), else its default.

    Attributes:
        mode: `"auto"` replays what was captured where that is measured faster than eager on the
            user's own steps; `"replay"` replays whatever can be captured, without measuring;
            `"eager"` runs plain PyTorch.
        enable_amp: run the forward pass under `torch.autocast`. In a drop-in loop floating-point
            outputs of the model come back as float32.
        amp_dtype: `torch.bfloat16` or `torch.float16` (or their names). With float16 there is a gradient scaler: the
            one given to `TrainStep` or its own, `step.grad_scaler`; in a drop-in loop `optimizer.loss_scale`, unless
            the loop has a scaler itself. It scales what the loop makes of the model's outputs by torch's functions, and
            `defer_loss` has no effect. As with torch's scaler, hooks see scaled gradients, and so does `.grad` of
            tensors within; gradients with a graph of their own (`create_graph`) and `torch.autograd.grad` are not
            scaled.
        compile: let Inductor compile the captured graph. Off by default: compiling takes from
            seconds to minutes.
        max_memory: the most bytes of device memory that one recorded graph may use for intermediates and static
            inputs, as estimated from its operators; an int, or text such as `"2GB"`. None: no bound. A loop has a
            graph for each of the forward pass, the backward pass and the update, and another one for backward passes
            whose gradients are added to earlier ones; all have some for each signature.
        max_graphs: how many captures keep their graphs: of each signature of the inputs one for each state of the model
            that comes back (settings, frozen parts, options of the optimizer). They give way to others that are used
            20 times while they are not. In a loop, calls before the backward pass of an earlier one with the same
            signature have graphs of their own, which count as well, up to half of this number.
        num_streams: the most CUDA streams on which `TrainStep` tries to run the captured step, and
            `KitsuneOptimizer` in a loop the backward pass, 1 to 8; what is measured fastest stays, one stream
            included. None: 4 where `mode="auto"` may measure them (without `compile`), else 1.
        enable_fusion: replace operators of captured steps and calls by fused or generated ones where these are measured
            to be faster. They are tried in a second process, once for each program. It has an effect with
            `mode="auto"` (without `compile`) on a CUDA device with Triton. None: where it has one. `KitsuneOptimizer`
            in a loop fuses the calls of models with one output that has a gradient.
        defer_loss: let `KitsuneOptimizer` follow what a loop does with the model's output, and replay that together
            with the backward pass where the loop does it again; and with the call, where that can wait. `TrainStep`
            replays the loss anyway. Off by default: the loop gets tensors of subclasses, and not everything that may be
            done with them is as without.
        cuda_graphs: record what is captured as CUDA graphs. Without, the host issues its operators one by one at every
            step, on as many streams as were planned: slower, but tools that look at operators see them. (A step's plan
            with measured times is recorded all the same.) It has an effect on CUDA devices.
        verify: compare the first so many replays of each captured step, by each plan that is tried, with plain PyTorch
            from the same state, which takes several times as long: the model is called several times, and all but the
            last call is undone. What PyTorch does stands; after a difference that rounding does not explain, steps like
            that one run eagerly.
        setup_share: the share of the time that captures may take, above 0 and up to 1. With `mode="auto"` the first
            ones wait until they have it, as expected from the size of the model. None: the first ones wait for a fifth
            of what they are expected to take, so that a very short training is not delayed by what cannot pay off;
            later ones take a tenth of the time. With 1 none waits.
    """

    mode: Mode = "auto"
    enable_amp: bool = False
    amp_dtype: torch.dtype = torch.bfloat16
    compile: bool = False
    max_memory: int | None = None
    max_graphs: int = 8
    num_streams: int | None = None
    enable_fusion: bool | None = None
    defer_loss: bool = False
    cuda_graphs: bool = True
    verify: int = 0
    setup_share: float | None = None

    def __post_init__(self) -> None:
        for name, parse in _PARSERS.items():
            object.__setattr__(self, name, parse(name, getattr(self, name)))
        if self.mode == "eager" and self.compile:
            raise ConfigError("compile", True, "False with mode='eager', which captures nothing")

    @classmethod
    def from_options(cls, options: Mapping[str, Any], base: Config | None = None) -> Config:
        """`base` (else the environment's values, else the defaults) with `options` replaced.

        Raises:
            ConfigError: for an unknown option or a value that is not allowed.
            TypeError: `base` is no `Config`.
        """
        if base is not None and not isinstance(base, Config):
            raise TypeError(f"config must be a kitsune.Config, got {type(base).__name__}")
        unknown = sorted(set(options) - option_names())
        if unknown:
            raise ConfigError(unknown[0], options[unknown[0]], "the options " + ", ".join(sorted(option_names())))
        if base is not None:
            return dataclasses.replace(base, **options)
        return cls(**{**_environment(), **options})

    def not_in_effect(self, *, uses_streams: bool, can_fuse: bool, is_loop: bool = False) -> tuple[str, ...]:
        """Options that were given and validated, but that change nothing.

        Args:
            uses_streams: whether what the options are for runs on CUDA streams.
            can_fuse: whether its operators can be fused.
            is_loop: whether it is a loop of the user's own.
        """
        num_streams = self.max_streams() if uses_streams and (self.cuda_graphs or not is_loop) else 1
        ignored = {
            "num_streams": self.num_streams not in (None, num_streams),
            "defer_loss": self.defer_loss and not (is_loop and not self.scales_losses()),
            "cuda_graphs": not self.cuda_graphs and not uses_streams,
            "enable_fusion": self.enable_fusion is True and not (can_fuse and self.fuses()),
        }
        return tuple(name for name, is_ignored in ignored.items() if is_ignored)

    def max_streams(self) -> int:
        """The most streams that a captured step may use."""
        wanted = _DEFAULT_STREAMS if self.num_streams is None else self.num_streams
        return wanted if self._measures() else 1

    def fuses(self) -> bool:
        """Whether operators of a captured step shall be fused where they can be."""
        return self._measures() and self.enable_fusion is not False

    def scales_losses(self) -> bool:
        """Whether there is to be a gradient scaler."""
        return self.enable_amp and self.amp_dtype is torch.float16

    def _measures(self) -> bool:
        """Whether plans may be tried."""
        return self.mode == "auto" and not self.compile


def option_names() -> set[str]:
    """The names of all options."""
    return {field.name for field in dataclasses.fields(Config)}


def cache_dir() -> Path | None:
    """Where Kitsune keeps what it has measured and built; None for a user without a home directory.

    `KITSUNE_CACHE_DIR`, else `kitsune` in the user's cache directory: `XDG_CACHE_HOME`, which counts
    only if it is absolute, as its specification says, else `~/.cache`.
    """
    given, base = os.environ.get(_CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if given:
            return Path(given).expanduser()
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kitsune"
    except RuntimeError:  # no home directory
        return None


def _environment() -> dict[str, str]:
    options = {f"{_PREFIX}{name.upper()}": name for name in option_names()}
    values = {}
    for variable, value in os.environ.items():
        if variable in options and value:
            values[options[variable]] = value
        elif variable.startswith(_PREFIX) and variable not in options:
            _tell_of_misspelt(
                variable, tuple(get_close_matches(variable, (*options, _CACHE_VARIABLE), n=1, cutoff=0.85))
            )
    return values


@cache
def _tell_of_misspelt(variable: str, likely: tuple[str, ...]) -> None:
    """Once for each variable, if it is like one that is read: others are other programs'."""
    if likely and variable not in likely:
        _log.warning("the environment variable %s is no option of Kitsune; did you mean %s?", variable, *likely)


def _mode(name: str, value: object) -> Mode:
    if value == "auto" or value == "replay" or value == "eager":
        return value
    raise ConfigError(name, value, "'auto', 'replay', 'eager'")


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("0", "false", "1", "true"):
        return value.lower() in ("1", "true")
    raise ConfigError(name, value, "True or False")


def _optional_flag(name: str, value: object) -> bool | None:
    return None if value is None else _flag(name, value)


def _amp_dtype(name: str, value: object) -> torch.dtype:
    value = _AMP_DTYPES.get(value, value) if isinstance(value, str) else value
    if isinstance(value, torch.dtype) and value in _AMP_DTYPES.values():
        return value
    raise ConfigError(name, value, "torch.bfloat16 or torch.float16")


def whole_number(value: object) -> int | None:
    """`value` as an int, if it is a whole number, NumPy's among them; None for others, and for True and False."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def _whole(name: str, value: object, low: int, high: int | None) -> int:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    number = whole_number(value)
    if number is not None and number >= low and (high is None or number <= high):
        return number
    raise ConfigError(name, value, f"a whole number from {low}" + (f" to {high}" if high is not None else " up"))


def _share(name: str, value: object) -> float | None:
    if value is None:
        return None
    number: float | None = None
    if isinstance(value, (str, Real)) and not isinstance(value, bool):
        with suppress(ValueError):
            number = float(value)
    if number is not None and 0.0 < number <= 1.0:
        return number
    raise ConfigError(name, value, "a number above 0 and up to 1, or None")


def _bytes(name: str, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return _whole(name, value, 1, None)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
    num_bytes = 0 if match is None else int(float(match[1]) * _UNITS[match[2].upper()])
    if num_bytes == 0:
        raise ConfigError(name, value, "a number of bytes from 1 up, or text such as '512MB' or '2GB'")
    return num_bytes


_PARSERS: Mapping[str, Callable[[str, object], object]] = {
    "mode": _mode,
    "enable_amp": _flag,
    "amp_dtype": _amp_dtype,
    "compile": _flag,
    "max_memory": _bytes,
    "max_graphs": lambda name, value: _whole(name, value, 1, None),
    "num_streams": lambda name, value: None if value is None else _whole(name, value, 1, 8),
    "enable_fusion": _optional_flag,
    "defer_loss": _flag,
    "cuda_graphs": _flag,
    "verify": lambda name, value: _whole(name, value, 0, None),
    "setup_share": _share,
}
