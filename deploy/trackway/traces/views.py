"""Facts about a trajectory from its tree: reward, tokens, turns, weights, the end of the answer."""

import math
from collections.abc import Mapping

from pydantic import BaseModel, JsonValue

from trackway.traces.tree import SpanNode, TraceTree
from trackway.tracing import attributes as names


class Tokens(BaseModel):
    """Tokens of a trajectory: its prompt, and everything after it, including observations."""

    prompt: int
    response: int


def number(value: object) -> float | None:
    """A finite number, possibly given as text, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        parsed = float(value)
    except ValueError:
        return None
    return parsed if math.isfinite(parsed) else None


def field_of(value: JsonValue, *keys: str) -> JsonValue:
    """The first of these fields in a JSON object, or None if there is none or the value is not an object."""
    if not isinstance(value, Mapping):
        return None
    return next((value[key] for key in keys if value.get(key) is not None), None)


def output_of(tree: TraceTree, key: str) -> JsonValue:
    """A field of the root's outputs."""
    return None if tree.root is None else field_of(tree.root.outputs, key)


def reward_of(tree: TraceTree) -> float | None:
    """The trainer's feedback `reward`, else the root's."""
    feedback = number(tree.feedback.get("reward"))
    return number(output_of(tree, "reward")) if feedback is None else feedback


def prompt_text(span: SpanNode) -> str | None:
    """The prompt text that is new since the previous turn, or None without token2text."""
    return _last_content(span.inputs)


def response_text(span: SpanNode) -> str | None:
    """The response text of a generation, or a trajectory's last message of the model, or None without token2text."""
    return _last_content(span.outputs, "assistant")


def messages_of(value: JsonValue) -> list[Mapping[str, JsonValue]]:
    """The messages in a span's inputs or outputs."""
    messages = field_of(value, "messages", names.TEXTS)
    return [message for message in messages if isinstance(message, Mapping)] if isinstance(messages, list) else []


def _last_content(value: JsonValue, role: str | None = None) -> str | None:
    contents = [message.get("content") for message in messages_of(value) if role in (None, message.get("role"))]
    return next((content for content in reversed(contents) if isinstance(content, str)), None)


def has_texts(tree: TraceTree) -> bool:
    """Return whether any generation has its text."""
    return any(response_text(chat) is not None for chat in tree.of_kind("chat"))


def answer_of(tree: TraceTree) -> str:
    """The last text of the model. Empty without token2text."""
    for chat in reversed(tree.of_kind("chat")):
        if text := response_text(chat):
            return text
    return (response_text(tree.root) if tree.root else None) or ""


def tokens_of(span: SpanNode) -> tuple[int, int] | None:
    """Numbers of prompt and response tokens of a generation."""
    prompt = number(span.attributes.get(names.INPUT_TOKENS))
    output = number(span.attributes.get(names.OUTPUT_TOKENS))
    return None if prompt is None or output is None else (int(prompt), int(output))


def tokens_in(tree: TraceTree) -> Tokens | None:
    """The root's token counts, else those derived from the first and the last generation."""
    prompt, response = (number(output_of(tree, key)) for key in ("prompt_tokens", "response_tokens"))
    if prompt is not None and response is not None:
        return Tokens(prompt=int(prompt), response=int(response))
    counts = [count for chat in tree.of_kind("chat") if (count := tokens_of(chat))]
    if not counts:
        return None
    return Tokens(prompt=counts[0][0], response=sum(counts[-1]) - counts[0][0])


def tool_calls(tree: TraceTree) -> int:
    """The number of tool calls, by our services and by the agent's framework."""
    return len(tree.of_kind("execute_tool")) + len(tree.of_frameworks("execute_tool"))


def other_tokens(tree: TraceTree) -> Tokens | None:
    """Tokens of the generations that only the agent's framework recorded, by other models, or None without any."""
    counts = [count for chat in tree.of_frameworks("chat") if (count := tokens_of(chat))]
    prompt, response = (sum(count[side] for count in counts) for side in (0, 1))
    return Tokens(prompt=prompt, response=response) if counts else None


def weight_version(span: SpanNode) -> str:
    """The weight versions of a generation: `3`, or `3,4` if they changed during it; empty if unknown."""
    return str(span.attributes.get(names.WEIGHT_VERSION, ""))


def weight_versions(tree: TraceTree) -> str:
    """All weight versions of the trajectory, in order."""
    versions = [version for chat in tree.of_kind("chat") for version in weight_version(chat).split(",") if version]
    return ",".join(dict.fromkeys(versions))


def message_texts(tree: TraceTree) -> list[tuple[str, str]]:
    """Role and content of the initial messages."""
    messages = messages_of(tree.root.inputs) if tree.root else []
    return [(str(message.get("role", "")), str(message.get("content", ""))) for message in messages]
