"""Plans: what is run, in which order, on which stream, in which memory. Frozen values, without any tensor.

Read in this order: `tasks` (what there is to do), `build` (how that is found in a graph), `schedule` (when and where
it is done), `memory` (what lies where), `plan` (all of it together).
"""

from kitsune.plan.build import task_graph
from kitsune.plan.fusions import Fusion
from kitsune.plan.memory import MemoryPlan
from kitsune.plan.plan import Plan
from kitsune.plan.schedule import Schedule, Wait
from kitsune.plan.tasks import Cost, Costs, Dependency, Task, TaskGraph, Value

__all__ = [
    "Cost",
    "Costs",
    "Dependency",
    "Fusion",
    "MemoryPlan",
    "Plan",
    "Schedule",
    "Task",
    "TaskGraph",
    "Value",
    "Wait",
    "task_graph",
]
