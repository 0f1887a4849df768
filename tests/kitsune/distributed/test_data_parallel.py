"""Loops of several processes around a `DistributedDataParallel` train as without Kitsune, and end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kitsune
from tests.kitsune.distributed.worker import FORMS, SCENARIOS, STEPS

ROOT = Path(__file__).resolve().parents[3]
SIZE = 2
SECONDS = 280

REFUSED = {
    "unused parameters are looked for": "find_unused_parameters",
    "a static graph": "static_graph",
    "gradients sent late": "delay_all_reduce_named_params",
    "gradients sent by hooks": "may send to other processes",
    "sharded parameters": "DTensor",
    "flat sharded parameters": "the call is not one graph",
}

SHORT = ("wrapped after some steps", "another optimizer in between", "a part of what is wrapped")
"""Their last loops end soon after a capture, or begin after none."""

MIXED = [name for name in SCENARIOS if name.startswith("mixed loop")]

AVERAGED = (
    "plainly",
    "batch norm with buffers of the first rank",
    "accumulation without reduction",
    "accumulation into gradients that stay",
    "scaled by a gradient scaler",
    "a backward pass for each of two calls",
    "validation between",
)

Found = dict[tuple[str, str], tuple[list[torch.Tensor], dict[str, Any]]]

forms = pytest.mark.parametrize("form", FORMS[1:])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each process has found."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.kitsune.distributed.worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for rank in range(SIZE)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=SECONDS)
            assert worker.returncode == 0, errors.decode()
    finally:
        for worker in workers:
            worker.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


@pytest.mark.support(
    "Several processes",
    "DistributedDataParallel: buckets, no_sync, join, buffers; a shape, a hook, an error or a choice on one rank alone",
    "replayed",
)
@forms
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_trains_as_plain_pytorch_does(name: str, form: str, ranks: list[Found]) -> None:
    on_gpus = torch.cuda.device_count() >= SIZE
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if on_gpus else {"rtol": 0.0, "atol": 0.0}
    for rank in ranks:
        wanted, found = rank["plain", name][0], rank[form, name][0]
        assert len(wanted) > STEPS
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, **tolerance, equal_nan=True)


@forms
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in (*REFUSED, *SHORT, *MIXED)])
def test_it_is_replayed(name: str, form: str, ranks: list[Found]) -> None:
    """Also on one rank alone: it makes no difference to the others."""
    replays = [rank[form, name][1]["replays"] for rank in ranks]
    alone = {"out of memory on one rank": 1, "slower on one rank": 0}.get(name)
    assert all(count >= (STEPS - 8 if place != alone else 0) for place, count in enumerate(replays)), replays


@pytest.mark.support("Several processes", "defer_loss: gradients are averaged in the reducer's buckets", "replayed")
@pytest.mark.parametrize("name", AVERAGED)
def test_gradients_are_averaged_after_losses_that_are_replayed(name: str, ranks: list[Found]) -> None:
    assert all("loss" in rank["deferred", name][1]["covered"] for rank in ranks)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gradients in buckets", "gradient_as_bucket_view"),
        ("gradients sent during the backward pass", "a communication hook"),
        ("uneven inputs", "joins processes"),
    ],
)
def test_what_else_a_reducer_does_is_left_to_it(name: str, reason: str, ranks: list[Found]) -> None:
    for rank in ranks:
        status = rank["deferred", name][1]
        assert status["covered"] == ["forward", "backward", "update"]
        assert any("losses are not deferred" in refusal and reason in refusal for refusal in status["refusals"])


@forms
@pytest.mark.parametrize("name", MIXED)
def test_mixed_loops_are_replayed_where_they_are_not_plain(name: str, form: str, ranks: list[Found]) -> None:
    replays = [status["replays"] for rank in ranks if (status := rank[form, name][1])]
    assert min(replays) > 5


@forms
def test_each_of_several_calls_is_replayed(form: str, ranks: list[Found]) -> None:
    for rank in ranks:
        status = rank[form, "several calls before a backward pass"][1]
        assert status["fallbacks"] == 0
        assert status["replays"] >= 2 * STEPS - 6


@pytest.mark.support(
    "Several processes", "find_unused_parameters, static_graph; FSDP; hooks that send", "plain PyTorch, with a reason"
)
@forms
@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_cannot_be_replayed_says_so(name: str, reason: str, form: str, ranks: list[Found]) -> None:
    for rank in ranks:
        status = rank[form, name][1]
        assert status["replays"] == 0
        assert reason in status["reason"]


@forms
def test_what_is_wrapped_late_says_so(form: str, ranks: list[Found]) -> None:
    for rank in ranks:
        status = rank[form, "wrapped after some steps"][1]
        assert 0 < status["replays"] < 5
        assert any("before a DistributedDataParallel wrapped it" in refusal for refusal in status["refusals"])


@forms
def test_a_part_of_what_is_wrapped_says_so(form: str, ranks: list[Found]) -> None:
    for rank in ranks:
        status = rank[form, "a part of what is wrapped"][1]
        assert status["replays"] == 0
        assert "wraps more than the model" in status["reason"]


@pytest.mark.skipif(torch.cuda.device_count() >= SIZE, reason="NCCL sends no sparse gradients")
def test_sparse_gradients_are_left_to_the_reducer(ranks: list[Found]) -> None:
    for rank in ranks:
        status = rank["deferred", "sparse gradients"][1]
        assert status["covered"] == ["forward", "backward"]
        assert any("left to it: gradients are sparse" in refusal for refusal in status["refusals"])


_groups: list[object] = []
"""Kept: one that is destroyed waits for its thread, which may be letting go of its latest work, and wait for Python."""


def test_a_whole_step_is_left_to_pytorch(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    _groups.append(torch.distributed.group.WORLD)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
        step = kitsune.TrainStep(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            step(torch.randn(6, 4), torch.randint(3, (6,)))
        assert step.status().mode == "eager"
        assert "DistributedDataParallel" in step.status().reason
    finally:
        torch.distributed.destroy_process_group()
