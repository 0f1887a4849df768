"""The user's own models as the harness carries them about: where each is built from, and its cases. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.profiles import Case, DeviceType

_LOSS_STEPS: Mapping[DeviceType, int] = {"cpu": 30, "cuda": 300}


class WorkloadError(Exception):
    """A user's workload that cannot be used. The message names its source and says what to do."""


@dataclass(frozen=True)
class OwnModel:
    """A model that is not among the harness's own.

    Attributes:
        name: as it stands in results.
        source: ``FILE:FUNCTION``, the file relative to the measured checkout where it lies in it, or the name of an
            entry point.
        default: the batch size of the quick profile, by device type.
        sizes: those of the other profiles, the default among them.
    """

    name: str
    source: str
    default: Mapping[str, int]
    sizes: Mapping[str, tuple[int, ...]]

    def cases(self) -> tuple[Case, ...]:
        """A case for each device type and batch size."""
        return tuple(
            Case(self.name, batch, device_type, _LOSS_STEPS[device_type], default=batch == self.default[device_type])
            for device_type in _LOSS_STEPS
            if device_type in self.default
            for batch in self.sizes[device_type]
        )


def encoded(models: Sequence[OwnModel]) -> str:
    """The models as a text for :func:`decoded`; empty if there is none."""
    return json.dumps([vars(model) for model in models]) if models else ""


def decoded(text: str) -> tuple[OwnModel, ...]:
    """The models of a text.

    Raises:
        ValueError: it is none of :func:`encoded`.
    """
    try:
        entries = json.loads(text) if text else []
        return tuple(
            OwnModel(
                str(entry["name"]),
                str(entry["source"]),
                {str(device): int(batch) for device, batch in entry["default"].items()},
                {str(device): tuple(map(int, sizes)) for device, sizes in entry["sizes"].items()},
            )
            for entry in entries
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a list of workloads as `python -m {__package__}.run --workload` gives it") from error
