"""The services of an agent loop: four clients, the tokenizer, the tool catalog."""

from dataclasses import dataclass

import httpx

from trackway.agent.models import ChatModel, Teachers
from trackway.agent.sessions.store import Sessions
from trackway.agent.settings import AgentSettings
from trackway.agent.toolbox import ToolCatalog
from trackway.chat.tokens import ChatTokens
from trackway.clients import RewardClient, RolloutClient, ToolsClient, TrainerClient
from trackway.clients.direct import TrajectoryRouting
from trackway.clients.in_flight import RolloutLimiter
from trackway.wire.errors import ErrorCode, TrackwayError


@dataclass(frozen=True)
class AgentContext:
    """Shared by all trajectories of the process."""

    settings: AgentSettings
    rollout: RolloutClient
    tools: ToolsClient
    reward: RewardClient
    trainer: TrainerClient
    """Gets the sessions that a run trains on."""
    catalog: ToolCatalog
    chat_tokens: ChatTokens | None
    sessions: Sessions
    teachers: Teachers
    limiter: RolloutLimiter | None = None
    """Limits the trajectories by the engines' KV caches."""
    chat: ChatModel | None = None
    """Model that speaks messages and answers instead of the rollout service."""

    @property
    def tokens(self) -> ChatTokens:
        """The tokenizer. Raises TrackwayError(INVALID_REQUEST) for a model that speaks messages."""
        if self.chat_tokens is None:
            assert self.chat is not None
            message = (
                f"expected single_turn_agent, tool_agent or an environment for a model that speaks messages "
                f"({self.chat.base_url}), got an agent or a limit that needs token ids; evaluate a model's folder"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        return self.chat_tokens

    @classmethod
    def connect(cls, settings: AgentSettings, http: httpx.AsyncClient | None = None) -> "AgentContext":
        """Load the tokenizer and create the clients. Sends no request."""
        direct = settings.direct and http is None
        batches = http is None  # httpx's transport in one process holds a stream back until it has ended
        tools = ToolsClient(settings.url("tools"), http, settings.tools_policy, settings.token, direct)
        rollout = RolloutClient(settings.url("rollout"), http, settings.rollout_policy, settings.token, direct, batches)
        if settings.rollout_routing == "trajectory":
            rollout.routing = TrajectoryRouting()
        return cls(
            settings=settings,
            rollout=rollout,
            tools=tools,
            reward=RewardClient(settings.url("reward"), http, settings.reward_policy, settings.token, direct, batches),
            trainer=TrainerClient(settings.url("trainer"), http, settings.trainer_policy, settings.token),
            catalog=ToolCatalog(tools),
            chat_tokens=None
            if settings.chat_model
            else ChatTokens.load(settings.model_path, settings.chat_template_kwargs, settings.tool_parser),
            chat=settings.chat_model and ChatModel(settings.chat_model, settings.rollout_policy),
            sessions=Sessions(settings),
            limiter=_limiter(settings),
            teachers=Teachers(settings, rollout, http),
        )


def _limiter(settings: AgentSettings) -> RolloutLimiter | None:
    least = settings.min_concurrent_trajectories
    return None if least is None else RolloutLimiter(least, settings.max_concurrent_trajectories)
