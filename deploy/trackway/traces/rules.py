"""Rules for complete traces, as pure functions: a tree and its trajectory in, the gaps out."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from trackway.traces import views
from trackway.traces.tree import OF_AGENTS, OF_ENVIRONMENTS, SERVICE_OF_SPAN, SpanNode, TraceTree
from trackway.tracing import attributes as names
from trackway.wire.trajectory import Incident, Trajectory, Turn

REPEATING = frozenset(
    {
        Incident.RETRIED,
        Incident.GENERATION_CUT,
        Incident.WEIGHTS_BEHIND,
        Incident.INSTANCE_LOST,
        Incident.REPLICA_LOST,
    }
)
"""Events after which the same work may have more than one span."""
_REPEATABLE = frozenset({"chat", "execute_tool", "reward"})


def expected_spans(turns: Sequence[Turn], rewards: int) -> dict[str, int]:
    """The number of spans of each kind in a complete tree: an execution for each call that reached its tool."""
    calls = sum(turn.calls_executed for turn in turns)
    return {"turn": len(turns), "chat": len(turns), "execute_tool": calls, "reward": rewards}


def gaps(tree: TraceTree | None, trajectory: Trajectory) -> list[str]:
    """The gaps and contradictions of a trajectory's trace. Empty for a complete one.

    A failed trajectory needs only a root with status ERROR and no orphans, since work that never began has no span.
    """
    if tree is None:
        return ["the trace is absent"]
    if trajectory.error is not None:
        return [
            *_root_gaps(tree),
            *_wrong_services(tree),
            *_different_tags(tree, trajectory),
            *_wrong_status(tree, trajectory),
        ]
    expected = expected_spans(trajectory.turns, rewards=int(trajectory.reward is not None))
    return [
        *tree_gaps(tree, expected),
        *_different_tags(tree, trajectory),
        *_wrong_status(tree, trajectory),
        *_different_values(tree, trajectory),
    ]


def tree_gaps(tree: TraceTree, expected: Mapping[str, int]) -> list[str]:
    """Missing roots, parents and spans, and spans from the wrong service."""
    return [*_root_gaps(tree), *_count_gaps(tree, expected), *_wrong_services(tree)]


def shared_processes(tree: TraceTree) -> list[str]:
    """Processes with spans of two services, which cannot happen when each service has its own."""
    services: dict[str, set[str]] = {}
    for span in tree.spans():
        services.setdefault(str(span.attributes.get(names.PROCESS)), set()).add(span.service)
    return [f"process {process} served two services" for process, served in services.items() if len(served) > 1]


def _root_gaps(tree: TraceTree) -> list[str]:
    roots = [span for span in tree.roots if span.parent_id is None]
    problems = [f"{span.name} has lost its parent" for span in tree.orphans]
    if not roots:
        problems.insert(0, "the root is missing")
    if len(roots) > 1:
        problems.append(f"{len(roots)} roots: {', '.join(span.name for span in roots)}")
    if roots and (tree.state == "IN_PROGRESS" or roots[0].end_ms is None):
        problems.append("the trace is still IN_PROGRESS")
    return problems


def _count_gaps(tree: TraceTree, expected: Mapping[str, int]) -> list[str]:
    spans = list(tree.spans())
    counts = Counter(span.kind for span in spans if span.service)
    events = {event.name for span in spans for event in span.events}
    repeated = not events.isdisjoint(REPEATING)
    died = "; a process died, and with it the spans it had not exported" if Incident.REPLICA_LOST in events else ""
    problems = []
    for kind, wanted in expected.items():
        count = counts[kind]
        if count < wanted:
            problems.append(f"{count} of {wanted} {kind} spans{_where(tree, kind)}{died}")
        elif count > wanted and not (repeated and kind in _REPEATABLE):
            problems.append(f"{count} {kind} spans, expected {wanted}")
    return problems


def _where(tree: TraceTree, kind: str) -> str:
    """Names the turns without a generation."""
    if kind != "chat":
        return ""
    without = [turn.name for turn in tree.of_kind("turn") if all(span.kind != "chat" for span in turn.walk())]
    return f": none below {', '.join(without)}" if without else ""


def _wrong_services(tree: TraceTree) -> list[str]:
    agent = str(tree.root.attributes.get(names.AGENT_NAME, "")) if tree.root is not None else ""
    by_agent = OF_AGENTS | OF_ENVIRONMENTS if agent.startswith("environment:") else OF_AGENTS
    return [
        f"{span.name} was made by {span.service}, expected {SERVICE_OF_SPAN[span.kind]}"
        for span in tree.spans()
        if span.service
        and span.kind in SERVICE_OF_SPAN
        and span.service != SERVICE_OF_SPAN[span.kind]
        and not (span.service == "agent" and span.kind in by_agent)
    ]


def _different_tags(tree: TraceTree, trajectory: Trajectory) -> list[str]:
    if tree.root is None:
        return []  # tags come from the root, whose absence is reported already
    expected = {key: str(value) for key, value in trajectory.tags.model_dump().items()}
    return [
        f"tag {key} is {tree.tags.get(key)!r}, expected {value!r}"
        for key, value in expected.items()
        if tree.tags.get(key) != value
    ]


def _wrong_status(tree: TraceTree, trajectory: Trajectory) -> list[str]:
    root = tree.root
    if root is None or (root.status == "ERROR") == (trajectory.error is not None):
        return []
    how = f"failed with {trajectory.error.code.value}" if trajectory.error else "did not fail"
    return [f"the root's status is {root.status}, but the trajectory {how}"]


def _different_values(tree: TraceTree, trajectory: Trajectory) -> list[str]:
    problems = []
    turns = views.number(views.output_of(tree, "num_turns"))
    if turns is not None and turns != trajectory.num_turns:
        problems.append(f"num_turns is {turns:g} in the trace, {trajectory.num_turns} in the dump")
    for place, reward in _rewards(tree).items():
        if trajectory.reward is not None and not math.isclose(
            reward, trajectory.reward.score, rel_tol=1e-6, abs_tol=1e-9
        ):
            problems.append(f"the reward is {reward:g} in {place}, {trajectory.reward.score:g} in the dump")
    return problems


def _rewards(tree: TraceTree) -> dict[str, float]:
    """Every reward in the trace, by its location."""
    scoring: SpanNode | None = next(iter(reversed(tree.of_kind("reward"))), None)
    rewards = {
        "the root": views.output_of(tree, "reward"),
        "the reward span": None if scoring is None else views.field_of(scoring.outputs, "score"),
        "the feedback": tree.feedback.get("reward"),
    }
    return {place: value for place, reward in rewards.items() if (value := views.number(reward)) is not None}
