"""What a real MLflow server makes of the spans: one tree, found by each tag, in the experiment the trajectory names."""

import time
from collections.abc import Iterator

import pytest
from mlflow import MlflowClient
from mlflow.entities import Trace

from trackway.tracing import (
    Tracing,
    TracingSettings,
    chat_span,
    extracted,
    inject,
    reward_span,
    set_outcome,
    tool_span,
    trajectory_span,
    turn_span,
)
from trackway.tracing.span_handle import activated
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Tags, TraceTarget

pytestmark = pytest.mark.slow

MESSAGES = [Message(role="user", content="What is 3+4?")]
ANSWERS = [
    Message(role="assistant", content="I calculate."),
    Message(role="tool", content="7"),
    Message(role="assistant", content="It is\n#### 7"),
]


class Services:
    """Three services that export on their own to one server, as three processes would."""

    def __init__(self, uri: str, experiment_id: str) -> None:
        self.client = MlflowClient(tracking_uri=uri)
        self.experiment_id = experiment_id
        self.target = TraceTarget(mlflow_experiment_id=experiment_id)
        self.all = {name: Tracing(name, TracingSettings(mlflow_uri=uri)) for name in ("agent", "tools", "rollout")}

    def trajectory(self, step: int, rollout_n: int, fail: bool = False) -> None:
        """One traced trajectory; the tool's span is exported long before its root."""
        tags = Tags(experiment_name="contract", step=step, sample_index=7, rollout_n=rollout_n)
        identity = f"contract/{step}/7/{rollout_n}"
        headers: dict[str, str] = {}
        with (
            activated(self.all["agent"]),
            trajectory_span(tags, identity, "tool_agent", MESSAGES, True, self.target) as root,
        ):
            with turn_span(0):
                inject(headers)
                self.work(headers, fail)
            set_outcome(root)
            root.outputs({"reward": 1.0, "messages": ANSWERS})

    def work(self, headers: dict[str, str], fail: bool) -> None:
        """What the rollout service and the tool server do for the turn, each under its own tracing."""
        with activated(self.all["rollout"]), extracted(headers), chat_span("tiny", SamplingParams()) as chat:
            chat.usage(20, 9)
        with (
            activated(self.all["tools"]),
            extracted(headers),
            tool_span("calculator", {"expression": "3+4"}, "c") as tool,
        ):
            if fail:
                raise TrackwayError(ErrorCode.TOOL_FAILED, "it broke")
            tool.outputs({"text": "7"})
        self.all["tools"].flush(10)
        with activated(self.all["agent"]), extracted(headers), reward_span("gsm8k") as reward:
            reward.score(1.0)

    def found(self, filter_string: str, count: int, deadline_s: float = 30.0) -> list[Trace]:
        """The traces that match, once there are `count` finished ones."""
        end = time.monotonic() + deadline_s
        while True:
            for tracing in self.all.values():
                tracing.flush(10)
            traces = list(self.client.search_traces(locations=[self.experiment_id], filter_string=filter_string))
            if len(traces) == count and all(trace.info.state != "IN_PROGRESS" for trace in traces):
                return traces
            assert time.monotonic() < end, f"{filter_string}: {len(traces)} instead of {count}"


@pytest.fixture(scope="module")
def services(mlflow_server: str) -> Iterator[Services]:
    experiment = MlflowClient(tracking_uri=mlflow_server).create_experiment("tracing-contract")
    services = Services(mlflow_server, experiment)
    for step, rollout_n in ((1, 0), (1, 1), (2, 0)):
        services.trajectory(step, rollout_n)
    with pytest.raises(TrackwayError):
        services.trajectory(3, 0, fail=True)
    yield services
    for tracing in services.all.values():
        tracing.shutdown()


@pytest.mark.parametrize(
    ("filter_string", "count"),
    [
        ("tags.step = '1'", 2),
        ("tags.step = '1' AND tags.rollout_n = '1'", 1),
        ("tags.sample_index = '7'", 4),
        ("tags.validate = 'False'", 4),
        ("tags.experiment_name = 'contract'", 4),
        ("tags.outcome = 'ok'", 3),
        ("tags.step = '9'", 0),
        ("trace.text LIKE '%#### 7%'", 3),
    ],
)
def test_trajectories_are_found_by_each_tag(services: Services, filter_string: str, count: int) -> None:
    assert len(services.found(filter_string, count)) == count


def test_spans_that_three_services_export_apart_are_one_tree(services: Services) -> None:
    [trace] = services.found("tags.step = '2'", 1)
    spans = {span.name: span for span in trace.data.spans}
    turn = spans["turn 0"].span_id
    assert {name: span.parent_id for name, span in spans.items()} == {
        "trajectory": None,
        "turn 0": spans["trajectory"].span_id,
        "chat tiny": turn,
        "execute_tool calculator": turn,
        "reward": turn,
    }
    assert (spans["execute_tool calculator"].inputs, spans["execute_tool calculator"].outputs) == (
        {"expression": "3+4"},
        {"text": "7"},
    )


def test_the_root_gives_the_trace_its_name_session_preview_and_state(services: Services) -> None:
    [good] = services.found("tags.step = '2'", 1)
    [bad] = services.found("tags.step = '3'", 1)
    assert good.info.tags["mlflow.traceName"] == "s2/i7/n0"
    assert good.info.trace_metadata["mlflow.trace.session"] == "contract/2/7"
    assert (good.info.request_preview, good.info.response_preview) == ("What is 3+4?", "It is  \n\u200b#### 7")
    assert (good.info.state, bad.info.state) == ("OK", "ERROR")
