"""List scheduling: the most urgent task goes where it ends first."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from kitsune.plan import Costs, Schedule, TaskGraph
from kitsune.schedule.edges import dependencies, dependents, upward_ranks
from kitsune.schedule.live_bytes import IssuedBytes
from kitsune.schedule.reduce import Issuing
from kitsune.schedule.sharing import SharedDevice

_LOOKS = 8  # ready tasks that are looked at when a stream is idle, so that many that yield cost no time
_JOINS = 2.0  # waits that a wait is thought to cost later, when its stream is joined

Queue = list[tuple[float, int]]
"""A heap of tasks, each behind a key."""


def list_schedule(graph: TaskGraph, costs: Costs, num_streams: int, max_bytes: int | None = None) -> Schedule:
    """Assigns the tasks of `graph` to at most `num_streams` streams while it simulates the device.

    As in HEFT (Topcuoglu et al., 2002), the task with the longest path ahead comes first and goes to the stream on
    which it ends first. Here that is decided whenever a task has ended, in the model of `simulate`: tasks share the
    device, and waits have a price. A task that ends sooner behind what a busy stream does waits for that, and others
    may overtake it. So a task off the critical path, such as a weight gradient, yields to those on it, and forks only
    where that gains more than the waits cost, and the join that will follow. Ties prefer the stream of the dependency
    that ended last, then the lower stream.

    Tasks are issued as they are decided: by the time at which they start, up to the price of a wait. Takes
    O(tasks * (streams² + log tasks)). With `max_bytes`, a task is put off while the values that are alive in the order
    of issue would need more than that, as long as anything else can be issued or runs. After that the task that comes
    first in the graph goes ahead, so the order of issue keeps to the bound only as a rule.
    """
    listing = _Listing(graph, costs, num_streams, inf if max_bytes is None else max_bytes)
    listing.assign()
    while listing.advance():
        listing.assign()
    return listing.issuing.schedule("list")


class _Listing:
    """The state of a list scheduling: what runs where, and what may be assigned."""

    def __init__(self, graph: TaskGraph, costs: Costs, num_streams: int, max_bytes: float) -> None:
        after = dependencies(graph)
        self.issuing = Issuing(after, num_streams)
        self._costs = costs
        self._before = dependents(after)
        self._blockers = [len(earlier) for earlier in after]
        self._released_us = [-costs.launch_us] * len(after)  # when the last dependency of the task ended
        self._preferred = [0] * len(after)  # the stream of that dependency
        self._is_issued = [False] * len(after)
        self._ranks = upward_ranks(self._before, costs)
        self._urgent: Queue = []  # ready tasks, the longest path first
        self._first: Queue = []  # ready tasks in graph order
        self._bytes = IssuedBytes(graph)
        self._max_bytes = max_bytes
        self._device = SharedDevice()
        self._starting: Queue = []  # assigned tasks that do not run yet, by the time at which they start
        self._occupants: list[int | None] = [None] * num_streams
        self._free_us = [-costs.launch_us] * num_streams  # when the occupant will end, or the latest one ended
        self._is_used = [False] * num_streams
        for task, earlier in enumerate(after):
            if not earlier:
                self._release(task)

    def assign(self) -> None:
        """Gives the idle streams to the most urgent of the ready tasks for which they are best."""
        blocked = self._assign_from(self._urgent)
        if not blocked:
            return
        self._assign_from(self._first)
        while self._first and self._is_issued[self._first[0][1]]:
            heappop(self._first)
        if self._first and all(occupant is None for occupant in self._occupants):
            task = heappop(self._first)[1]
            stream, begin_us = self._best(task)
            self._occupy(stream, task, begin_us)

    def advance(self) -> bool:
        """Runs the device until a task has ended, with all that end at that time; false if nothing is left to run."""
        device = self._device
        while self._starting and self._starting[0][0] < device.next_end_us():
            time_us, task = heappop(self._starting)
            device.run_until(time_us)
            device.start(task, self._costs.tasks[task])
        if device.next_end_us() == inf:
            return False
        self._end(device.end_next())
        while device.next_end_us() <= device.now_us:
            self._end(device.end_next())
        return True

    def _assign_from(self, queue: Queue) -> bool:
        """Assigns the first tasks of `queue` for which an idle stream is best; whether memory stood in the way."""
        put_off: Queue = []
        blocked = False
        while queue and None in self._occupants and len(put_off) < _LOOKS:
            entry = heappop(queue)
            task = entry[1]
            if self._is_issued[task]:  # from the other queue
                continue
            if self._bytes.held + self._bytes.allocated(task) > self._max_bytes:
                blocked = True
                put_off.append(entry)
                continue
            stream, begin_us = self._best(task)
            if self._occupants[stream] is None:
                self._occupy(stream, task, begin_us)
            else:
                put_off.append(entry)
        for entry in put_off:
            heappush(queue, entry)
        return blocked

    def _best(self, task: int) -> tuple[int, float]:
        """The stream on which `task` ends first, as far as can be seen now, and when it begins there."""
        cost = self._costs.tasks[task]
        choices = []
        for stream, occupant in enumerate(self._occupants):
            num_waits = len(self.issuing.waits(task, stream))
            last_us = max(self._free_us[stream], self._released_us[task])
            begin_us = max(self._device.now_us, last_us + self._costs.launch_us + self._costs.sync_us * num_waits)
            load = self._device.load + cost.share
            if occupant is not None:
                load -= self._costs.tasks[occupant].share
            end_us = begin_us + cost.us * max(1.0, load) + _JOINS * self._costs.sync_us * num_waits
            choices.append((end_us, stream != self._preferred[task], stream, begin_us))
            if not self._is_used[stream]:
                break  # one unused stream is like another
        _, _, stream, begin_us = min(choices)
        return stream, begin_us

    def _occupy(self, stream: int, task: int, begin_us: float) -> None:
        cost = self._costs.tasks[task]
        self.issuing.issue(task, stream)
        self._bytes.issue(task)
        self._is_issued[task] = self._is_used[stream] = True
        self._occupants[stream] = task
        self._free_us[stream] = begin_us + cost.us * max(1.0, self._device.load + cost.share)
        heappush(self._starting, (begin_us, task))

    def _end(self, task: int) -> None:
        stream = self._occupants.index(task)
        self._occupants[stream] = None
        self._free_us[stream] = self._device.now_us
        for later in self._before[task]:
            self._blockers[later] -= 1
            if not self._blockers[later]:
                self._released_us[later] = self._device.now_us
                self._preferred[later] = stream
                self._release(later)

    def _release(self, task: int) -> None:
        heappush(self._urgent, (-self._ranks[task], task))
        if self._max_bytes < inf:
            heappush(self._first, (task, task))
