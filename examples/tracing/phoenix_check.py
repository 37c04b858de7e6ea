"""Compare the traces in an Arize Phoenix with a run's trajectories: conversation, tokens, tool calls and score.

python examples/tracing/phoenix_check.py outputs/demo/seed0 demo [http://127.0.0.1:6006]
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from trackway.trainer.run_state.trajectory_dump import read_trajectories
from trackway.wire.chat import Message
from trackway.wire.trajectory import Trajectory

Span = dict[str, Any]


def spans_of(project: str, url: str) -> Iterator[Span]:
    """All spans of the project."""
    cursor: str | None = None
    with httpx.Client(base_url=url, timeout=60.0) as phoenix:
        while True:
            query = {"limit": 1000} | ({} if cursor is None else {"cursor": cursor})
            page = phoenix.get(f"/v1/projects/{project}/spans", params=query).raise_for_status().json()
            yield from page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return


def facts_of(spans: list[Span]) -> dict[str, object]:
    """Read a trajectory's facts from its trace."""
    chats = [span["attributes"] for span in spans if span["span_kind"] == "LLM"]
    [root] = [span["attributes"] for span in spans if span["span_kind"] == "AGENT"]
    messages = json.loads(root.get("gen_ai.output.messages", "[]"))
    return {
        "texts": [part for message in messages for part in _texts(message)],
        "tokens": sum(chat["llm.token_count.completion"] for chat in chats),
        "tool calls": sum(span["span_kind"] == "TOOL" for span in spans),
        "score": root.get("gen_ai.evaluation.score.value"),
    }


def expected_of(trajectory: Trajectory) -> dict[str, object]:
    """Read the same facts from the run's files."""
    messages = [message for turn in trajectory.turns for message in turn.messages]
    return {
        "texts": [text for message in messages for text in _contents(message)],
        "tokens": sum(trajectory.response_mask),
        "tool calls": sum(turn.calls_executed for turn in trajectory.turns),
        "score": trajectory.reward.score if trajectory.reward else None,
    }


def _texts(message: dict[str, Any]) -> list[str]:
    return [str(part.get("content") or part.get("response") or part.get("name")) for part in message["parts"]]


def _contents(message: Message) -> list[str]:
    calls = [call.function.name for call in message.tool_calls or []]
    return [*([message.content] if message.content else []), *calls]


def main(run: Path, project: str, url: str = "http://127.0.0.1:6006") -> int:
    """Print the differences and return how many traced trajectories have one."""
    traces: dict[str, list[Span]] = defaultdict(list)
    for span in spans_of(project, url):
        traces[span["context"]["trace_id"]].append(span)
    files = sorted((run / "trajectories").glob("*.parquet"))
    traced = [trajectory for path in files for trajectory in read_trajectories(path) if trajectory.trace_id]
    different = 0
    for trajectory in traced:
        spans = traces.get(str(trajectory.trace_id), [])
        seen, expected = facts_of(spans) if spans else {}, expected_of(trajectory)
        if seen != expected:
            different += 1
            print(f"{trajectory.id}: expected {expected}, got {seen}")
    print(f"{len(traced) - different} of {len(traced)} traced trajectories are the same in Phoenix")
    return different


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:4]) != 0)
