import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from trackway.run_config import compose
from trackway.tools.app import create_app as create_tools
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.trainer.data import row_files
from trackway.trainer.data.prompt_filter import PromptFilter, prompt_filter
from trackway.wire.agent import Sample
from trackway.wire.chat import FunctionCall, FunctionSchema, Message, ToolCall, ToolSchema
from trackway.wire.errors import TrackwayError

pytestmark = pytest.mark.slow

Make = Callable[[int], Sample]
Serving = Callable[[FastAPI], AbstractContextManager[str]]

CALCULATOR = ToolSchema(function=FunctionSchema(name="calculator"))
SEARCH = ToolSchema(function=FunctionSchema(name="search"))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; a prompt is its messages, one word per tool, and one for the assistant's turn."""
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "{% for message in messages %}{{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", chat_template=template)


def filter_of(tokenizer: PreTrainedTokenizerFast, limit: int, agent: str = "tool_agent") -> PromptFilter:
    return PromptFilter(tokenizer, [CALCULATOR, SEARCH], limit, agent)


def words(sample: Sample, count: int, **changes: object) -> Sample:
    """The row with a prompt of so many words."""
    return sample.model_copy(update={"prompt": [Message(role="user", content="word " * count)], **changes})


def fits(keep: PromptFilter, row: Sample, other_row: Sample) -> bool:
    return row in keep([other_row, row], "rows.parquet")


@pytest.mark.parametrize(
    ("changes", "default", "tools"),
    [
        ({"agent_name": "tool_agent"}, "single_turn_agent", 2),
        ({"agent_name": "single_turn_agent"}, "tool_agent", 0),
        ({"agent_name": None}, "tool_agent", 2),
        ({"agent_name": None}, "single_turn_agent", 0),
        ({"agent_name": "my_agent"}, "single_turn_agent", 2),
        ({"extra_info": {"tool_selection": ["search", "gone"]}}, "tool_agent", 1),
        ({"extra_info": {"tool_selection": []}}, "tool_agent", 0),
    ],
)
def test_a_prompt_is_measured_as_its_agent_templates_it(
    tokenizer: PreTrainedTokenizerFast, sample: Make, changes: dict[str, object], default: str, tools: int
) -> None:
    row, short = words(sample(1), 5, **changes), words(sample(0), 1)

    assert fits(filter_of(tokenizer, 5 + tools + 1, default), row, short)
    assert not fits(filter_of(tokenizer, 5 + tools, default), row, short)


@pytest.mark.anyio
@pytest.mark.usefixtures("shared_http")
async def test_a_prompt_is_measured_with_the_runs_template_variables(
    tokenizer: PreTrainedTokenizerFast, sample: Make, serving: Serving, tmp_path: Path
) -> None:
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if enable_thinking %}think step by step {% endif %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    lines = [
        f"actor_rollout_ref.model.path={tmp_path}",
        "data.filter_overlong_prompts=true",
        "data.max_prompt_length=9",
    ]
    lines += ["+data.apply_chat_template_kwargs.enable_thinking=true"]

    with serving(create_tools(tools=[CalculatorTool.default()])) as url:
        keep = await prompt_filter(compose(lines), url)

    assert keep is not None
    rows = [words(sample(0), 4), words(sample(1), 5)]
    assert (list(keep.lengths(rows, "rows")), keep(rows, "rows")) == ([9, 10], rows[:1])


def test_past_tool_calls_are_templated_as_objects(tokenizer: PreTrainedTokenizerFast, sample: Make) -> None:
    call = ToolCall(id="c", function=FunctionCall(name="add", arguments='{"a": "one two three"}'))
    tokenizer.chat_template = "{{ messages[0].tool_calls[0].function.arguments.a }}"
    row = sample(1).model_copy(update={"prompt": [Message(role="assistant", content="", tool_calls=[call])]})

    with pytest.raises(TrackwayError, match="the shortest has 3;"):
        filter_of(tokenizer, 2)([row], "rows.parquet")


def test_the_log_says_how_many_of_how_many_rows_were_dropped(
    tokenizer: PreTrainedTokenizerFast, sample: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [words(sample(index), index) for index in range(1, 1101)]

    with caplog.at_level(logging.INFO):
        kept = filter_of(tokenizer, 1003)(rows, "a.parquet, b.jsonl")

    assert kept == rows[:1000]
    assert caplog.messages == ["a.parquet, b.jsonl: dropped 100 of 1100 rows longer than data.max_prompt_length=1003"]


def test_a_long_measuring_says_how_far_it_is(
    tokenizer: PreTrainedTokenizerFast, sample: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "EVERY_S", -1.0)

    with caplog.at_level(logging.INFO):
        filter_of(tokenizer, 10)([words(sample(0), 1)] * 600, "rows.parquet")

    measured = [message for message in caplog.messages if "measured" in message]
    assert measured == [f"rows.parquet: prompts measured: {done} of 600" for done in range(1, 601)]


def test_no_row_left_is_an_error_with_the_shortest_length(tokenizer: PreTrainedTokenizerFast, sample: Make) -> None:
    with pytest.raises(TrackwayError) as caught:
        filter_of(tokenizer, 5)([words(sample(0), 9), words(sample(1), 7)], "rows.parquet")

    assert caught.value.message == (
        "rows.parquet: expected prompts of at most data.max_prompt_length=5 tokens, tool schemas included, got none in "
        "2 rows, the shortest has 10; raise the limit, or set data.filter_overlong_prompts=false"
    )


def test_a_prompt_that_the_template_refuses_is_named(tokenizer: PreTrainedTokenizerFast, sample: Make) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"

    with pytest.raises(TrackwayError, match=r"rows\.parquet: .* row with index 4: no system role"):
        filter_of(tokenizer, 5)([sample(4)], "rows.parquet")


@pytest.mark.anyio
@pytest.mark.usefixtures("shared_http")
@pytest.mark.parametrize(("tools", "count"), [("null", 2), ("[calculator]", 1), ("[]", 0)])
async def test_the_schemas_are_the_servers_as_far_as_the_run_offers_them(
    tokenizer: PreTrainedTokenizerFast, sample: Make, serving: Serving, tmp_path: Path, tools: str, count: int
) -> None:
    tokenizer.save_pretrained(tmp_path)
    row, short = words(sample(1), 5), words(sample(0), 1)
    lines = [f"actor_rollout_ref.model.path={tmp_path}", f"trackway.tools={tools}", "data.filter_overlong_prompts=true"]
    lines += ["actor_rollout_ref.rollout.multi_turn.enable=true"]

    with serving(create_tools(tools=[CalculatorTool.default(), Gsm8kTool.default()])) as url:
        wide = await prompt_filter(compose([*lines, f"data.max_prompt_length={6 + count}"]), url)
        narrow = await prompt_filter(compose([*lines, f"data.max_prompt_length={5 + count}"]), url)

    assert wide is not None and narrow is not None
    assert (fits(wide, row, short), fits(narrow, row, short)) == (True, False)


@pytest.mark.anyio
async def test_without_the_key_nothing_is_measured_and_no_server_asked() -> None:
    assert await prompt_filter(compose([]), "http://127.0.0.1:9") is None
