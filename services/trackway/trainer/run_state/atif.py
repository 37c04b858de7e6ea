"""Trajectories as documents of ATIF 1.8, Harbor's Agent Trajectory Interchange Format, and back.

The format: `harbor.models.trajectories` of https://github.com/laude-institute/harbor. It has fields for messages, tool
calls, observations, token ids and logprobs. Rewards and everything else of a trajectory go under `extra`.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from trackway.wire.base import WireReply
from trackway.wire.chat import FunctionCall, Message, ToolCall, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory, Turn

_IDS = ("prompt_ids", "response_ids", "response_logprobs")
"""Fields of a row that its steps have as well."""

Json = dict[str, Any]


def to_atif(trajectory: Trajectory, model: str | None = None, tools: Sequence[ToolSchema] = ()) -> Json:
    """The document of a trajectory. Its steps have the tokens of each turn, `extra` has all other fields."""
    rest = trajectory.model_dump(mode="json")
    steps: list[Json] = []
    _add(steps, trajectory.prompt_messages, is_prompt=True)
    for number, (row, kept) in enumerate(zip(trajectory.rows, (rest, *rest["further_rows"]), strict=True)):
        first = len(steps)
        for turn in row.turns:
            _add_turn(steps, row, turn, number)
        rebuilt = _ids(steps[first:], kept["turns"], number)
        if rebuilt == {name: getattr(row, name) for name in _IDS}:
            for name in _IDS:
                del kept[name]
    if not steps:
        reason = trajectory.error.message if trajectory.error else trajectory.stop_reason
        steps = [{"source": "system", "message": reason}]
    calls = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": trajectory.session_id,
        "trajectory_id": trajectory.id,
        "agent": _present(
            name=trajectory.agent_name,
            version=version("trackway"),
            model_name=model,
            tool_definitions=[tool.model_dump(mode="json") for tool in tools] or None,
        ),
        "steps": [{"step_id": place, **step} for place, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": sum(call["prompt_tokens"] for call in calls),
            "total_completion_tokens": sum(call["completion_tokens"] for call in calls),
            "total_steps": len(steps),
        },
        "extra": {"reward": trajectory.reward.score if trajectory.reward else None, "trackway": rest},
    }


def read_atif(path: Path) -> Trajectory:
    """The trajectory of a file: ours as it was, another producer's with its messages, and its tokens if it has them.

    Raises TrackwayError(INVALID_REQUEST) for anything else.
    """
    try:
        document = _Document.model_validate_json(path.read_bytes())
        rest = (document.extra or {}).get("trackway")
        return _foreign(document) if rest is None else _ours(document, rest)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        reason = (
            f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}" if isinstance(error, ValidationError) else error
        )
        message = f"expected an ATIF document in {path}, got another file ({reason}); check it with Harbor's validator"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error


def _add_turn(steps: list[Json], row: Trajectory, turn: Turn, number: int) -> None:
    start, end, first = turn.response_start, turn.response_end, len(steps)
    said = turn.messages and turn.messages[0].role == "assistant"
    _add(steps, turn.messages if said else [Message(role="assistant", content=""), *turn.messages])
    steps[first]["llm_call_count"] = 1
    steps[first]["metrics"] = {
        "prompt_tokens": len(row.prompt_ids) + start,
        "completion_tokens": end - start,
        "prompt_token_ids": [*row.prompt_ids, *row.response_ids[:start]],
        "completion_token_ids": row.response_ids[start:end],
        "logprobs": row.response_logprobs[start:end],
        "extra": {"finish_reason": turn.finish_reason, "seconds": turn.generate_s, "row": number},
    }


def _add(steps: list[Json], messages: Iterable[Message], is_prompt: bool = False) -> None:
    """Append the steps of messages. A tool's result goes to the agent's step before it."""
    for message in messages:
        if message.role == "tool" and steps and steps[-1]["source"] == "agent":
            known = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
            call_id = message.tool_call_id if message.tool_call_id in known else None
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append(_present(source_call_id=call_id, content=message.content))
            continue
        source = {"assistant": "agent", "system": "system"}.get(message.role, "user")
        calls = [_call(call) for call in message.tool_calls or ()] or None
        copied = True if is_prompt and source == "agent" else None
        steps.append(_present(source=source, message=message.content, tool_calls=calls, is_copied_context=copied))


def _call(call: ToolCall) -> Json:
    fields = {"tool_call_id": call.id, "function_name": call.function.name}
    with suppress(ValueError):
        if isinstance(arguments := json.loads(call.function.arguments), dict):
            return fields | {"arguments": arguments}
    return fields | {"arguments": {}, "extra": {"arguments_text": call.function.arguments}}


def _ids(steps: Iterable[Json], turns: Sequence[Json], number: int) -> Json | None:
    """The ids and logprobs of a row from the metrics of its steps, or None without any."""
    calls = [step["metrics"] for step in steps if step.get("metrics")]
    calls = [call for call in calls if call["extra"]["row"] == number]
    if not calls:
        return None
    prompt = len(calls[0]["prompt_token_ids"]) - turns[0]["response_start"]
    ids = calls[-1]["prompt_token_ids"] + calls[-1]["completion_token_ids"]
    logprobs = [0.0] * (len(ids) - prompt)
    for call, turn in zip(calls, turns, strict=True):
        logprobs[turn["response_start"] : turn["response_end"]] = call["logprobs"]
    return dict(zip(_IDS, (ids[:prompt], ids[prompt:], logprobs), strict=True))


def _present(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def _joined(content: object) -> object:
    """The text of parts, without which a result is empty. Raises ValueError for images and audio."""
    if not isinstance(content, list):
        return content or ""
    if other := [part for part in content if not isinstance(part, dict) or "text" not in part]:
        raise ValueError(f"expected text, got {other[0]}")
    return "".join(part["text"] for part in content)


_Text = Annotated[str, BeforeValidator(_joined)]


class _Result(WireReply):
    source_call_id: str | None = None
    content: _Text = ""


class _AtifStep(WireReply):
    source: Literal["system", "user", "agent"]
    message: _Text
    tool_calls: list[dict[str, Any]] | None = None
    observation: dict[Literal["results"], list[_Result]] | None = None
    metrics: Json | None = None
    is_copied_context: bool | None = None

    def messages(self) -> list[Message]:
        """The step's message, and the results of its calls."""
        role = "assistant" if self.source == "agent" else self.source
        calls = [
            ToolCall(
                id=call["tool_call_id"],
                function=FunctionCall(name=call["function_name"], arguments=json.dumps(call["arguments"])),
            )
            for call in self.tool_calls or ()
        ]
        names = {call.id: call.function.name for call in calls}
        return [
            Message(role=role, content=self.message, tool_calls=calls or None),
            *(
                Message(
                    role="tool",
                    content=result.content,
                    tool_call_id=result.source_call_id,
                    name=names.get(result.source_call_id or ""),
                )
                for result in (self.observation or {}).get("results", ())
            ),
        ]


class _Document(WireReply):
    schema_version: str = Field(pattern=r"^ATIF-v1\.\d$")
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: dict[str, Any]
    steps: list[_AtifStep] = Field(min_length=1)
    extra: dict[str, Any] | None = None


def _ours(document: _Document, rest: Json) -> Trajectory:
    for number, row in enumerate((rest, *rest["further_rows"])):
        if "prompt_ids" not in row:
            row |= _ids([step.model_dump() for step in document.steps], row["turns"], number) or {}
    return Trajectory.model_validate(rest)


def _foreign(document: _Document) -> Trajectory:
    """Each agent step is a turn. What comes before the first is the prompt."""
    prompt, turns = list[Message](), list[Turn]()
    sampled = [step for step in document.steps if step.source == "agent" and not step.is_copied_context]
    row, places = _row([step.metrics for step in sampled])
    for step in document.steps:
        if step.source == "agent" and not step.is_copied_context:
            start, end = places[len(turns)] if places else (0, 0)
            turn = Turn(
                index=len(turns), messages=step.messages(), response_start=start, response_end=end, finish_reason=""
            )
            turns.append(turn)
        else:
            (turns[-1].messages if turns else prompt).extend(step.messages())
    score, agent = (document.extra or {}).get("reward"), document.agent["name"]
    name = document.trajectory_id or document.session_id or agent
    return Trajectory(
        id=name,
        session_id=document.session_id or name,
        tags=Tags(experiment_name=agent, step=0, sample_index=name, rollout_n=0),
        agent_name=agent,
        data_source="",
        prompt_messages=prompt,
        turns=turns,
        num_turns=1 + len(turns) + sum(message.role == "user" for message in prompt),
        reward=Reward(score=score) if isinstance(score, int | float) else None,
        stop_reason=StopReason.ANSWERED,
        **row,
    )


def _row(calls: Sequence[Json | None]) -> tuple[Json, list[tuple[int, int]]]:
    """The tokens of calls that each continue the one before, and the place of each in the response; else nothing."""
    ids, mask, logprobs, places = list[int](), list[int](), list[float](), list[tuple[int, int]]()
    prompt = (calls[0] or {}).get("prompt_token_ids", []) if calls else []
    for call in calls:
        if not call or not call.get("prompt_token_ids") or not call.get("completion_token_ids"):
            return {}, []
        new = call["prompt_token_ids"][len(prompt) + len(ids) :]
        sampled = call.get("logprobs") or []
        if call["prompt_token_ids"] != [*prompt, *ids, *new] or len(sampled) != len(call["completion_token_ids"]):
            return {}, []
        places.append((len(ids) + len(new), len(ids) + len(new) + len(sampled)))
        ids += [*new, *call["completion_token_ids"]]
        mask += [0] * len(new) + [1] * len(sampled)
        logprobs += [0.0] * len(new) + sampled
    return {
        "prompt_ids": prompt,
        "response_ids": ids,
        "response_mask": mask,
        "response_logprobs": logprobs,
    }, places
