"""Trajectories exported to a real MLflow by services of their own, and the outputs folder that belongs to them."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import httpx
from mlflow import MlflowClient
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.util.types import Attributes
from pydantic import JsonValue

import trackway.traces as traces
from tests.traces.example_trace import CALL, turn
from trackway.traces.store import TraceFilter
from trackway.tracing import (
    SpanHandle,
    Tracing,
    TracingSettings,
    add_event,
    add_incident,
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
from trackway.tracing.span_handle import activated
from trackway.trainer.run_state.trajectories import write_trajectories
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.rollout import SamplingParams
from trackway.wire.trainer import RunInfo, RunState
from trackway.wire.trajectory import Incident, Reward, StopReason, Tags, TraceTarget, Trajectory, WeightSpan

EXPERIMENT = "traces-read-back"
ANSWER = "so [the answer] is\n#### 54"


def tracing(service: str, uri: str | None) -> Tracing:
    """The tracing of a service; without a URI its spans are lost, as those of a process that died."""
    return Tracing(service, TracingSettings(mlflow_uri=uri, otlp_endpoint=None))


class Services:
    """Four services and the trainer, which export on their own to one server."""

    def __init__(self, uri: str, experiment_id: str) -> None:
        self.uri = uri
        self.target = TraceTarget(mlflow_experiment_id=experiment_id)
        self.all = {name: tracing(name, uri) for name in ("agent", "rollout", "tools", "reward", "trainer")}
        self.lost = {name: tracing(name, None) for name in ("agent", "rollout")}

    def trajectory(
        self, tags: Tags, reward: float = 1.0, loses: str = "", fail: bool = False, stumbles: bool = False
    ) -> Trajectory:
        """One traced trajectory of two turns; `loses` names the service whose first span never arrives."""
        name = f"{tags.experiment_name}/{tags.step}/{tags.sample_index}/{tags.rollout_n}"
        messages = [Message(role="user", content="What is 6*9?")]
        source = self.lost if loses == "agent" else self.all
        with (
            activated(source["agent"]),
            trajectory_span(tags, name, "tool_agent", messages, True, self.target) as root,
        ):
            headers: dict[str, str] = {}
            inject(headers)
            self.turns(headers, tags, loses)
            self.score(headers, reward)
            root.outputs({"reward": reward, "num_turns": 4, "stop_reason": "answered"})
            if fail:
                root.error("the engine is gone", "engine_failed")
            if stumbles:
                add_incident(Incident.TOOL_FAILED, tool="calculator")
            set_outcome(root, "error:engine_failed" if fail else None)
        return self.record(tags, root, name, reward, fail)

    def turns(self, headers: Mapping[str, str], tags: Tags, loses: str) -> None:
        with activated(self.all["agent"]), extracted(headers), turn_span(0):
            self.generate(tags, CALL, given=30, written=8, lost=loses == "rollout")
            self.calculate()
        with activated(self.all["agent"]), extracted(headers), turn_span(1):
            add_event("retried", attempt=2)
            self.generate(tags, ANSWER, given=46, written=4)

    def generate(self, tags: Tags, text: str, given: int, written: int, lost: bool = False) -> None:
        headers: dict[str, str] = {}
        inject(headers)
        source = self.lost if lost else self.all
        with activated(source["rollout"]), extracted(headers), chat_span("tiny", SamplingParams()) as chat:
            chat.inputs({"messages": [{"role": "user", "content": "<|im_start|>user\nWhat is 6*9?"}]})
            chat.outputs({"messages": [{"role": "assistant", "content": text}]})
            chat.usage(given, written)
            chat.weight_versions([WeightSpan(version=tags.step, start=0, end=written)])

    def calculate(self) -> None:
        headers: dict[str, str] = {}
        inject(headers)
        with (
            activated(self.all["tools"]),
            extracted(headers),
            tool_span("calculator", {"expression": "6*9"}, "call_0_0") as tool,
        ):
            tool.outputs({"text": "54", "reward": 0.0})

    def score(self, headers: Mapping[str, str], reward: float) -> None:
        with activated(self.all["reward"]), extracted(headers), reward_span("gsm8k") as span:
            span.score(reward)
            span.outputs({"score": reward})

    def record(self, tags: Tags, root: SpanHandle, name: str, reward: float, fail: bool) -> Trajectory:
        """What the trainer's dump has of it."""
        error = ErrorBody(code=ErrorCode.ENGINE_FAILED, message="gone", retryable=False) if fail else None
        return Trajectory(
            id=name,
            session_id=name,
            tags=tags,
            agent_name="tool_agent",
            data_source="tiny",
            turns=[turn(0, [], calls_executed=1), turn(1, [])],
            reward=None if fail else Reward(score=reward),
            num_turns=4,
            stop_reason=StopReason.ERROR if fail else StopReason.ANSWERED,
            trace_id=root.trace_id,
            span_id=root.span_id,
            error=error,
        )

    def framework(self, trajectory: Trajectory, attributes: Mapping[str, JsonValue]) -> None:
        """A span of an agent's framework, under the trajectory's root and by OpenTelemetry's own exporter."""
        assert trajectory.trace_id is not None and trajectory.span_id is not None
        parent = SpanContext(int(trajectory.trace_id, 16), int(trajectory.span_id, 16), True, TraceFlags(1))
        headers = {"x-mlflow-experiment-id": self.target.mlflow_experiment_id or "0"}
        provider = TracerProvider()
        exporter = OTLPSpanExporter(f"{self.uri}/v1/traces", headers=headers, timeout=60)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        below = set_span_in_context(NonRecordingSpan(parent))
        known = cast("Attributes", attributes)
        provider.get_tracer("framework").start_span("ChatCompletion", below, attributes=known).end()
        provider.shutdown()

    def train_step(self, step: int, consumed: list[tuple[str, str]]) -> None:
        with (
            activated(self.all["trainer"]),
            train_step_span(step, "whole", self.target),
            optimizer_step_span(0, consumed),
        ):
            pass


class ExportedTraces:
    """What was exported, and the outputs folder that belongs to it."""

    def __init__(self, uri: str, outputs: Path) -> None:
        self.uri = uri
        self.outputs = outputs
        self.experiment_id = MlflowClient(tracking_uri=uri).create_experiment(EXPERIMENT)
        self.made: dict[str, Trajectory] = {}

    def add(self, name: str, trajectory: Trajectory) -> None:
        self.made[name] = trajectory

    def dump(self, run: str, step: int, *names: str, untraced: int = 0) -> None:
        """The run's files, as the trainer writes them."""
        folder = self.outputs / run
        path = folder / "trajectories" / f"step_{step}.parquet"
        others = [self.made["s1n0"].model_copy(update={"trace_id": None}) for _ in range(untraced)]
        write_trajectories(path, [*(self.made[name] for name in names), *others])
        info = RunInfo(run=run, state=RunState.FINISHED, mlflow_uri=self.uri, experiment_id=self.experiment_id)
        (folder / "state.json").write_text(info.model_dump_json())

    def say(self, name: str, about: str, value: float | str) -> None:
        """Feedback on a trace, as the trainer records it."""
        # Not mlflow.log_feedback: it needs a global URI, which mlflow leaves behind in the environment.
        trace_id, now = f"tr-{self.made[name].trace_id}", datetime.now(UTC).isoformat().replace("+00:00", "Z")
        assessment = {
            "assessment_name": about,
            "trace_id": trace_id,
            "source": {"source_type": "CODE", "source_id": "tests"},
            "create_time": now,
            "last_update_time": now,
            "feedback": {"value": value},
        }
        url = f"{self.uri}/api/3.0/mlflow/traces/{trace_id}/assessments"
        httpx.post(url, json={"assessment": assessment}, timeout=30).raise_for_status()

    def wait_for_roots(self, count: int) -> None:
        """Spans are exported in the background; every root but the lost one arrives."""
        end = time.monotonic() + 60
        store = traces.MlflowStore.open(self.uri, EXPERIMENT)
        while len(list(store.search(TraceFilter()))) < count:
            assert time.monotonic() < end, "the traces did not arrive within 60 s"
            time.sleep(0.2)

    def ids(self, *names: str) -> set[str]:
        return {f"tr-{self.made[name].trace_id}" for name in names}


def tags(step: int, sample_index: int = 7, rollout_n: int = 0, validate: bool = False, run: str = "whole") -> Tags:
    return Tags(experiment_name=run, step=step, sample_index=sample_index, rollout_n=rollout_n, validate=validate)
