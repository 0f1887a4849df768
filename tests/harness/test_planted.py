"""A commit that sleeps, measured and compared with the commands that users type."""

from __future__ import annotations

import pytest

from tests.harness.checkout import KITSUNE, Checkout

UNCOMPILED = {"CXX": "no-such-compiler"}
EFFORT = """
_SHORT = dict.fromkeys(_SHORT, Effort(3, (8, 15), 1.0, 0.04, 0.5, 60.0, 120.0))
"""
SLEEPING = KITSUNE.replace(
    "        self.optimizer.zero_grad()\n        loss = self.loss_fn",
    "        __import__('time').sleep(0.002)\n        self.optimizer.zero_grad()\n        loss = self.loss_fn",
)


@pytest.mark.slow
def test_a_commit_that_sleeps_is_a_regression_and_its_second_measurement_is_none(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    checkout = Checkout(tmp_path_factory.mktemp("planted"))
    with (checkout.root / "harness" / "profiles.py").open("a") as profiles:
        profiles.write(EFFORT)
    assert SLEEPING != KITSUNE
    before = checkout.commit("as it was", KITSUNE)
    slow = checkout.commit("sleeps", SLEEPING)
    again = checkout.commit("the same once more", SLEEPING + "\n")
    variants = [word for name in ("eager_fp32", "kitsune_trainstep_fp32") for word in ("--variant", name)]
    measured = checkout.run("-m", "harness.run", before, slow, again, *variants, **UNCOMPILED)
    assert measured.returncode == 0, measured.stdout

    regressed = checkout.run("-m", "harness.compare", before, slow, "--fail-on", "regression", "--only", "regressed")
    assert regressed.returncode == 1, regressed.stdout
    assert "kitsune_trainstep" in regressed.stdout
    unchanged = checkout.run("-m", "harness.compare", slow, again, "--fail-on", "regression")
    assert unchanged.returncode == 0, unchanged.stdout
