"""Chains: the most concurrency for the fewest synchronizations."""

from __future__ import annotations

from kitsune.plan import Costs, Schedule, TaskGraph
from kitsune.schedule.edges import dependencies, dependents, upward_ranks
from kitsune.schedule.matching import maximum_matching
from kitsune.schedule.reduce import Issuing, reduce_edges


def chains(graph: TaskGraph, costs: Costs) -> list[tuple[int, ...]]:
    """Parts `graph` into chains, each of tasks that depend on each other one after the other; by their first tasks.

    The stream assignment of Nimble (Kwon et al., NeurIPS 2020): a maximum matching between the tasks and their
    dependents in the transitive reduction of the graph tells which dependent follows a task on its chain. With a
    stream for each chain, independent tasks are never on the same stream, and of all such assignments this needs the
    fewest synchronizations: one for each dependency of the reduction that is not matched. Of the maximum matchings
    it is one that prefers the dependents with the longest path ahead.
    """
    before = dependents(reduce_edges(dependencies(graph)))
    ranks = upward_ranks(before, costs)
    preferred = [sorted(later, key=lambda task: (-ranks[task], task)) if len(later) > 1 else later for later in before]
    following = maximum_matching(preferred, len(before))
    followers = set(following)
    result = []
    for head in range(len(before)):
        if head in followers:
            continue
        chain, task = [head], following[head]
        while task is not None:
            chain.append(task)
            task = following[task]
        result.append(tuple(chain))
    return result


def chain_schedule(graph: TaskGraph, costs: Costs, num_streams: int) -> Schedule:
    """Puts the chains of `graph` on at most `num_streams` streams; issued in graph order.

    Chains get their streams in the order of their first tasks: each the stream on which its first task would begin
    first, if tasks did not slow each other down and all that is left of the chains already there ran before it. So a
    stream is shared by chains that follow each other, and if there are more chains at once than streams, the
    shortest queue is joined. Ties go to the stream that needs fewer waits, then to the one of lower index.
    """
    after = dependencies(graph)
    issuing = Issuing(after, num_streams)
    stream_of: dict[int, int] = {}
    heads = {chain[0]: chain for chain in chains(graph, costs)}
    ends = [0.0] * len(after)
    free = [0.0] * num_streams  # when the latest task of the stream ends
    left = [0.0] * num_streams  # microseconds of the tasks to come on the stream
    for task, earlier_tasks in enumerate(after):
        ready = max((ends[earlier] for earlier in earlier_tasks), default=0.0)
        if task in heads:
            begins = []
            for stream in range(num_streams):
                num_waits = len(issuing.waits(task, stream))
                begin = max(free[stream] + left[stream], ready) + costs.sync_us * num_waits
                begins.append((begin, num_waits, stream))
            stream = min(begins)[2]
            stream_of |= dict.fromkeys(heads[task], stream)
            left[stream] += sum(costs.tasks[member].us + costs.launch_us for member in heads[task])
        stream = stream_of[task]
        begin = max(free[stream], ready) + costs.launch_us + costs.sync_us * len(issuing.waits(task, stream))
        ends[task] = free[stream] = begin + costs.tasks[task].us
        left[stream] -= costs.tasks[task].us + costs.launch_us
        issuing.issue(task, stream)
    return issuing.schedule("chains")
