"""The tree that three services record of one trajectory."""

import json

import pytest
from agent_world import END, World, call, group
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

COUNT = call("counter") + END
ANSWER = "#### 18" + END


def tree(spans: list[ReadableSpan]) -> list[tuple[str, str | None]]:
    """(name, name of the parent) of every span, sorted."""
    names = {span.context.span_id: span.name for span in spans if span.context}
    pairs = [(span.name, names[span.parent.span_id] if span.parent else None) for span in spans]
    return sorted(pairs, key=lambda pair: (pair[0], pair[1] or ""))


def root_of(spans: list[ReadableSpan]) -> ReadableSpan:
    [root] = [span for span in spans if span.parent is None]
    return root


@pytest.mark.anyio
async def test_turns_tools_and_reward_join_one_tree(world: World) -> None:
    trajectory = await world.say(COUNT, ANSWER, trace=True)

    spans = world.spans()
    assert tree(spans) == [
        ("execute_tool counter", "turn 0"),
        ("reward", "trajectory"),
        ("trajectory", None),
        ("turn 0", "trajectory"),
        ("turn 1", "trajectory"),
    ]
    assert {format(span.context.trace_id, "032x") for span in spans if span.context} == {trajectory.trace_id}


@pytest.mark.anyio
async def test_the_root_carries_tags_and_how_it_ended(world: World) -> None:
    trajectory = await world.say(COUNT, ANSWER, trace=True)

    attributes = dict(root_of(world.spans()).attributes or {})
    tags = {key.rsplit(".", 1)[1]: value for key, value in attributes.items() if key.startswith("mlflow.traceTag.")}
    assert tags == {
        "step": "1",
        "sample_index": "7",
        "rollout_n": "0",
        "validate": "False",
        "experiment_name": "exp",
        "traceName": "s1/i7/n0",
        "outcome": "ok",
    }
    assert attributes["agentic.stop_reason"] == "answered"
    assert attributes["agentic.trajectory"] == trajectory.id
    assert attributes["session.id"] == "exp/1/7"


@pytest.mark.anyio
async def test_the_root_shows_texts_reward_and_turns(world: World) -> None:
    trajectory = await world.say(ANSWER, trace=True)

    outputs = json.loads(str((root_of(world.spans()).attributes or {})["mlflow.spanOutputs"]))
    assert outputs["prompt_text"].endswith("<|im_start|>user\n9+9?<|im_end|>\n<|im_start|>assistant\n")
    del outputs["prompt_text"]
    assert outputs == {
        "response_text": "#### 18<|im_end|>",
        "reward": 1.0,
        "num_turns": 2,
        "stop_reason": "answered",
        "prompt_tokens": len(trajectory.prompt_ids),
        "response_tokens": len(trajectory.response_ids),
    }


@pytest.mark.anyio
async def test_a_failed_trajectory_has_a_failed_root(world: World) -> None:
    world.tools.app = None

    await world.say(ANSWER, trace=True)

    root = root_of(world.spans())
    attributes = dict(root.attributes or {})
    assert root.status.status_code is StatusCode.ERROR
    assert attributes["mlflow.traceTag.outcome"] == "error:unavailable"
    assert attributes["agentic.error"] == "unavailable"
    assert [event.name for event in root.events] == ["retry"]


@pytest.mark.anyio
async def test_what_went_wrong_on_the_way_is_an_event_of_its_turn(world: World) -> None:
    async def count_on_a_new_replica() -> str:
        world.new_tool_server()
        return COUNT

    unknown, refused = call("add") + END, call("counter", '{"refuse": true}') + END
    await world.say(unknown, refused, count_on_a_new_replica, ANSWER, trace=True)

    turns = [span for span in world.spans() if span.name.startswith("turn")]
    assert {turn.name: [event.name for event in turn.events] for turn in turns} == {
        "turn 0": ["unknown_function"],
        "turn 1": ["tool_failed"],
        "turn 2": ["instance_lost"],
        "turn 3": [],
    }


@pytest.mark.anyio
async def test_an_unsampled_trajectory_records_nothing(world: World) -> None:
    trajectory = await world.say(COUNT, ANSWER)

    assert (world.spans(), trajectory.trace_id) == ([], None)


@pytest.mark.anyio
async def test_the_rollouts_of_a_group_have_a_trace_each(world: World) -> None:
    world.model.scripts = {number: [ANSWER] for number in range(3)}

    trajectories = await world.run(group(n=3, trace=True))

    assert len({trajectory.trace_id for trajectory in trajectories}) == 3
    assert len(world.spans()) == 3 * 3


@pytest.mark.anyio
async def test_the_root_is_linked_to_its_caller_and_not_its_child(world: World) -> None:
    world.model.scripts = {0: [ANSWER]}
    parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}

    await world.client.post("/groups", json=group(trace=True).model_dump(mode="json"), headers=parent)

    root = root_of(world.spans())
    assert [format(link.context.trace_id, "032x") for link in root.links] == ["a" * 32]
