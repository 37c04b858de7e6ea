"""`trackway traces` against Weave's own trace server: the same trees, filters and gaps as with MLflow."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import httpx
import pytest

from trackway.traces import rules
from trackway.traces.refs import resolve
from trackway.traces.store import Steps, TraceFilter, TraceKind
from trackway.traces.weave_store import WeaveStore
from trackway.tracing import (
    Tracing,
    TracingSettings,
    add_event,
    chat_span,
    extracted,
    inject,
    optimizer_step_span,
    reward_span,
    set_outcome,
    tool_span,
    train_step_span,
    trajectory_span,
    turn_span,
)
from trackway.tracing.export.backends import project_url
from trackway.tracing.settings import HOSTED_WEAVE
from trackway.tracing.span_handle import activated
from trackway.wire.chat import Message
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Reward, StopReason, Tags, TraceTarget, Trajectory, Turn, WeightSpan

if TYPE_CHECKING:
    from weave.trace.weave_client import WeaveClient

pytestmark = [pytest.mark.weave, pytest.mark.slow]

RUN = "read-back"


class Services:
    """The services of a trajectory, each exporting on its own; `lost` exports nothing."""

    def __init__(self, settings: TracingSettings) -> None:
        self.all = {name: Tracing(name, settings) for name in ("agent", "rollout", "tools", "reward", "trainer")}
        self.lost = Tracing("rollout", TracingSettings(backends=[], otlp_endpoint=None))

    def trajectory(self, step: int, rollout_n: int, reward: float, loses_chat: bool = False) -> Trajectory:
        """One traced trajectory of one turn."""
        tags = Tags(experiment_name=RUN, step=step, sample_index=7, rollout_n=rollout_n)
        name, messages = f"{RUN}/{step}/7/{rollout_n}", [Message(role="user", content="What is 6*9?")]
        with activated(self.all["agent"]), trajectory_span(tags, name, "tool_agent", messages, True) as root:
            headers: dict[str, str] = {}
            with turn_span(0):
                add_event("retry", attempt=2, url="http://rollout")
                inject(headers)
                self.work(headers, self.lost if loses_chat else self.all["rollout"])
            with activated(self.all["reward"]), reward_span("gsm8k") as scoring:
                scoring.outputs({"score": reward})
            root.outputs({"reward": reward, "num_turns": 2})
            set_outcome(root)
        turn = Turn(index=0, messages=[], response_start=0, response_end=4, finish_reason="stop", calls_executed=1)
        return Trajectory(
            id=name,
            session_id=name,
            tags=tags,
            agent_name="tool_agent",
            data_source="tiny",
            turns=[turn],
            reward=Reward(score=reward),
            num_turns=2,
            stop_reason=StopReason.ANSWERED,
            trace_id=root.trace_id,
            span_id=root.span_id,
        )

    def work(self, headers: Mapping[str, str], rollout: Tracing) -> None:
        with activated(rollout), extracted(headers), chat_span("tiny", SamplingParams()) as chat:
            chat.outputs({"messages": [{"role": "assistant", "content": "#### 54"}]})
            chat.usage(30, 4)
            chat.weight_versions([WeightSpan(version=3, start=0, end=4)])
        with (
            activated(self.all["tools"]),
            extracted(headers),
            tool_span("calculator", {"expression": "6*9"}, "c") as tool,
        ):
            tool.outputs({"text": "54"})


@pytest.fixture(scope="module")
def made(weave_server: TracingSettings) -> dict[str, Trajectory]:
    """Trajectories of two steps and a step of the trainer."""
    services = Services(weave_server)
    made = {
        "s3n0": services.trajectory(3, 0, reward=1.0),
        "s3n1": services.trajectory(3, 1, reward=0.0),
        "s12n0": services.trajectory(12, 0, reward=0.5, loses_chat=True),
    }
    consumed = [(made["s3n0"].trace_id or "", "ab" * 8)]
    with (
        activated(services.all["trainer"]),
        train_step_span(3, RUN, TraceTarget()),
        optimizer_step_span(0, consumed),
    ):
        pass
    for service in services.all.values():
        assert service.shutdown(30)
    return made


@pytest.fixture(scope="module")
def store(weave_client: "WeaveClient", made: dict[str, Trajectory]) -> WeaveStore:
    return WeaveStore(weave_client)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (TraceFilter(), ["s3n0", "s3n1", "s12n0"]),
        (TraceFilter(steps=Steps(3, 3)), ["s3n0", "s3n1"]),
        (TraceFilter(steps=Steps(4, None)), ["s12n0"]),
        (TraceFilter(tags={"rollout_n": "0", "validate": "False"}), ["s3n0", "s12n0"]),
        (TraceFilter(tags={"validate": "True"}), []),
        (TraceFilter(tags={"outcome": "o*"}, reward_min=0.5), ["s3n0", "s12n0"]),
        (TraceFilter(reward_max=0.4), ["s3n1"]),
    ],
)
def test_a_search_has_exactly_the_trajectories_that_match(
    store: WeaveStore, made: dict[str, Trajectory], wanted: TraceFilter, names: list[str]
) -> None:
    tags = {**wanted.tags, "experiment_name": RUN}
    mine = TraceFilter(wanted.kind, tags, wanted.steps, wanted.reward_min, wanted.reward_max)
    newest_first = [made[name].trace_id for name in reversed(names)]
    assert [tree.trace_id for tree in store.search(mine)] == newest_first


def test_a_tree_says_what_its_services_said(store: WeaveStore, made: dict[str, Trajectory]) -> None:
    trace_id = made["s3n0"].trace_id or ""
    tree = store.get([trace_id])[trace_id]
    assert (tree.name, tree.state, tree.tags["step"], tree.tags["validate"]) == ("s3/i7/n0", "OK", "3", "False")
    assert [(span.name, span.service) for span in tree.spans()] == [
        ("trajectory", "agent"),
        ("turn 0", "agent"),
        ("chat tiny", "rollout"),
        ("execute_tool calculator", "tools"),
        ("reward", "reward"),
    ]
    [chat], [tool], [turn] = (tree.of_kind(kind) for kind in ("chat", "execute_tool", "turn"))
    assert (chat.outputs, chat.attributes["agentic.weight_version"]) == (
        {"messages": [{"role": "assistant", "content": "#### 54"}]},
        "3",
    )
    assert (tool.inputs, tool.outputs) == ({"expression": "6*9"}, {"text": "54"})
    [event] = turn.events
    assert (event.name, event.attributes) == ("retry", {"attempt": 2, "url": "http://rollout"})
    assert turn.start_ms <= event.at_ms <= (turn.end_ms or 0) + 0.1


def test_whole_trees_verify_and_a_lost_span_is_named(store: WeaveStore, made: dict[str, Trajectory]) -> None:
    trees = store.get([trajectory.trace_id or "" for trajectory in made.values()])
    assert {
        name: rules.gaps(trees.get(trajectory.trace_id or ""), trajectory) for name, trajectory in made.items()
    } == {
        "s3n0": [],
        "s3n1": [],
        "s12n0": ["0 of 1 chat spans: none below turn 0"],
    }


def test_a_name_and_the_beginning_of_an_id_find_a_trace(store: WeaveStore, made: dict[str, Trajectory]) -> None:
    trace_id = made["s12n0"].trace_id or ""
    assert resolve(store, "s12/i7/n0", RUN).trace_id == resolve(store, trace_id[:10]).trace_id == trace_id


def test_the_page_of_a_trajectory_is_the_one_of_weaves_client(
    weave_client: "WeaveClient", made: dict[str, Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    trajectory, project = made["s3n0"], f"{weave_client.entity}/{weave_client.project}"
    calls = weave_client.get_calls(filter={"trace_ids": [trajectory.trace_id or ""], "trace_roots_only": True})

    assert [call.ui_url for call in calls] == [f"{project_url(project, HOSTED_WEAVE)}/r/call/{trajectory.span_id}"]


def test_a_step_of_the_trainer_links_to_what_it_consumed(store: WeaveStore, made: dict[str, Trajectory]) -> None:
    [tree] = store.search(TraceFilter(TraceKind.STEP, {"experiment_name": RUN}))
    [update] = tree.of_kind("optimizer_step")
    assert (tree.name, [link.trace_id for link in update.links]) == ("train step 3", [made["s3n0"].trace_id])


def test_the_command_line_reads_the_hosted_way_and_keeps_its_output_clean(
    weave_server: TracingSettings, made: dict[str, Trajectory]
) -> None:
    assert weave_server.weave_api_key is not None
    place = {"WF_TRACE_SERVER_URL": weave_server.weave_url, "WANDB_BASE_URL": weave_server.weave_url}
    key = {"WANDB_API_KEY": weave_server.weave_api_key.get_secret_value()}
    where = ["--backend", "weave", "--project", weave_server.weave_project or "", "--experiment-name", RUN]
    command = [sys.executable, "-m", "trackway.deploy.cli", "traces", "list", *where, "--step", "3-4", "--json"]
    done = subprocess.run(
        command, env={**os.environ, **place, **key}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)] == ["s3/i7/n1", "s3/i7/n0"]


def test_feedback_belongs_to_the_tree(
    store: WeaveStore, weave_server: TracingSettings, made: dict[str, Trajectory]
) -> None:
    trace_id, project = made["s3n1"].trace_id or "", weave_server.weave_project
    root = store.get([trace_id])[trace_id].root
    values = {"advantage": -0.5, "fate": "dropped_stale"}
    batch = [
        {
            "project_id": project,
            "weave_ref": f"weave:///{project}/call/{root.span_id}",
            "feedback_type": kind,
            "payload": {"value": value},
        }
        for kind, value in values.items()
    ]
    assert weave_server.weave_api_key is not None
    auth = ("api", weave_server.weave_api_key.get_secret_value())
    url = f"{weave_server.weave_url}/feedback/batch/create"
    httpx.post(url, json={"batch": batch}, auth=auth, timeout=30).raise_for_status()
    assert store.get([trace_id])[trace_id].feedback == values
