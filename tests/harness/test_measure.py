"""The instrument: what it keeps of a variant and of a round. Nothing here judges a duration."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness import measure, variants
from harness.measure import ProfileJob, RoundJob, SetupJob, SetupResult, Task
from harness.memory_timeline import ON_THE_CPU
from harness.processes import Launcher, Note
from harness.profiles import Case, Effort
from harness.replay_plans import ReplayPlan
from harness.timer import BlockTime
from harness.variants.training import Ingredients, Training, prepare

CASE = Case("mlp", 4, "cpu", 12)
EFFORT = Effort(
    rounds=2,
    turns=(2, 4),
    timed_seconds=0.05,
    block_seconds=0.002,
    warm_up_seconds=0.05,
    settle_seconds=30.0,
    process_seconds=120.0,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher()


def test_a_probe_finds_facts_and_reasons(launcher: Launcher, tmp_path: Path) -> None:
    found = launcher.run(measure.probe, tmp_path, timeout_s=120)
    assert found.facts["device_type"] in ("cpu", "cuda")
    assert found.unavailable["kitsune_trainstep_fp32"] == "this commit has no kitsune"
    assert "eager_fp32" not in found.unavailable


def test_a_profile_has_setup_peak_and_losses(launcher: Launcher, tmp_path: Path) -> None:
    result = launcher.run(
        measure.measure_profile, ProfileJob(CASE, Task("eager_fp32", tmp_path), EFFORT), timeout_s=120
    )
    assert result.setup_s > 0
    assert result.peak.allocated_bytes is None
    assert result.peak.rss_bytes > 2**20
    assert [step for step, _ in result.losses] == list(range(12))
    assert result.losses[-1][1] < result.losses[0][1]
    assert (result.caches, result.status, result.first_replay_s) == (None, None, None)
    assert result.peak.inactive_split_bytes is None
    assert result.memory_timeline == ON_THE_CPU


def test_set_up_again_finds_what_the_first_has_left(launcher: Launcher, tmp_path: Path) -> None:
    task = Task("compile_fp32", tmp_path)
    first = launcher.run(measure.measure_profile, ProfileJob(CASE, task, EFFORT), timeout_s=120)
    assert first.caches == "cold"
    again = launcher.run(measure.measure_setup, SetupJob(CASE, task, EFFORT), timeout_s=120)
    assert again.setup_s < first.setup_s
    assert again.first_replay_s is None
    assert launcher.run(measure.measure_profile, ProfileJob(CASE, task, EFFORT), timeout_s=120).caches == "warm"


@pytest.mark.parametrize("form", ["dropin", "deferred", "trainstep"])
def test_of_kitsune_the_first_replay_is_timed_too(launcher: Launcher, form: str) -> None:
    task = Task(f"kitsune_{form}_fp32")
    first = launcher.run(measure.measure_profile, ProfileJob(CASE, task, EFFORT), timeout_s=120)
    again = launcher.run(measure.measure_setup, SetupJob(CASE, task, EFFORT), timeout_s=120)
    for found in (first, again):
        assert found.first_replay_s is not None
        assert 0 < found.first_replay_s <= found.setup_s


def test_the_same_variant_trains_the_same_way_twice(launcher: Launcher) -> None:
    job = ProfileJob(CASE, Task("eager_fp32"), EFFORT)
    first, second = (launcher.run(measure.measure_profile, job, timeout_s=120) for _ in range(2))
    assert first.losses == second.losses


def test_every_variant_of_a_round_has_every_turn(launcher: Launcher) -> None:
    tasks = (Task("eager_fp32"), Task("eager_amp"))
    result = launcher.run(measure.measure_round, RoundJob(CASE, tasks, EFFORT, 0), timeout_s=120)
    assert result.failures == {}
    assert set(result.blocks) == {"eager_fp32", "eager_amp"}
    assert set(result.steps_per_block) == set(result.blocks)
    assert all(steps >= 1 for steps in result.steps_per_block.values())
    assert len({len(times) for times in result.blocks.values()}) == 1
    for times in result.blocks.values():
        assert 2 <= len(times) <= 4
        assert all(block.wall_s > 0 and block.device_s is None for block in times)


def test_a_round_tells_the_plan_of_what_replays(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "replay")
    tasks = (Task("eager_fp32"), Task("kitsune_trainstep_fp32"))
    result = launcher.run(measure.measure_round, RoundJob(CASE, tasks, EFFORT, 0), timeout_s=120)
    assert result.failures == {}
    assert result.modes == {"kitsune_trainstep_fp32": "replay"}
    assert result.plans == {"kitsune_trainstep_fp32": ReplayPlan("in order", 1, fused=False)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which capturing fails")
def test_a_variant_that_raises_leaves_the_round_and_is_reported(launcher: Launcher) -> None:
    tasks = (Task("handcaptured_fp32"), Task("eager_fp32"))
    result = launcher.run(measure.measure_round, RoundJob(CASE, tasks, EFFORT, 0), timeout_s=120)
    assert set(result.blocks) == {"eager_fp32"}
    assert set(result.failures) == {"handcaptured_fp32"}
    assert "Traceback" in result.failures["handcaptured_fp32"]


class Recorded(Training):
    """A training that records its runs, and settles after some steps."""

    def __init__(self, ingredients: Ingredients, log: list[tuple[str, int]], name: str, settles_after: int = 1) -> None:
        super().__init__(ingredients)
        self.log, self.name, self.settles_after, self.steps = log, name, settles_after, 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._ingredients.adam()

    @property
    def settled(self) -> bool:
        return self.steps >= self.settles_after

    def _run(self, steps: int) -> Tensor:
        self.steps += steps
        self.log.append((self.name, steps))
        return torch.tensor(float(self.steps))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What trainings in this very process do, in order; nothing of the process is changed for it."""
    entries: list[tuple[str, int]] = []
    monkeypatch.setattr(measure, "begin_device", lambda case: CPU)
    monkeypatch.setattr(measure.gc, "freeze", lambda: None)
    monkeypatch.setattr(measure, "start", lambda variant, ingredients: Recorded(ingredients, entries, variant.name))
    monkeypatch.setattr(measure, "warm_up", lambda training, device, seconds: 1e-3)
    return entries


def silent(text: str) -> None:
    """A note that nobody reads."""


@pytest.mark.parametrize("number", [0, 1, 2])
def test_turns_go_back_as_they_came_and_rounds_make_another_one_first(log: list[tuple[str, int]], number: int) -> None:
    tasks = (Task("eager_fp32"), Task("eager_amp"))
    first = measure.order_of_making(RoundJob(CASE, tasks, EFFORT, number))[0].variant
    result = measure.measure_round(RoundJob(CASE, tasks, EFFORT, number), silent)
    assert result.steps_per_block == {"eager_fp32": 2, "eager_amp": 2}
    assert log[0] == (first, 1)
    blocks = [name for name, steps in log if steps == 2]
    turns = [blocks[index : index + 2] for index in range(0, len(blocks), 2)]
    assert all(set(turn) == {"eager_fp32", "eager_amp"} for turn in turns)
    assert all(back == forth[::-1] for forth, back in zip(turns[::2], turns[1::2], strict=False))
    log.clear()
    measure.measure_round(RoundJob(CASE, tasks, EFFORT, number), silent)
    assert [name for name, steps in log if steps == 2][: len(blocks)] == blocks


def test_a_round_tells_how_it_ended_and_what_disturbed_it(log: list[tuple[str, int]]) -> None:
    result = measure.measure_round(RoundJob(CASE, (Task("eager_fp32"),), EFFORT, 0), silent)
    assert result.ended in ("turns", "seconds")
    assert result.gpu == {"unavailable": "measured on the CPU"}
    assert set(result.host) == {"busy_elsewhere", "stolen", "preemptions", "load_1min"}
    assert result.throttled == ()


def test_plans_are_those_at_the_end_of_a_round_and_of_what_ran_through(
    log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_in_use(training: Recorded) -> ReplayPlan | None:
        if training.name == "compile_fp32":
            raise AttributeError("an older commit has none")
        log.append(("plan", 0))
        return ReplayPlan("list", 2, fused=True) if training.name == "eager_amp" else None

    def block(run: Callable[[int], object], steps: int, device: torch.device) -> BlockTime:
        run(steps)
        if log[-1][0] == "handcaptured_fp32":
            raise ValueError("it broke")
        return BlockTime(1e-3, None)

    monkeypatch.setattr(Recorded, "plan_in_use", plan_in_use)
    monkeypatch.setattr(measure, "timed_block", block)
    tasks = tuple(map(Task, ("eager_fp32", "eager_amp", "compile_fp32", "handcaptured_fp32")))
    result = measure.measure_round(RoundJob(CASE, tasks, EFFORT, 0), silent)
    assert set(result.blocks) == {"eager_fp32", "eager_amp", "compile_fp32"}
    assert result.plans == {"eager_amp": ReplayPlan("list", 2, fused=True)}
    assert [index for index, (name, _) in enumerate(log) if name == "plan"] == [len(log) - 2, len(log) - 1]


def test_long_blocks_follow_a_step_that_is_not_timed(log: list[tuple[str, int]]) -> None:
    training = Recorded(prepare(variants.get("eager_fp32"), "mlp", 1, CPU), log, "it")
    measure.timed_block(training.run, 3, CPU)
    measure.timed_block(training.run, 4, CPU)
    assert log == [("it", 3), ("it", 1), ("it", 4)]


@pytest.mark.parametrize(("steps", "lead_in"), [(1, 0), (3, 0), (4, 1), (100, 1)])
def test_on_a_cpu_a_long_block_begins_with_one_step(steps: int, lead_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(measure, "time_block", lambda *_, lead_in: lengths.append(lead_in))
    measure.timed_block(lambda _: None, steps, CPU)
    assert lengths == [lead_in]


@pytest.mark.parametrize(("steps", "lead_in"), [(1, 1), (2, 2), (4, 4), (100, 4)])
def test_on_a_gpu_the_host_gets_ahead_first(steps: int, lead_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else short blocks would measure how long the host takes to launch the first step."""
    lengths: list[int] = []
    monkeypatch.setattr(measure, "time_block", lambda *_, lead_in: lengths.append(lead_in))
    measure.timed_block(lambda _: None, steps, torch.device("cuda"))
    assert lengths == [lead_in]


def test_settling_takes_as_many_steps_as_it_takes(log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LOOK_EVERY_SECONDS", 0.0)
    training = Recorded(prepare(variants.get("eager_fp32"), "mlp", 1, CPU), log, "it", settles_after=7)
    measure.settle(training, lambda training: training.run(1), 60.0)
    assert training.steps == 7
    measure.settle(training, lambda training: training.run(1), 0.0)
    assert training.steps == 8  # settled before, but a step is always taken


def test_steps_that_settle_follow_each_other_without_being_looked_at(
    log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    class Looked(Recorded):
        """Each of its steps takes a millisecond."""

        @property
        def settled(self) -> bool:
            looks.append(self.steps)
            return super().settled

    training = Looked(prepare(variants.get("eager_fp32"), "mlp", 1, CPU), log, "it", settles_after=30)
    monkeypatch.setattr(measure.time, "monotonic", lambda: training.steps / 1000)
    measure.settle(training, lambda training: training.run(1), 60.0)
    assert looks == [1, 12, 23, 34]


@pytest.mark.parametrize(
    ("replayed", "looks_at", "waits_at", "seconds_until"),
    [(15, [1, 12, 23], [0, 23, 34], 0.023), (None, [1, 12, 23, 34], [0, 34], None)],
)
def test_the_first_replay_is_looked_for_now_and_then_and_waited_for_once(
    log: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    replayed: int | None,
    looks_at: list[int],
    waits_at: list[int],
    seconds_until: float | None,
) -> None:
    looks: list[int] = []
    waits: list[int] = []
    made: list[Recorded] = []

    class Replaying(Recorded):
        """Each of its steps takes a millisecond; some are replayed, or none."""

        @property
        def has_replayed(self) -> bool:
            looks.append(self.steps)
            return replayed is not None and self.steps >= replayed

    def begin(variant: variants.Variant, ingredients: Ingredients) -> Training:
        made.append(Replaying(ingredients, log, variant.name, settles_after=30))
        return made[0]

    def seconds() -> float:
        return made[0].steps / 1000 if made else 0.0

    monkeypatch.setattr(measure, "start", begin)
    monkeypatch.setattr(measure, "synchronize", lambda device: waits.append(made[0].steps if made else 0))
    monkeypatch.setattr(measure.time, "monotonic", seconds)
    monkeypatch.setattr(measure.time, "perf_counter", seconds)
    found = measure.measure_setup(SetupJob(CASE, Task("eager_fp32"), EFFORT), silent)
    assert found == SetupResult(0.034, seconds_until)
    assert (looks, waits) == (looks_at, waits_at)


def test_each_is_made_before_another_as_often_as_after_it() -> None:
    tasks = tuple(Task(name) for name in "abcd")
    orders = [measure.order_of_making(RoundJob(CASE, tasks, EFFORT, number)) for number in range(40)]
    assert [orders[number] for number in range(0, 40, 2)] == [orders[number][::-1] for number in range(1, 40, 2)]
    assert {order[0] for order in orders} == set(tasks)
    assert all(set(order) == set(tasks) for order in orders)


def test_a_training_that_never_settles_is_not_waited_for(log: list[tuple[str, int]]) -> None:
    training = Recorded(prepare(variants.get("eager_fp32"), "mlp", 1, CPU), log, "it", settles_after=10**9)
    measure.settle(training, lambda training: training.run(1), 0.0)
    assert training.steps == 1


def test_blocks_of_all_variants_are_about_as_long() -> None:
    assert measure.steps_per_block(0.1, EFFORT) == 1
    assert measure.steps_per_block(1e-4, EFFORT) == 20


def test_stable_is_when_the_last_blocks_agree() -> None:
    assert not measure._stable([1.0, 1.0])
    assert measure._stable([9.0, 1.0, 1.04, 1.02])
    assert not measure._stable([1.0, 1.0, 1.2])


def test_losses_keep_first_and_last_of_a_long_run(log: list[tuple[str, int]]) -> None:
    training = Recorded(prepare(variants.get("eager_fp32"), "mlp", 1, CPU), log, "it")
    losses = measure._Losses(200)
    for _ in range(210):
        losses.step(training)
    kept = losses.values()
    assert kept[0] == (0, 1.0)
    assert kept[-1] == (199, 200.0)
    assert 50 <= len(kept) <= 52


def test_a_typical_block_is_the_median() -> None:
    blocks = [BlockTime(seconds, None) for seconds in (3.0, 1.0, 100.0)]
    assert measure.median_step_seconds(blocks) == 3.0


def notes_of_round(tasks: tuple[Task, ...]) -> list[str]:
    said: list[str] = []
    note: Note = said.append
    measure.measure_round(RoundJob(CASE, tasks, EFFORT, 0), note)
    return said


def test_a_round_says_at_any_time_which_variant_is_at_work(log: list[tuple[str, int]]) -> None:
    said = notes_of_round((Task("eager_fp32"), Task("eager_amp")))
    assert set(said[:2]) == {"eager_fp32", "eager_amp"}
    assert set(said[2:4]) == {"eager_fp32", "eager_amp"}
    assert set(said) == {"eager_fp32", "eager_amp"}


def test_a_lost_device_ends_the_round(log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(run: Callable[[int], object], steps: int, device: torch.device) -> BlockTime:
        monkeypatch.setattr(measure, "synchronize", lost)
        raise ValueError("the variant broke it")

    monkeypatch.setattr(measure, "timed_block", broken)
    with pytest.raises(ValueError, match="the variant broke it"):
        measure.measure_round(RoundJob(CASE, (Task("eager_fp32"),), EFFORT, 0), silent)
