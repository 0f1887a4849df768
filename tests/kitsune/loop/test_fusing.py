"""Which layouts are tried when a step is rewritten."""

from __future__ import annotations

import pytest
import torch

from kitsune.fusion.judge import Verdict
from kitsune.loop import fusing
from tests.kitsune.fusion.running import never
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.passes.test_channels_last import step


class Never:
    def __call__(self, alone: object) -> Verdict:
        return never(alone)

    def is_late(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("name", "half", "allow_tf32", "tried"),
    [
        ("lenet", True, True, True),
        ("lenet", False, False, True),
        ("lenet", False, True, False),  # it would be rounded in this layout, and is not in the user's
    ],
)
def test_channels_last_is_tried_where_it_changes_no_precision(
    name: str, half: bool, allow_tf32: bool, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allow_tf32)
    monkeypatch.setattr(fusing, "Measured", lambda device, cache: Never())
    monkeypatch.setattr(fusing, "INDUCTOR", OPERATORS)
    found = fusing.rewritten(step(name, half=half).module, torch.device("cpu"))
    used = [fusion.template for _, fusions in found for fusion in fusions if fusion.refusal is None]
    assert used == ["channels last"] * tried
