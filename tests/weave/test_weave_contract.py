"""What Weave makes of the spans: one tree of calls, found by each tag in its own type, in threads of GRPO groups."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import pytest

from trackway.tracing import (
    Tracing,
    TracingSettings,
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
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Incident, Tags, TraceTarget, WeightSpan

if TYPE_CHECKING:
    from weave.trace.weave_client import WeaveClient
    from weave.vendor.weave_server_sdk.types.call_stream_query_params import Filter

pytestmark = [pytest.mark.weave, pytest.mark.slow, pytest.mark.usefixtures("trajectories")]

MESSAGES = [Message(role="user", content="What is 3+4?")]
TARGET = TraceTarget(wandb_run_id="run123")


class Services:
    """Four services that export on their own to one server, as four processes would."""

    def __init__(self, settings: TracingSettings) -> None:
        self.all = {name: Tracing(name, settings) for name in ("agent", "tools", "rollout", "trainer")}

    def trajectory(self, tags: Tags, target: TraceTarget = TARGET, fail: bool = False) -> tuple[str, str]:
        """One traced trajectory: the ids of its trace and of its root."""
        identity = f"{tags.experiment_name}/{tags.step}/{tags.sample_index}/{tags.rollout_n}"
        headers: dict[str, str] = {}
        with (
            activated(self.all["agent"]),
            trajectory_span(tags, identity, "tool_agent", MESSAGES, True, target) as root,
        ):
            with turn_span(0):
                inject(headers)
                self.generation(headers, tags.step)
                self.execution(headers, tags.rollout_n)
            if fail:
                set_outcome(root, f"error:{ErrorCode.ENGINE_FAILED.value}")
                root.error("the engine is gone", ErrorCode.ENGINE_FAILED.value)
            else:
                self.scoring()
                set_outcome(root)
            root.outputs({"reward": 0.0, "num_turns": 1})
        assert root.trace_id and root.span_id
        return root.trace_id, root.span_id

    def generation(self, headers: Mapping[str, str], step: int) -> None:
        """The rollout service's part; weights change during the generation of every step after the first."""
        with activated(self.all["rollout"]), extracted(headers), chat_span("tiny", SamplingParams()) as chat:
            chat.inputs({"messages": [{"role": "user", "content": "3+4?"}]})
            chat.outputs({"messages": [{"role": "assistant", "content": "call the calculator"}]})
            chat.usage(20, 9)
            later = [] if step == 1 else [WeightSpan(version=step, start=5, end=9)]
            chat.weight_versions([WeightSpan(version=step - 1, start=0, end=9 - 4 * len(later)), *later])

    def execution(self, headers: Mapping[str, str], rollout_n: int) -> None:
        """The tool server's part; the second rollout's tool fails."""
        arguments = {"expression": "3+4"}
        with activated(self.all["tools"]), extracted(headers), tool_span("calculator", arguments, "c") as tool:
            tool.outputs({"text": "7"})
        if rollout_n == 1:
            with activated(self.all["agent"]):
                add_incident(Incident.TOOL_FAILED, tool="calculator")

    def scoring(self) -> None:
        with reward_span("gsm8k") as reward:
            reward.score(0.0)
            reward.outputs({"score": 0.0})

    def train_step(self, step: int, consumed: list[tuple[str, str]]) -> None:
        """The trainer's own trace."""
        with (
            activated(self.all["trainer"]),
            train_step_span(step, "contract", TARGET),
            optimizer_step_span(0, consumed),
        ):
            pass

    def shutdown(self) -> None:
        """Have everything exported."""
        for tracing in self.all.values():
            assert tracing.shutdown(30)


def tags(step: int, rollout_n: int, sample_index: int = 17, validation: bool = False) -> Tags:
    return Tags(
        experiment_name="contract", step=step, sample_index=sample_index, rollout_n=rollout_n, validate=validation
    )


@pytest.fixture(scope="module")
def trajectories(weave_server: TracingSettings) -> None:
    """Two steps of one group, another group, a validation, a failure, and a step of the trainer."""
    services = Services(weave_server)
    consumed = [services.trajectory(tags(step, rollout_n)) for step in (1, 2) for rollout_n in (0, 1)]
    services.trajectory(tags(2, 0, sample_index=18))
    services.trajectory(tags(2, 0, validation=True))
    services.trajectory(tags(10, 2), fail=True)
    services.train_step(1, consumed[:2])
    services.shutdown()


def equal(field: str, value: object) -> dict[str, object]:
    return {"$eq": [{"$getField": field}, {"$literal": value}]}


def found(client: "WeaveClient", fields: Mapping[str, object] | None = None, **filter: list[str]) -> list[Any]:
    """The calls that pass Weave's own filter and whose fields have these values, oldest first."""
    query = {"$expr": {"$and": [equal(field, value) for field, value in fields.items()]}} if fields else None
    return list(client.get_calls(query=query, filter=cast("Filter", filter)))


def span_name(call: Any) -> str:
    """`op_name` is this on sqlite only: the hosted service makes an op's reference of it."""
    return call.attributes["otel_span"]["name"]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"attributes.step": 1}, 2),
        ({"attributes.step": 1, "attributes.rollout_n": 0}, 1),
        ({"attributes.sample_index": 17}, 6),
        ({"attributes.sample_index": 17, "attributes.step": 2, "attributes.validate": False}, 2),
        ({"attributes.rollout_n": 1}, 2),
        ({"attributes.experiment_name": "contract", "attributes.kind": "agent"}, 7),
        ({"attributes.experiment_name": "another"}, 0),
        ({"attributes.validate": True}, 1),
        ({"attributes.outcome": "ok"}, 4),
        ({"attributes.outcome": "tool_failed", "attributes.incidents": "tool_failed"}, 2),
        ({"attributes.outcome": "error:engine_failed"}, 1),
        ({"attributes.weight_version": "0", "attributes.kind": "llm"}, 2),
        ({"attributes.weight_version": "1,2", "attributes.kind": "llm"}, 4),
        ({"attributes.train_step": 1}, 1),
    ],
)
def test_calls_are_found_by_each_tag(weave_client: "WeaveClient", fields: Mapping[str, object], count: int) -> None:
    assert len(found(weave_client, fields)) == count


def test_a_range_of_steps_is_found_by_number(weave_client: "WeaveClient") -> None:
    step = {"$convert": {"input": {"$getField": "attributes.step"}, "to": "int"}}
    calls = weave_client.get_calls(query={"$expr": {"$gt": [step, {"$literal": 2}]}})
    assert [call.display_name for call in calls] == ["s10/i17/n2"]


def test_a_trajectory_is_named_in_short_and_its_tags_keep_their_types(weave_client: "WeaveClient") -> None:
    calls = found(weave_client, {"attributes.step": 2, "attributes.rollout_n": 0, "attributes.sample_index": 17})
    assert sorted(call.display_name for call in calls) == ["s2/i17/n0", "val2/i17/n0"]
    [tags] = [call.attributes for call in calls if call.display_name == "s2/i17/n0"]
    assert {key: tags[key] for key in ("step", "sample_index", "rollout_n", "validate", "experiment_name")} == {
        "step": 2,
        "sample_index": 17,
        "rollout_n": 0,
        "validate": False,
        "experiment_name": "contract",
    }
    assert isinstance(tags["step"], int) and tags["validate"] is False


def test_spans_that_services_export_apart_are_one_tree_with_a_kind_each(weave_client: "WeaveClient") -> None:
    [root] = found(weave_client, {"display_name": "s1/i17/n0"})
    calls = found(weave_client, trace_ids=[root.trace_id])
    names = {call.id: span_name(call) for call in calls}
    assert {span_name(call): (names.get(call.parent_id), call.attributes["kind"]) for call in calls} == {
        "trajectory": (None, "agent"),
        "turn 0": ("trajectory", "chain"),
        "chat tiny": ("turn 0", "llm"),
        "execute_tool calculator": ("turn 0", "tool"),
        "reward": ("trajectory", "evaluator"),
    }


def test_inputs_and_outputs_are_read_as_values(weave_client: "WeaveClient") -> None:
    [root] = found(weave_client, {"display_name": "s1/i17/n0"})
    calls = {span_name(call): call for call in found(weave_client, trace_ids=[root.trace_id])}
    assert {
        name: (call.inputs.get("mlflow.spanInputs"), call.output.get("mlflow.spanOutputs"))
        for name, call in calls.items()
    } == {
        "trajectory": ({"messages": [{"role": "user", "content": "What is 3+4?"}]}, {"reward": 0.0, "num_turns": 1}),
        "turn 0": (None, None),
        "chat tiny": (
            {"messages": [{"role": "user", "content": "3+4?"}]},
            {"messages": [{"role": "assistant", "content": "call the calculator"}]},
        ),
        "execute_tool calculator": ({"expression": "3+4"}, {"text": "7"}),
        "reward": (None, {"score": 0.0}),
    }


def test_a_thread_is_a_group_and_each_of_its_trajectories_is_one_turn(weave_client: "WeaveClient") -> None:
    threads = weave_client.server.threads_query_stream({"project_id": weave_client.project_id})
    assert {thread.thread_id: thread.turn_count for thread in threads if thread.thread_id.startswith("contract/")} == {
        "contract/1/17": 2,
        "contract/2/17": 2,
        "contract/2/18": 1,
        "contract/val2/17": 1,
        "contract/10/17": 1,
    }
    turns = found(weave_client, thread_ids=["contract/1/17"])
    assert [(span_name(turn), turn.display_name, turn.turn_id == turn.id) for turn in turns] == [
        ("trajectory", "s1/i17/n0", True),
        ("trajectory", "s1/i17/n1", True),
    ]


def test_a_trajectory_belongs_to_its_run_of_wandb_at_its_step(weave_client: "WeaveClient") -> None:
    calls = found(weave_client, wb_run_ids=["my-team/test_weave_contract:run123"])
    assert sorted((call.display_name, call.wb_run_step) for call in calls) == [
        ("s1/i17/n0", 1),
        ("s1/i17/n1", 1),
        ("s10/i17/n2", 10),
        ("s2/i17/n0", 2),
        ("s2/i17/n1", 2),
        ("s2/i18/n0", 2),
        ("train step 1", 1),
        ("val2/i17/n0", 2),
    ]


def test_a_failed_trajectory_is_an_error_and_the_others_are_not(weave_client: "WeaveClient") -> None:
    [failed] = found(weave_client, {"summary.weave.status": "error", "attributes.experiment_name": "contract"})
    assert (failed.display_name, failed.exception) == ("s10/i17/n2", "the engine is gone")


def test_a_generation_says_its_tokens_model_and_weights(weave_client: "WeaveClient") -> None:
    chat = found(weave_client, {"attributes.weight_version": "1,2"})[0]
    usage = chat.summary["usage"]["tiny"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (20, 9, 29)
    assert (chat.attributes["model"], chat.attributes["provider"]) == ("tiny", "trackway")


def test_an_incident_is_an_event_of_the_span_where_it_happened(weave_client: "WeaveClient") -> None:
    [root] = found(weave_client, {"display_name": "s1/i17/n1"})
    calls = found(weave_client, trace_ids=[root.trace_id])
    events = {span_name(call): call.attributes["otel_span"]["events"] for call in calls}
    assert [event["name"] for event in events["turn 0"]] == ["tool_failed"]


def test_a_step_of_the_trainer_links_to_the_trajectories_it_consumed(weave_client: "WeaveClient") -> None:
    consumed = found(weave_client, {"attributes.step": 1})
    [step] = found(weave_client, {"attributes.train_step": 1})
    [update] = found(weave_client, parent_ids=[step.id])
    links = update.attributes["otel_span"]["links"]
    assert {(link["trace_id"], link["span_id"]) for link in links} == {(call.trace_id, call.id) for call in consumed}


def test_a_trace_goes_to_the_project_that_its_run_names(
    weave_server: TracingSettings, weave_client: "WeaveClient"
) -> None:
    services = Services(weave_server)
    services.trajectory(tags(77, 0), TraceTarget(weave_project="other-team/other"))
    services.shutdown()
    there = weave_client.server.calls_query_stats({"project_id": "other-team/other"})
    assert (there.count, found(weave_client, {"attributes.step": 77})) == (5, [])
