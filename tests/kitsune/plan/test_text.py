from dataclasses import replace

import pytest
from hypothesis import given

from kitsune.plan import Cost, Costs, Fusion, MemoryPlan, Plan, Schedule, Task, TaskGraph, Wait
from tests.kitsune.plan import plans

GOLDEN = """\
Plan: 5 tasks on 2 streams, list
  predicted     16.25 us, of measured costs
  measured      17.50 us
  waits         2
  off stream 0  16.9% of the tasks' time
  arena         24,576 bytes, for 100% of the bytes that tasks make
  values        20,544 bytes alive at once at most

task  name               operator                        stream  start us  cost us  share  bound    waits for   bytes  offset
   0  addmm              aten.addmm.default                   0      0.00     3.50   0.50  compute  -           4,096       0
   1  mse_loss_backward  aten.mse_loss_backward.default       0      4.00     2.00   0.25  memory   -           4,096    4096
   3  sum_1              aten.sum.dim_IntList                 1      7.00     3.00   0.12  latency  1              64       0
   2  mm                 aten.mm.default                      0      6.50     4.25   1.00  latency  -          16,384    8192
   4  _fused_adam_       aten._fused_adam_.tensor_lr          0     11.25     5.00   1.00  latency  3               -       -"""  # noqa: E501


def test_the_table_of_a_small_plan() -> None:
    assert str(plans.small()) == GOLDEN


def test_the_summary_is_the_tables_head() -> None:
    assert plans.small().summary() == GOLDEN.partition("\n\n")[0]


def test_what_is_not_known_is_said() -> None:
    plan = replace(plans.small(), measured_us=None, predicted_spans=None)
    assert "  measured      not measured\n" in plan.summary()
    assert [line.split()[4] for line in str(plan).splitlines()[9:]] == ["-"] * 5


def test_what_was_fused_is_another_table() -> None:
    fusions = (
        Fusion("batch norm + relu", ("native_batch_norm", "relu"), 30.0, 10.0, None),
        Fusion("batch norm + relu", ("native_batch_norm_1", "relu_1"), 20.0, 12.5, None),
        Fusion("linear + relu", ("addmm", "relu_2"), 5.0, 6.0, "it is not faster"),
        Fusion("linear + relu", ("addmm_1", "relu_3"), None, None, "it cannot be used here: float64"),
    )
    plan = replace(plans.small(), fusions=fusions)
    assert plan.is_fused
    assert "fusion        2 parts of the graph, which by themselves take 27.50 us less" in plan.summary()
    assert str(plan).split("\n\n")[2].splitlines() == [
        "fused              times  before us  after us  outcome",
        "batch norm + relu      2      25.00     11.25  replaced",
        "linear + relu          1       5.00      6.00  it is not faster",
        "linear + relu          1          -         -  it cannot be used here: float64",
    ]
    assert not replace(plan, fusions=fusions[2:]).is_fused


@given(plans.plans())
def test_every_task_has_one_line_in_the_order_of_issue(plan: Plan) -> None:
    lines = str(replace(plan, fusions=())).split("\n")
    assert [int(line.split()[0]) for line in lines[9:]] == list(plan.schedule.order)
    assert all(line == line.rstrip() for line in lines[1:])


@given(plans.plans())
def test_a_row_holds_the_tasks_own_figures(plan: Plan) -> None:
    """Each row is compared with one built from single questions to the plan instead of from grouped ones."""
    for line, index in zip(str(replace(plan, fusions=())).split("\n")[9:], plan.schedule.order, strict=True):
        cost = plan.costs.tasks[index]
        awaited = ", ".join(str(wait.earlier) for wait in plan.schedule.waits if wait.later == index) or "-"
        own = [value for value in plan.graph.values if value.producer == index]
        places = [plan.memory.offsets[value.index] for value in own]
        num_bytes = f"{sum(value.num_bytes for value in own):,}" if own else "-"
        offsets = ", ".join("-" if place is None else str(place) for place in places) or "-"
        expected = [f"{cost.us:.2f}", f"{cost.share:.2f}", cost.bound, *awaited.split(), num_bytes, *offsets.split()]
        assert line.split()[-len(expected) :] == expected


@pytest.mark.parametrize(
    ("streams", "costs", "share"),
    [((0, 0), (1.0, 2.0), 0.0), ((0, 1), (1.0, 3.0), 0.75), ((1, 0), (0.0, 0.0), 0.0), ((), (), 0.0)],
)
def test_the_share_off_the_main_stream(streams: tuple[int, ...], costs: tuple[float, ...], share: float) -> None:
    tasks = tuple(Task(index, f"t{index}", "op", (f"t{index}",)) for index in range(len(streams)))
    plan = Plan(
        TaskGraph(tasks),
        Schedule("x", tuple(range(len(streams))), streams),
        MemoryPlan((), 0, 0),
        Costs(tuple(map(Cost, costs)), 0.0, 0.0, "analytic"),
        predicted_us=0.0,
    )
    assert f"  {100 * share:.1f}% of" in plan.summary()


def test_names_cannot_break_a_line() -> None:
    plan = plans.small()
    tasks = (replace(plan.graph.tasks[0], operator="a\nb\tc\x1b[0m"), *plan.graph.tasks[1:])
    assert "a?b?c?[0m" in str(replace(plan, graph=replace(plan.graph, tasks=tasks)))


def test_all_awaited_tasks_are_listed() -> None:
    plan = plans.small()
    schedule = Schedule("x", (0, 1, 2, 3, 4), (0, 1, 2, 3, 0), (Wait(4, 1), Wait(4, 2), Wait(4, 3)))
    assert "  1, 2, 3  " in str(replace(plan, schedule=schedule)).splitlines()[-1]
