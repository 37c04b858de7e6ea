"""Protocols of other projects' environments, with the fields used here.

`Env...`: OpenEnv's `/schema`, and its answers over `/ws` (openenv 0.10, env_server/types.py). `Gym...`: `/verify` of
NeMo-Gym's resources servers (base_resources_server.py), which ignore fields that they do not know.
"""

from typing import Literal

from pydantic import Field, JsonValue

from trackway.wire.agent import RewardModel
from trackway.wire.base import Finite, WireReply


class EnvSchema(WireReply):
    """The JSON schema of an environment's actions."""

    action: dict[str, JsonValue]


class EnvMessage(WireReply):
    """One message from an environment."""

    type: Literal["observation", "state", "error", "mcp"]
    data: dict[str, JsonValue]


class EnvObservation(WireReply):
    """The answer to `reset` and `step`."""

    observation: dict[str, JsonValue]
    reward: Finite | None = None
    """Reward of this step. null counts as 0."""
    done: bool = False


class EnvFailure(WireReply):
    """Why a request was refused, or failed."""

    message: str = ""
    code: str = ""


class EnvTool(WireReply):
    """A tool of an environment that offers MCP's tools."""

    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue] = Field(alias="inputSchema")


class GymResponse(WireReply):
    """Items of OpenAI's Responses that the agent made."""

    output: list[dict[str, JsonValue]]


class GymVerify(WireReply):
    """A request of `/verify` for a row that also has verl's columns."""

    data_source: str = Field(max_length=1024)
    reward_model: RewardModel
    extra_info: dict[str, JsonValue] = Field(default_factory=dict)
    response: GymResponse


class GymReward(WireReply):
    """The answer of `/verify`, in addition to the request's fields."""

    reward: Finite
    reward_components: dict[str, Finite] = Field(default_factory=dict)
