"""The services of an agent loop: four clients, the tokenizer, the tool catalog."""

from dataclasses import dataclass

import httpx

from trackway.agent.catalog import ToolCatalog
from trackway.agent.sessions.store import Sessions
from trackway.agent.settings import AgentSettings
from trackway.agent.tokens import ChatTokens
from trackway.clients import RewardClient, RolloutClient, ToolsClient, TrainerClient


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
    tokens: ChatTokens
    sessions: Sessions

    @classmethod
    def connect(cls, settings: AgentSettings, http: httpx.AsyncClient | None = None) -> "AgentContext":
        """Load the tokenizer and create the clients; sends no request."""
        direct = settings.direct and http is None
        batches = http is None  # httpx's transport in one process holds a stream back until it has ended
        tools = ToolsClient(settings.url("tools"), http, settings.tools_policy, settings.token, direct)
        return cls(
            settings=settings,
            rollout=RolloutClient(
                settings.url("rollout"), http, settings.rollout_policy, settings.token, direct, batches
            ),
            tools=tools,
            reward=RewardClient(settings.url("reward"), http, settings.reward_policy, settings.token, direct, batches),
            trainer=TrainerClient(settings.url("trainer"), http, settings.trainer_policy, settings.token),
            catalog=ToolCatalog(tools, settings.tools_refresh_s),
            tokens=ChatTokens.load(settings.model_path, settings.chat_template_kwargs, settings.tool_parser),
            sessions=Sessions(settings),
        )
