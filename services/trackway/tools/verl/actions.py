"""Parses tool calls from an action in the formats of verl-tool's models, and marks up the observation.

Hermes' `<tool_call>`; `<python>` tags and Markdown fences for the tool `python`; `<search>` tags for `search`. The
marks are those of verl-tool's tools: python_code for code, search_retrieval for searches.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from trackway.chat.tool_calls import BEGIN, END, ParsedCall, blocks_in, read_call, unclosed_call

MAX_CALLS = 64
"""Maximum calls of an action."""

Wrap = Callable[[str], str]

_PYTHON_FENCE = re.compile(r"```\n?(?:python3?|py)\s(.*?)```", re.DOTALL)
_OPEN_TAG = re.compile(r"<(result|output)>\s*$")


@dataclass(frozen=True)
class Action:
    """The calls of an action, and the markup of their results."""

    calls: Sequence[ParsedCall]
    wrap: Wrap


def read_action(text: str, offered: Collection[str]) -> Action | None:
    """The calls in the text; None when there is none for the offered tools."""
    if BEGIN in text:
        return Action(_hermes(text), lambda answer: f"\n<tool_response>\n{_bare(answer)}\n</tool_response>\n")
    if "python" in offered:
        if code := blocks_in(text, "<python>", "</python>")[0]:
            return Action([_python(code)], _tag_of(text))
        if code := _PYTHON_FENCE.findall(text):
            return Action([_python(code)], _fence_of(text))
    if "search" in offered and (queries := blocks_in(text, "<search>", "</search>")[0]):
        call = ParsedCall("search", {"query_list": [queries[-1].strip()]})
        return Action([call], lambda answer: f"\n\n<information>{_found(answer)}</information>\n\n")
    return None


def _hermes(text: str) -> list[ParsedCall]:
    blocks, _, unclosed = blocks_in(text, BEGIN, END)
    calls = [read_call(block) for block in blocks[:MAX_CALLS]]
    if len(blocks) > MAX_CALLS:
        error = f"expected at most {MAX_CALLS} tool calls in one action, got {len(blocks)}; call fewer at once"
        return [*calls, ParsedCall(name="", error=error)]
    return calls if unclosed is None else [*calls, unclosed_call(BEGIN + unclosed)]


def _python(blocks: list[str]) -> ParsedCall:
    return ParsedCall("python", {"code": "\n".join(block.strip() for block in blocks)})


def _tag_of(text: str) -> Wrap:
    """Closes the tag that the model left open at the end, or adds a complete one, around a result."""
    opened = _OPEN_TAG.search(text)
    if opened:
        return lambda answer: f"\n{_bare(answer)}\n</{opened[1]}>\n"
    return lambda answer: f"\n<result>\n{_bare(answer)}\n</result>\n"


def _fence_of(text: str) -> Wrap:
    """As `_tag_of`, for a Markdown fence."""
    if text.count("```") % 2:
        return lambda answer: f"\n{_bare(answer)}\n```\n"
    return lambda answer: f"\n```result\n{_bare(answer)}\n```\n"


def _bare(answer: str) -> str:
    return answer.strip(" \n")


def _found(answer: str) -> str:
    """The documents without the JSON around them; other text is unchanged."""
    try:
        return str(json.loads(answer)["result"])
    except (ValueError, LookupError, TypeError):
        return answer
