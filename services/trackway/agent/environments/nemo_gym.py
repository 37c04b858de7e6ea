"""A resources server of NeMo-Gym (github.com/NVIDIA-NeMo/Gym): `/seed_session`, a route for each tool, `/verify`.

The row's `env_kwargs` are a row of NeMo-Gym, whose tools are offered. It sends the same requests as `simple_agent`. The
session is a cookie, so a call that fails cannot be repeated on another connection.
"""

import time
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import quote

from pydantic import JsonValue

from trackway.agent.environments.base import Environment, Step
from trackway.wire.agent import GymReward, Sample
from trackway.wire.chat import FunctionSchema, Message, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Reward, Turn

Json = dict[str, JsonValue]

_OF_A_PROXY = {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
"""Statuses that do not come from the server's own code."""


class NemoGym(Environment):
    """A session of a resources server."""

    async def begin(self) -> str:
        """Seed the session with the row. INVALID_REQUEST when the server refuses it."""
        params = params_of(self.sample)
        await self._taken("seed_session", {**self.sample.env_kwargs, "responses_create_params": params})
        self.tools = tools_of(params)
        return ""

    async def step(self, tool: str, arguments: Json) -> Step:
        """The body of the answer, whatever its status, as NeMo-Gym's agents show it."""
        return Step((await self._post(tool, arguments))[1])

    async def score(self, turns: Sequence[Turn]) -> Reward:
        """The reward of `/verify`."""
        params = params_of(self.sample)
        response = response_of(self.episode_id, params, turns)
        body: Json = {**self.sample.env_kwargs, "responses_create_params": params, "response": response}
        verified = GymReward.model_validate_json(await self._taken("verify", body))
        return Reward(score=verified.reward, components=verified.reward_components)

    async def _taken(self, route: str, body: Json) -> str:
        status, text = await self._post(route, body)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise self.failed(f"200 from /{route}", f"{status}: {text}")
        if status != HTTPStatus.OK:
            message = f"{self.place}: expected /{route} to take the row's env_kwargs, got {status}: {text}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        return text

    async def _post(self, route: str, body: Json) -> tuple[int, str]:
        """Status and text of the answer."""
        url = f"{self.settings.url.rstrip('/')}/{quote(route, safe='')}"
        async with self.http.post(url, json=body, allow_redirects=False) as answer:
            text = (await self.body(answer)).decode(errors="replace")
            if answer.status in _OF_A_PROXY:
                raise self.failed(f"an answer from /{route}", f"{answer.status}: {text}")
            return answer.status, text


def params_of(sample: Sample) -> Json:
    """`responses_create_params` of the row. The prompt is the input where the row gives none."""
    params = sample.env_kwargs.get("responses_create_params")
    prompt: JsonValue = [{"role": message.role, "content": message.content} for message in sample.prompt]
    return {"input": prompt, "tools": [], **(params if isinstance(params, dict) else {})}


def tools_of(params: Json) -> list[ToolSchema]:
    """The functions among a row's tools, in the format of chats."""
    tools = params.get("tools")
    functions = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return [
        ToolSchema(
            function=FunctionSchema.model_validate(
                {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
            )
        )
        for tool in functions
        if tool.get("type") == "function"
    ]


def response_of(episode_id: str, params: Json, turns: Sequence[Turn]) -> Json:
    """Turns of the model, as one response in the format of OpenAI's Responses."""
    output: list[JsonValue] = [
        item
        for turn in turns
        for place, message in enumerate(turn.messages)
        for item in _items(f"{turn.index}_{place}", message)
    ]
    return {
        "id": f"resp_{episode_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": "policy",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": params["tools"],
    }


def _items(place: str, message: Message) -> list[Json]:
    if message.role == "tool":
        observation: Json = {
            "type": "function_call_output",
            "id": f"fco_{place}",
            "call_id": message.tool_call_id or place,
            "output": message.content,
            "status": "completed",
        }
        return [observation]
    part: Json = {"type": "output_text", "text": message.content, "annotations": []}
    said: Json = {
        "type": "message",
        "id": f"msg_{place}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    calls: list[Json] = [
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "name": call.function.name,
            "arguments": call.function.arguments,
            "status": "completed",
        }
        for call in message.tool_calls or []
    ]
    return [*([said] if message.content or not calls else []), *calls]
