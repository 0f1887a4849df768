"""Workloads by name: those of ``models``, and the user's own, found by a file's path or an entry point.

A user's workload is a function without arguments that returns a :class:`models.Workload`. It is called with torch's
random numbers seeded and float32 on the CPU as default, so that every variant starts from the same weights.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

import models
from harness.failures import describe
from harness.own_models import OwnModel, WorkloadError
from models.workload import initialization

ENTRY_POINTS = "kitsune.workloads"
"""The group of entry points under which packages offer workloads."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SEED = 0


def build(name: str, own: Iterable[OwnModel], root: Path) -> models.Workload:
    """The workload of a name.

    Args:
        own: the user's workloads; their names are none of the harness's own.
        root: the folder that their files' paths are relative to.

    Raises:
        WorkloadError: a user's workload cannot be built.
        ValueError: there is no workload of this name.
        ModuleNotFoundError: the model needs a package that is not installed.
    """
    for entry in own:
        if entry.name == name:
            return _called(entry.source, root)
    return models.build(name, seed=_SEED)


def missing(name: str, own: Iterable[OwnModel], root: Path) -> str | None:
    """Why the workload of a name cannot be built here; None if it can be, or if only building it will tell."""
    for entry in own:
        if entry.name == name:
            return _missing_file(entry.source, root)
    return models.missing(name)


def own_model(source: str, root: Path) -> OwnModel:
    """Builds a user's workload, takes a step of its loss with two samples, and says what is to be known of it.

    Args:
        source: ``FILE:FUNCTION`` or the name of an entry point.
        root: the measured checkout; the file's path is relative to the working directory.

    Raises:
        WorkloadError: it cannot be found, built or trained.
    """
    path, function = _file_of(source)
    if path is not None:
        absolute = path.absolute()
        relative = os.path.relpath(absolute, root) if absolute.is_relative_to(root) else str(absolute)
        source = f"{relative}:{function}"
    workload = _called(source, root)
    _check(workload, source)
    sizes = {
        device: tuple(sorted({*workload.batch_sizes.get(device, ()), default}))
        for device, default in workload.default_batch_size.items()
    }
    return OwnModel(workload.name, source, dict(workload.default_batch_size), sizes)


def _called(source: str, root: Path) -> models.Workload:
    function = _function(source, root)
    with initialization(_SEED):
        try:
            workload = function()
        except Exception as error:
            raise WorkloadError(f"{source} cannot be built: {describe(error)}") from error
    if not isinstance(workload, models.Workload):
        raise WorkloadError(
            f"{source} returned a {type(workload).__name__}, not a {models.Workload.__module__}.Workload"
        )
    return workload


def _function(source: str, root: Path) -> Callable[[], object]:
    path, name = _file_of(source)
    if path is None:
        return _entry_point(source)
    reason = _missing_file(source, root)
    if reason is not None:
        raise WorkloadError(f"{source}: {reason}")
    module = _module(root / path)
    function = vars(module).get(name)
    if not callable(function):
        raise WorkloadError(f"{root / path} has no function {name!r}")
    return function  # type: ignore[no-any-return]  # what it returns is checked


def _module(path: Path) -> object:
    """Runs a file as a module; what lies beside it can be imported, behind everything else on the path."""
    name = f"{__package__}_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise WorkloadError(f"{path} cannot be imported: {describe(error)}") from error
    return module


def _entry_point(name: str) -> Callable[[], object]:
    offered = {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS)}
    if name not in offered:
        there_are = ", ".join(sorted(offered)) or "none"
        raise WorkloadError(
            f"{name!r} is neither FILE.py:FUNCTION nor an entry point of the group {ENTRY_POINTS};"
            f" there are: {there_are}"
        )
    try:
        return offered[name].load()  # type: ignore[no-any-return]  # what it returns is checked
    except Exception as error:
        raise WorkloadError(f"entry point {name!r} cannot be loaded: {describe(error)}") from error


def _file_of(source: str) -> tuple[Path | None, str]:
    """File and function of ``FILE.py:FUNCTION``; None and the name for anything else."""
    path, found, function = source.rpartition(":")
    return (Path(path), function) if found and path.endswith(".py") else (None, source)


def _missing_file(source: str, root: Path) -> str | None:
    path, _ = _file_of(source)
    return None if path is None or (root / path).is_file() else f"there is no file {path} here"


def _check(workload: models.Workload, source: str) -> None:
    """What would otherwise fail far from its cause, in a process of its own for each variant."""
    taken = (*models.names(large=True), *models.names(zoo=True))
    if not _NAME.fullmatch(workload.name) or workload.name in taken:
        raise WorkloadError(
            f"{source}: the name {workload.name!r} cannot be used; take lower-case letters, digits and underscores, and"
            f" none of {', '.join(taken)}"
        )
    defaults = workload.default_batch_size
    if not defaults or not set(defaults) <= {"cpu", "cuda"}:
        raise WorkloadError(f"{source}: default_batch_size is {dict(defaults)}; give sizes for 'cpu', 'cuda' or both")
    every: list[object] = [*defaults.values(), *(size for sizes in workload.batch_sizes.values() for size in sizes)]
    if not all(isinstance(size, int) and size >= 1 for size in every):
        raise WorkloadError(f"{source}: batch sizes are {every}; each must be a whole number from 1")
    module: object = workload.module
    if not isinstance(module, nn.Module):
        raise WorkloadError(f"{source}: the module is a {type(module).__name__}, not a torch.nn.Module")
    try:
        x, y = workload.batch(2)
        loss: object = workload.loss_fn(workload.module(x), y)
    except Exception as error:
        raise WorkloadError(f"{source} cannot compute the loss of a batch of two: {describe(error)}") from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise WorkloadError(
            f"{source}: loss_fn(module(x), y) must be a tensor of one value, the mean loss of the batch"
        )
    if not loss.requires_grad:
        raise WorkloadError(f"{source}: the loss does not depend on any parameter that is trained")
