"""NeMo-Gym's API of a resources server: its agents call our tools, and `/verify` asks the reward service.

A session is a cookie. Its row, which comes with `/seed_session` and again with `/verify`, has verl's columns beside
NeMo-Gym's: `data_source`, `reward_model` and `extra_info`, whose `tools_kwargs` create the tools' state.
"""

import uuid
from collections import OrderedDict
from dataclasses import dataclass, field

from pydantic import JsonValue

from trackway.clients import RewardClient
from trackway.tools.core.server import SessionInstances, SessionKey, ToolServer, kwargs_of
from trackway.wire.agent import GymVerify
from trackway.wire.reward import ScoreRequest
from trackway.wire.tools import ExecuteRequest
from trackway.wire.trajectory import Reward, ToolCallRecord

Json = dict[str, JsonValue]

COOKIE = "trackway-nemo-gym-session"
_MAX_SESSIONS = 16_384
"""Sessions that were seeded and not verified. The oldest is forgotten for one more."""


@dataclass
class _Session:
    extra_info: Json
    calls: list[ToolCallRecord] = field(default_factory=list[ToolCallRecord])


class NemoGymFace:
    """Serves the three routes."""

    def __init__(self, server: ToolServer, reward: RewardClient) -> None:
        self._server = server
        self._reward = reward
        self._seeded: OrderedDict[SessionKey, _Session] = OrderedDict()
        self.sessions = SessionInstances(server)

    def seed(self, caller: str, row: Json) -> str:
        """A new session for this row. Returns its cookie."""
        cookie = uuid.uuid4().hex
        extra_info = row.get("extra_info")
        self._seeded[caller, cookie] = _Session(extra_info if isinstance(extra_info, dict) else {})
        while len(self._seeded) > _MAX_SESSIONS:
            self._seeded.popitem(last=False)
        return cookie

    async def call(self, key: SessionKey, tool: str, arguments: Json) -> str:
        """The text of one call."""
        session = self._seeded.setdefault(key, _Session({}))
        request = ExecuteRequest(
            arguments=arguments, execute_kwargs=kwargs_of(session.extra_info, tool, "execute_kwargs")
        )
        create_kwargs = kwargs_of(session.extra_info, tool, "create_kwargs")
        _, result = await self.sessions.execute(key, tool, request, create_kwargs)
        place = f"call_{len(session.calls)}"
        session.calls.append(
            ToolCallRecord(tool=tool, tool_call_id=place, reward=result.reward, metrics=result.metrics)
        )
        return result.text

    async def verify(self, key: SessionKey, row: GymVerify) -> Reward:
        """The reward service's score of what the model wrote. The session ends."""
        session = self._seeded.pop(key, _Session({}))
        try:
            rewards: Json = {**await self.sessions.rewards(key)}
        finally:
            await self.sessions.end(key)
        texts: list[JsonValue] = [_text(item) for item in row.response.output if item.get("type") == "message"]
        calls: list[JsonValue] = [call.model_dump(mode="json") for call in session.calls]
        facts: Json = {
            "tool_rewards": [call.reward for call in session.calls],
            "tool_calls": calls,
            "tool_calc_rewards": rewards,
        }
        request = ScoreRequest(
            data_source=row.data_source,
            solution_str="".join(map(str, texts)),
            ground_truth=row.reward_model.ground_truth,
            extra_info={**row.extra_info, **facts},
        )
        return await self._reward.score(request)


def _text(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
