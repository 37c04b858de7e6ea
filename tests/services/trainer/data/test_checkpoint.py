"""The tiny model, and the chat template that the agent relies on."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2.exceptions import TemplateError
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from trackway.deploy.bundled import TINY_MODEL

Turn = dict[str, Any]

TINY = Path(__file__).parents[4] / "examples" / "tiny"
USER: Turn = {
    "role": "user",
    "content": "Tom has 12 pens and lost 5 of them. How many pens does Tom still have?",
}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12-5"}}\n</tool_call>'
ASKS: Turn = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "calculator", "arguments": '{"expression": "12-5"}'},
        }
    ],
}
OBSERVED: Turn = {"role": "tool", "tool_call_id": "call_0", "content": "7"}


def _schema(name: str) -> Turn:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


def _render(tokenizer: PreTrainedTokenizerFast, messages: list[Turn], *tools: str, generate: bool = False) -> str:
    schemas = [_schema(name) for name in tools]
    return str(
        tokenizer.apply_chat_template(
            messages, tools=[*schemas] or None, add_generation_prompt=generate, tokenize=False
        )
    )


def test_the_checkpoint_is_small_enough_for_the_repository() -> None:
    assert sum(file.stat().st_size for file in TINY_MODEL.iterdir()) < 1_000_000


def test_the_model_has_231008_parameters_with_tied_embeddings() -> None:
    with safe_open(TINY_MODEL / "model.safetensors", framework="pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118

    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 231_008
    assert "lm_head.weight" not in shapes
    assert json.loads((TINY_MODEL / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_the_model_loads_in_float32_though_stored_in_half_the_size() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)

    assert model.dtype is torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_end_of_turn_and_padding_are_those_that_the_engine_stops_and_pads_with(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    config = json.loads((TINY_MODEL / "config.json").read_text())

    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        config["eos_token_id"],
        config["pad_token_id"],
    )
    assert len(tokenizer) == config["vocab_size"] == 480


def test_tool_markers_survive_decoding_without_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    markers = "<tool_call></tool_call><tool_response></tool_response>"

    ids = tokenizer.encode(f"<|im_start|>{markers}<|im_end|><|endoftext|>")

    assert len(ids) == 7
    assert tokenizer.decode(ids, skip_special_tokens=True) == markers


def test_a_call_costs_nine_tokens_and_digits_stay_single(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode(f"{CALL}<|im_end|>")]

    scaffold = '\n{"name": "calculator", "arguments": {"expression": "'
    assert tokens == ["<tool_call>", scaffold, "1", "2", "-", "5", '"}}\n', "</tool_call>", "<|im_end|>"]


@pytest.mark.parametrize(
    "text", ["Ünïcode 123, 4.5!\n\n  {}", "print('x')\t# tabs", "多少"], ids=["accents", "code", "chinese"]
)
def test_text_that_the_tokenizer_never_saw_comes_back_whole(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("system", "tools", "block"),
    [
        ("", [], ""),
        ("", ["calculator"], "<|im_start|>system\nTools: calculator<|im_end|>\n"),
        ("", ["calculator", "other"], "<|im_start|>system\nTools: calculator, other<|im_end|>\n"),
        ("Be brief.", [], "<|im_start|>system\nBe brief.<|im_end|>\n"),
        ("Be brief.", ["calculator"], "<|im_start|>system\nBe brief.\nTools: calculator<|im_end|>\n"),
    ],
    ids=["neither", "one tool", "two tools", "message", "message and tool"],
)
def test_the_system_block_holds_the_message_and_the_tool_names(
    tokenizer: PreTrainedTokenizerFast, system: str, tools: list[str], block: str
) -> None:
    messages: list[Turn] = [{"role": "system", "content": system}] if system else []

    text = _render(tokenizer, [*messages, USER], *tools, generate=True)

    assert text == f"{block}<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_is_rendered_turn_by_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    text = _render(tokenizer, [USER, ASKS, OBSERVED, {"role": "assistant", "content": "#### 7"}])

    assert text == (
        f"<|im_start|>user\n{USER['content']}<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\n7<|im_end|>\n"
        "<|im_start|>assistant\n#### 7<|im_end|>\n"
    )


@pytest.mark.parametrize("arguments", ['{"expression": "12-5"}', {"expression": "12-5"}], ids=["text", "object"])
def test_a_call_is_rendered_after_the_content_with_arguments_as_text_or_object(
    tokenizer: PreTrainedTokenizerFast, arguments: object
) -> None:
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    message = {"role": "assistant", "content": "Subtract.", "tool_calls": [call, call]}

    text = _render(tokenizer, [message])

    assert text == f"<|im_start|>assistant\nSubtract.{CALL}\n{CALL}<|im_end|>\n"


def test_a_system_message_out_of_place_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TemplateError, match="a system message must come first, got one at place 2"):
        _render(tokenizer, [USER, {"role": "system", "content": "late"}])


def test_appending_observation_ids_equals_rendering_the_whole_conversation(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompt = ids(_render(tokenizer, [USER], "calculator", generate=True))
    model_turns = ids(f"{CALL}<|im_end|>"), ids("#### 7<|im_end|>")
    observation = ids("\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")

    conversation = [USER, ASKS, OBSERVED, {"role": "assistant", "content": "#### 7"}]
    whole = ids(_render(tokenizer, conversation, "calculator"))
    assert prompt + model_turns[0] + observation + model_turns[1] + ids("\n") == whole


@pytest.mark.slow
def test_the_start_knows_the_protocol_but_answers_about_a_third(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TINY)
    measure = importlib.import_module("measure")
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL).eval()
    problems = measure.held_out(128)

    prompts = [measure.prompt_ids(tokenizer, problem.question, ["calculator"]) for problem in problems]
    turns = measure.generate(model, prompts, tokenizer.eos_token_id, 1.0, torch.Generator().manual_seed(0))

    calls = sum(measure.tool_result(tokenizer.decode(turn)) is not None for turn in turns)
    assert calls / len(turns) > 0.9
    assert 0.25 < measure.accuracy(model, tokenizer, problems) < 0.45
