"""Compare the traces in a receiver with a run's trajectories: conversation, tokens, tool calls and score.

python examples/tracing/read_back.py phoenix outputs/demo/seed0 http://127.0.0.1:6006 demo
python examples/tracing/read_back.py agentmesh outputs/demo/seed0 http://127.0.0.1:8787
python examples/tracing/read_back.py mlflow outputs/demo/seed0 http://127.0.0.1:5000
WANDB_API_KEY=... python examples/tracing/read_back.py weave outputs/demo/seed0 my-team/demo
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from trackway.traces.mlflow_store import MlflowStore
from trackway.traces.store import TraceFilter, TraceStore
from trackway.traces.tree import TraceTree
from trackway.traces.views import messages_of, output_of, tokens_of
from trackway.traces.weave_store import WeaveStore
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.chat import Message
from trackway.wire.trajectory import Trajectory

Item = dict[str, Any]
"""A span, a message or a score in the receiver's JSON."""
Facts = dict[str, object]


def of_phoenix(url: str, project: str = "default") -> dict[str, Facts]:
    """Read the facts of each trace in Arize Phoenix, by trace id."""
    spans: dict[str, list[Item]] = defaultdict(list)
    for span in _phoenix_spans(url, project):
        spans[span["context"]["trace_id"]].append(span)
    return {trace_id: _phoenix_facts(own) for trace_id, own in spans.items() if _of_kind(own, "AGENT")}


def _phoenix_spans(url: str, project: str) -> Iterator[Item]:
    cursor: str | None = None
    with httpx.Client(base_url=url, timeout=60.0) as phoenix:
        while True:
            query = {"limit": 1000} | ({} if cursor is None else {"cursor": cursor})
            page = phoenix.get(f"/v1/projects/{project}/spans", params=query).raise_for_status().json()
            yield from page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return


def _of_kind(spans: list[Item], kind: str) -> list[Item]:
    return [span for span in spans if span["span_kind"] == kind]


def _phoenix_facts(spans: list[Item]) -> Facts:
    [root] = _of_kind(spans, "AGENT")
    results = [event["attributes"] for event in root["events"] if event["name"] == "gen_ai.evaluation.result"]
    return {
        "texts": _texts(json.loads(root["attributes"].get("gen_ai.output.messages", "[]"))),
        "tokens": sum(chat["attributes"]["llm.token_count.completion"] for chat in _of_kind(spans, "LLM")),
        "tool calls": len(_of_kind(spans, "TOOL")),
        "score": results[0]["gen_ai.evaluation.score.value"] if results else None,
    }


def of_agentmesh(url: str) -> dict[str, Facts]:
    """Read the facts of each trace in AgentMesh, by trace id."""
    facts: dict[str, Facts] = {}
    with httpx.Client(base_url=f"{url}/api", timeout=60.0) as agentmesh:
        while page := agentmesh.get("/traces", params={"limit": 500, "offset": len(facts)}).raise_for_status().json():
            for trace_id in (trace["trace_id"] for trace in page):
                spans, scores = (agentmesh.get(f"/traces/{trace_id}/{part}").json() for part in ("spans", "scores"))
                facts[trace_id] = _agentmesh_facts(spans, scores)
    return facts


def _agentmesh_facts(spans: list[Item], scores: list[Item]) -> Facts:
    said = [span.get("output") or [] for span in spans if span["event_type"] == "agent.invoke"]
    chats = [span for span in spans if span["event_type"] == "model.chat"]
    return {
        "texts": [text for messages in said for text in _texts(messages)],
        "tokens": sum(chat["completion_tokens"] for chat in chats),
        "tool calls": sum(span["event_type"] == "tool.execute" for span in spans),
        "score": scores[0]["value"] if scores else None,
    }


def of_mlflow(uri: str) -> dict[str, Facts]:
    """Read the facts of each trajectory's trace in MLflow, by trace id."""
    return _of_store(MlflowStore.open(uri, None))


def of_weave(project: str) -> dict[str, Facts]:
    """Read the same facts of a project of Weave's calls."""
    return _of_store(WeaveStore.open(project))


def _of_store(store: TraceStore) -> dict[str, Facts]:
    return {tree.hex_id: _tree_facts(tree) for tree in store.search(TraceFilter())}


def _tree_facts(tree: TraceTree) -> Facts:
    said = [Message.model_validate(message) for message in messages_of(tree.root.outputs)] if tree.root else []
    return {
        "texts": [text for message in said for text in _contents(message)],
        "tokens": sum(tokens[1] for chat in tree.of_kind("chat") if (tokens := tokens_of(chat))),
        "tool calls": len(tree.of_kind("execute_tool")),
        "score": output_of(tree, "reward"),
    }


def _texts(messages: list[Item]) -> list[str]:
    parts = [part for message in messages for part in message["parts"]]
    return [str(part.get("content") or part.get("response") or part.get("name")) for part in parts]


def expected_of(trajectory: Trajectory) -> Facts:
    """Read the same facts from the run's files."""
    messages = [message for turn in trajectory.turns for message in turn.messages]
    return {
        "texts": [text for message in messages for text in _contents(message)],
        "tokens": sum(trajectory.response_mask),
        "tool calls": sum(turn.calls_executed for turn in trajectory.turns),
        "score": trajectory.reward.score if trajectory.reward else None,
    }


def _contents(message: Message) -> list[str]:
    """The texts of the message's parts: its reasoning, its answer and the names of its calls."""
    reasoning, _, answer = message.content.rpartition("</think>")
    calls = [call.function.name for call in message.tool_calls or []]
    return [*filter(None, (reasoning.removeprefix("<think>"), answer)), *calls]


def compare(run: Path, traces: Mapping[str, Facts]) -> int:
    """Print the differences and return how many traced trajectories have one."""
    files = sorted((run / "trajectories").glob("*.parquet"))
    traced = [trajectory for path in files for trajectory in read_trajectories(path) if trajectory.trace_id]
    different = 0
    for trajectory in traced:
        seen, expected = traces.get(str(trajectory.trace_id)), expected_of(trajectory)
        if seen != expected:
            different += 1
            print(f"{trajectory.id}: expected {expected}, got {seen}")
    print(f"{len(traced) - different} of {len(traced)} traced trajectories are the same")
    return different


if __name__ == "__main__":
    readers = {"phoenix": of_phoenix, "agentmesh": of_agentmesh, "mlflow": of_mlflow, "weave": of_weave}
    receiver, run, *where = sys.argv[1:]
    sys.exit(compare(Path(run), readers[receiver](*where)) != 0)
