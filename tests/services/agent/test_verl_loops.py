"""Agent loops written for verl run without verl, and their trajectories and traces are like those of our own."""

import importlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, group, open_services
from trackway.agent import loop
from trackway.agent.loop import agents
from trackway.agent.settings import AgentSettings
from trackway.agent.verl import load_loops
from trackway.serving.user_code import OwnCodeError, offer_stand_ins
from trackway.wire.chat import FunctionCall, FunctionSchema, ToolSchema
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import StopReason

pytestmark = pytest.mark.anyio

STYLE = "tests.services.agent.verl_style_loops"
ENTRIES = f"""
- name: verl_sums
  _target_: {STYLE}.SumLoop
- name: verl_bonus
  _target_: {STYLE}.SumLoop
  bonus: 0.75
- name: verl_rewrites
  _target_: {STYLE}.RewritingLoop
- name: verl_demands
  _target_: {STYLE}.DemandingLoop
- name: our_loop
  _target_: trackway.agent.ToolAgent
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_AGENTS", {**loop._AGENTS})  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
async def own_services(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> AsyncIterator[AgentServices]:
    file = tmp_path / "loops.yaml"
    file.write_text(ENTRIES)
    own = settings.model_copy(update={"modules": [STYLE], "agent_loop_config_path": file})
    async with open_services(own, tokenizer) as services:
        yield services


async def test_a_loop_that_registers_itself_gives_the_trajectory_of_our_own_loop(own_services: AgentServices) -> None:
    ours = await own_services.say("It is #### 18<|im_end|>", agent_name="single_turn_agent")
    own_services.model.begin_again()
    theirs = await own_services.say("It is #### 18<|im_end|>", agent_name="verl_single")

    same = {
        "prompt_ids",
        "response_ids",
        "response_mask",
        "response_logprobs",
        "weight_versions",
        "num_turns",
        "reward",
    }
    assert theirs.model_dump(include=same) == ours.model_dump(include=same)
    assert theirs.error is None
    assert (theirs.stop_reason, theirs.agent_name) == (StopReason.ANSWERED, "verl_single")
    assert theirs.turns[0].messages == ours.turns[0].messages
    requests = [request.model_dump(exclude={"request_id"}) for request in own_services.model.seen()]
    assert requests[0] == requests[1]


async def test_observations_have_mask_0_and_their_text_is_rendered_by_the_chat_template(
    own_services: AgentServices,
) -> None:
    tokenizer = own_services.model.tokenizer
    trajectory = await own_services.say(
        "<tool_call>[9, 9]</tool_call><|im_end|>", "#### 18<|im_end|>", agent_name="verl_sums"
    )

    assert trajectory.error is None
    observed = [
        token for token, mask in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if not mask
    ]
    assert tokenizer.decode(observed) == "\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n"
    assert [(turn.response_start, turn.finish_reason) for turn in trajectory.turns] == [(0, "stop"), (31, "stop")]
    assert [span.version for span in trajectory.weight_versions] == [3, 4]
    assert [span.start for span in trajectory.weight_versions] == [0, 31]
    assert (trajectory.num_turns, trajectory.tool_rewards, trajectory.timings.tool_calls) == (4, [0.25], 0.5)
    assert trajectory.reward is not None
    assert trajectory.reward.score == 1.0
    sent = own_services.model.seen()[1]
    assert sent.token_ids == [*trajectory.prompt_ids, *trajectory.response_ids[:31]]
    assert sent.sampling_params.max_tokens == 400


async def test_the_trace_is_the_tree_of_our_own_loops_with_tools_below_their_turn(own_services: AgentServices) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    body = group(agent_name="verl_sums", trace=True)
    own_services.model.scripts[0] = ["<tool_call>[9, 9]</tool_call><|im_end|>", "#### 18<|im_end|>"]
    await own_services.client.post("/groups", json=body.model_dump(mode="json"), headers={"traceparent": trace})

    spans = own_services.spans()
    names = {span.context.span_id: span.name for span in spans if span.context}
    tree = sorted((names.get(span.parent.span_id, "") if span.parent else "", span.name) for span in spans)
    root = next(span.name for span in spans if span.name in {parent for parent, name in tree if name == "turn 0"})
    assert [edge for edge in tree if edge[1].startswith("turn")] == [(root, "turn 0"), (root, "turn 1")]
    assert ("turn 0", "SumLoop.add") in tree
    assert [parent for parent, name in tree if name.startswith("chat")] == ["turn 0", "turn 1"]
    assert [parent for parent, name in tree if name == "reward"] == [root]
    assert len(spans) == 7


async def test_a_score_of_the_loop_itself_is_the_reward_and_arguments_of_the_file_arrive(
    own_services: AgentServices,
) -> None:
    trajectory = await own_services.say("#### 17<|im_end|>", agent_name="verl_bonus", trace=True)

    assert trajectory.reward is not None
    assert (trajectory.reward.score, trajectory.reward.components) == (0.75, {})
    [scored] = [dict(span.attributes or {}) for span in own_services.spans() if span.name == "reward"]
    assert (scored["gen_ai.evaluation.name"], scored["gen_ai.evaluation.score.value"]) == ("verl_bonus", 0.75)


async def test_ids_that_the_model_did_not_write_may_not_have_mask_1(own_services: AgentServices) -> None:
    trajectory = await own_services.say("#### 18<|im_end|>", agent_name="verl_rewrites")

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.INVALID_REQUEST
    assert "with response_mask 1 to come from server_manager.generate, in order, got another at position 0 of 4" in (
        trajectory.error.message
    )


async def test_sampling_parameters_that_do_not_exist_here_are_refused_by_name(own_services: AgentServices) -> None:
    trajectory = await own_services.say("never", agent_name="verl_demands")

    assert trajectory.error is not None
    assert "got repetition_penalty=1.2, min_p=0.1; leave them out" in trajectory.error.message


async def test_a_loop_of_ours_may_stand_in_the_file_too(own_services: AgentServices) -> None:
    trajectory = await own_services.say("#### 18<|im_end|>", agent_name="our_loop")

    assert (trajectory.agent_name, trajectory.error) == ("our_loop", None)
    assert {"verl_single", "verl_sums", "our_loop", "tool_agent"} <= {known.name for known in agents()}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("name: x", ValueError, "expected a list of agent loops, got dict"),
        ("- name: x", ValueError, "entry 1: expected the keys name and _target_"),
        ("- {name: x, _target_: json.JSONDecoder}", TypeError, "entry 1: expected a class with `async def run"),
        (
            "- {name: x, _target_: no.such.Loop}",
            OwnCodeError,
            "entry 1, 'no.such.Loop': ModuleNotFoundError: No module",
        ),
        ("- {name: x, _target_: trackway.agent.ToolAgent, y: 1}", ValueError, r"no arguments .* got \['y'\]"),
        ("- {", ValueError, "loops.yaml: expected YAML, got"),
    ],
)
def test_a_wrong_file_is_told_with_its_entry(
    settings: AgentSettings, tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    file = tmp_path / "loops.yaml"
    file.write_text(text)

    with pytest.raises(error, match=message):
        load_loops(settings.model_copy(update={"agent_loop_config_path": file}))


def test_a_missing_file_is_told(settings: AgentSettings, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"agent_loop_config_path: expected a YAML file, got '.*gone.yaml'"):
        load_loops(settings.model_copy(update={"agent_loop_config_path": tmp_path / "gone.yaml"}))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'So. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
        ("qwen3_coder", "So. <tool_call><function=add><parameter=a>1</parameter></function></tool_call>"),
    ],
)
async def test_verls_tool_parser_reads_by_the_format_of_that_name(
    tokenizer: PreTrainedTokenizerFast, name: str, text: str
) -> None:
    offer_stand_ins()
    module = importlib.import_module("verl.experimental.agent_loop.tool_parser")
    schema = FunctionSchema(name="add", parameters={"properties": {"a": {"type": "integer"}}})

    parser = module.ToolParser.get_tool_parser(name, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)

    expected = ("So.", [FunctionCall(name="add", arguments='{"a": 1}')])
    assert await parser.extract_tool_calls(ids, [ToolSchema(function=schema)]) == expected
    assert await parser.extract_tool_calls(ids, [ToolSchema(function=schema).model_dump()]) == expected
    assert await parser.extract_tool_calls(ids[:-1]) == ("So.", [])
