"""verl-tool's API of the tool server: actions in, observations out.

A trajectory's instances last from its first action to `finish`, or until they expire. Its actions run in sequence,
those of different trajectories concurrently, and a failure is reported in its own entry. Errors of the model and
rejections by a tool become observations. Errors of the server end that trajectory, as in verl-tool.

Tool calls are read in the formats of verl-tool's models, and observations are marked up: Hermes' `<tool_call>`;
`<python>` tags and Markdown fences for the tool `python`, `<search>` tags for `search`. The marks follow verl-tool's
python_code and search_retrieval.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import JsonValue

from trackway.chat.tool_calls import BEGIN, END, ParsedCall, blocks_in, read_call, unclosed_call
from trackway.tools.core.server import SessionInstances, SessionKey, ToolServer, kwargs_of
from trackway.wire.errors import ErrorCode, ModelSees, TrackwayError
from trackway.wire.tools import (
    DetailedObservation,
    ExecuteRequest,
    ObservationReply,
    ObservationRequest,
    OneShotRequest,
    ToolResult,
)

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
    """The calls in the text, or None when there is none for the offered tools."""
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
    """Do `_tag_of` for a Markdown fence."""
    if text.count("```") % 2:
        return lambda answer: f"\n{_bare(answer)}\n```\n"
    return lambda answer: f"\n```result\n{_bare(answer)}\n```\n"


def _bare(answer: str) -> str:
    return answer.strip(" \n")


def _found(answer: str) -> str:
    """The documents without the JSON around them. Other text is unchanged."""
    try:
        return str(json.loads(answer)["result"])
    except (ValueError, LookupError, TypeError):
        return answer


logger = logging.getLogger("trackway.tools")

Fields = Mapping[str, JsonValue]


class _Step(NamedTuple):
    """An entry of a request."""

    action: str
    fields: Fields
    finish: bool
    last: bool


class ActionResult(NamedTuple):
    """An entry of a reply."""

    observation: str | DetailedObservation
    done: bool
    valid: bool


class ObservationFace:
    """Serves `POST /get_observation`; at most `parallel` trajectories of a request at a time."""

    def __init__(self, server: ToolServer, parallel: int) -> None:
        self._server = server
        self._parallel = parallel
        self.sessions = SessionInstances(server)

    async def answer(self, request: ObservationRequest, caller: str) -> ObservationReply:
        """An entry for each action, in their order."""
        began = time.perf_counter()
        slots = asyncio.Semaphore(self._parallel)
        results: dict[int, ActionResult] = {}

        async def run(trajectory_id: str, steps: dict[int, _Step]) -> None:
            async with slots:
                for index, step in steps.items():
                    results[index] = await self._outcome((caller, trajectory_id), step)

        await asyncio.gather(*(run(name, steps) for name, steps in _by_trajectory(request).items()))
        observations, dones, valids = zip(*(results[index] for index in sorted(results)), strict=True)
        took_ms = (time.perf_counter() - began) * 1000
        return ObservationReply(
            observations=[*observations], dones=[*dones], valids=[*valids], processing_time_ms=round(took_ms, 3)
        )

    async def _outcome(self, key: SessionKey, step: _Step) -> ActionResult:
        if step.finish:
            await self.sessions.end(key)
            return ActionResult("", done=True, valid=True)
        action = read_action(step.action, [schema.function.name for schema in self._server.schemas()])
        outcome = self._not_a_call() if action is None else await self._run(key, action, step.fields)
        if step.last:
            await self.sessions.end(key)
        return outcome

    async def _run(self, key: SessionKey, action: Action, fields: Fields) -> ActionResult:
        texts: list[str] = []
        reward, problem = 0.0, None
        for call in action.calls:
            try:
                result = await self._result(key, call, fields)
            except TrackwayError as error:
                if error.model_sees is ModelSees.NO:
                    return _failed(call, error.message)
                problem = problem or error.message
                result = ToolResult(text=error.message)
            except Exception as error:
                logger.exception("an action of %s failed", key[-1])
                return _failed(call, f"{type(error).__name__}: {error}")
            texts.append(action.wrap(result.text))
            reward += result.reward
        text = "".join(texts)
        if problem is None and reward == 0.0:
            return ActionResult(text, done=False, valid=True)
        observation = DetailedObservation(obs=text, reward=reward or None, invalid_reason=problem)
        return ActionResult(observation, done=False, valid=problem is None)

    async def _result(self, key: SessionKey, call: ParsedCall, fields: Fields) -> ToolResult:
        if call.error is not None:
            raise TrackwayError(ErrorCode.INVALID_REQUEST, call.error)
        create_kwargs = kwargs_of(fields, call.name, "create_kwargs")
        request = ExecuteRequest(
            arguments=call.arguments, execute_kwargs=kwargs_of(fields, call.name, "execute_kwargs")
        )
        if call.name in self._server.stateless():
            once = OneShotRequest(**request.model_dump(), session_id=key[-1], create_kwargs=create_kwargs)
            return await self._server.one_shot(call.name, once)
        return (await self.sessions.execute(key, call.name, request, create_kwargs))[1]

    def _not_a_call(self) -> ActionResult:
        functions = [schema.function for schema in self._server.schemas()]
        tools = "\n".join(f"• {function.name}: {function.description}" for function in functions)
        observation = DetailedObservation(
            obs="", invalid_reason="No valid tool found for action", available_tools=f"Available tools:\n{tools}"
        )
        return ActionResult(observation, done=False, valid=False)


def _by_trajectory(request: ObservationRequest) -> dict[str, dict[int, _Step]]:
    """The entries of each trajectory by their index in the request."""
    count = len(request.actions)
    fields = request.extra_fields or [{}] * count
    finish = request.finish or [False] * count
    last = request.is_last_step or [False] * count
    steps: dict[str, dict[int, _Step]] = {}
    for index, name in enumerate(request.trajectory_ids):
        row_fields = fields[index]
        steps.setdefault(name, {})[index] = _Step(
            request.actions[index],
            row_fields,
            finish=finish[index] or row_fields.get("finish") is True,
            last=last[index] or row_fields.get("is_last_step") is True,
        )
    return steps


def _failed(call: ParsedCall, message: str) -> ActionResult:
    return ActionResult(DetailedObservation(obs="", error=message, tool_type=call.name), done=True, valid=False)
