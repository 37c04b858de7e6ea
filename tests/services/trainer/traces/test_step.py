"""The trainer's own trace of a step, and the links between it and the trajectories, over a real socket."""

import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trackway.clients import AgentClient
from trackway.tracing import Tracing, TracingSettings
from trackway.tracing.span_handle import activated
from trackway.trainer.loop.rollout_client import GroupTemplate, RetryPolicy, Rollouts
from trackway.trainer.traces.run import SHOWN_TRAJECTORIES, StepTrace
from trackway.wire.agent import Limits
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import TraceTarget, Trajectory

Rollout = Callable[..., Trajectory]
TARGET = TraceTarget(wandb_run_id="r1")
TEMPLATE = GroupTemplate("run", "experiment", 2, SamplingParams(), Limits(), "tool_agent", trace_target=TARGET)


class Recorded:
    """A tracing in memory, whose spans can be asked for by name."""

    def __init__(self, service: str) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(service, TracingSettings(mlflow_uri=None), self._exporter)

    def spans(self, name: str) -> list[ReadableSpan]:
        assert self.tracing.flush(5)
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def place(span: ReadableSpan) -> tuple[str, str]:
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def links(span: ReadableSpan) -> list[tuple[str, str]]:
    return [(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links]


@pytest.fixture
def trainer():
    recorded = Recorded("trainer")
    with activated(recorded.tracing):
        yield recorded
    recorded.tracing.shutdown()


@pytest.fixture
async def rollouts(agent, agent_url: str) -> AsyncIterator[Rollouts]:
    async with httpx.AsyncClient() as http:
        yield Rollouts(AgentClient(agent_url, http), TEMPLATE, RetryPolicy())


@pytest.mark.anyio
async def test_each_trajectory_is_a_trace_of_its_own_that_links_back_to_its_step(
    trainer: Recorded, agent, rollouts: Rollouts, sample
):
    recorded = Recorded("agent")
    agent.tracing = recorded.tracing
    step = StepTrace("experiment", TARGET)

    with step.step(3), step.part("rollout"):
        got = await rollouts.collect([sample(1), sample(2)], 3, 0, traced=frozenset({0}))

    [root], [part] = trainer.spans("train step 3"), trainer.spans("rollout")
    roots = recorded.spans("trajectory")
    assert [trajectory.trace_id is not None for trajectory in got] == [True, True, False, False]
    assert {place(span) for span in roots} == {(trajectory.trace_id, trajectory.span_id) for trajectory in got[:2]}
    assert [links(span) for span in roots] == [[place(part)]] * 2
    assert [span.parent for span in roots] == [None, None]
    assert place(part)[0] == place(root)[0] and place(root)[0] not in {trajectory.trace_id for trajectory in got}
    assert len(recorded.spans("execute_tool calculator")) == 2


def test_an_optimiser_step_links_to_the_traced_ones_of_what_it_used(trainer: Recorded, rollout: Rollout):
    traced = [rollout(0, n, trace_id=f"{n + 1:032x}", span_id=f"{n + 1:016x}") for n in range(3)]
    step = StepTrace("experiment", TARGET)

    with step.step(1), step.part("update_actor"):
        for used in ([traced[2], rollout(0, 3), traced[0]], [traced[1]]):
            with step.optimizer_step(used) as report:
                report({"actor/lr": 1e-3, "actor/grad_norm": 0.5, "actor/pg_loss": -0.25, "actor/entropy": 9.0})

    [first], [second] = trainer.spans("optimizer_step 0"), trainer.spans("optimizer_step 1")
    assert links(first) == [(f"{3:032x}", f"{3:016x}"), (f"{1:032x}", f"{1:016x}")]
    assert links(second) == [(f"{2:032x}", f"{2:016x}")]
    measured = {"trajectories": 3, "lr": 1e-3, "grad_norm": 0.5, "loss": -0.25}
    assert {name: (first.attributes or {})[f"agentic.{name}"] for name in measured} == measured


def test_the_step_says_its_numbers_and_lists_its_traced_trajectories(trainer: Recorded, rollout: Rollout):
    step = StepTrace("experiment", TARGET)
    traced = [rollout(0, n, trace_id=f"{n + 1:032x}") for n in range(SHOWN_TRAJECTORIES + 6)]

    with step.step(2) as root:
        step.received([rollout(9, 0), *traced])
        step.note(weights_before=4, used=2, dropped_stale=1)
    size = root.trace_stats.bytes

    [span] = trainer.spans("train step 2")
    attributes = dict(span.attributes or {})
    outputs = json.loads(str(attributes["agentic.outputs"]))
    assert {key: attributes[f"agentic.{key}"] for key in ("weights_before", "used", "dropped_stale")} == {
        "weights_before": 4,
        "used": 2,
        "dropped_stale": 1,
    }
    assert (attributes["agentic.tag.train_step"], attributes["agentic.tag.experiment_name"]) == (
        2,
        "experiment",
    )
    assert "agentic.tag.step" not in attributes
    assert attributes["agentic.wandb_run"] == "r1"
    assert (outputs["traced"], len(outputs["trajectories"])) == (70, 64)
    assert outputs["trajectories"][0] == {"id": "r/1/0/0", "trace_id": f"{1:032x}"}
    assert size > 64 * 60


def test_a_step_begins_without_what_the_one_before_it_had(trainer: Recorded, rollout: Rollout):
    step = StepTrace("experiment", TARGET)
    for number in (1, 2):
        with step.step(number):
            step.received([rollout(0, number, trace_id=f"{number:032x}")])
            with step.optimizer_step([]):
                pass

    [second] = trainer.spans("train step 2")
    assert json.loads(str((second.attributes or {})["agentic.outputs"]))["traced"] == 1
    assert len(trainer.spans("optimizer_step 0")) == 2


def test_a_step_that_fails_is_marked_and_keeps_what_it_had(trainer: Recorded, rollout: Rollout):
    step = StepTrace("experiment", TARGET)

    with pytest.raises(RuntimeError, match="by hand"), step.step(1):
        step.received([rollout(trace_id="a" * 32)])
        raise RuntimeError("by hand")

    [span] = trainer.spans("train step 1")
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "by hand")
    assert json.loads(str((span.attributes or {})["agentic.outputs"]))["traced"] == 1


def test_without_a_tracing_nothing_is_recorded_and_nothing_fails(rollout: Rollout):
    step = StepTrace("experiment", TARGET)

    with step.step(1) as root, step.part("update_actor"):
        with step.optimizer_step([rollout(trace_id="a" * 32, span_id="b" * 16)]) as report:
            report({"actor/lr": 1.0})
        step.note(used=1)

    assert (root.recording, root.trace_stats.bytes) == (False, 0)
    step.note(used=2)
