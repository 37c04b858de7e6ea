"""Async HTTP clients of the five services, over one shared httpx client per process."""

from trackway.clients.agent import AgentClient
from trackway.clients.base import CallPolicy, Deadline, ServiceClient
from trackway.clients.reward import RewardClient
from trackway.clients.rollout import RolloutClient
from trackway.clients.shared_http import close_shared_http, run, shared_http
from trackway.clients.tools import ToolsClient
from trackway.clients.trainer import TrainerClient

__all__ = [
    "AgentClient",
    "CallPolicy",
    "Deadline",
    "RewardClient",
    "RolloutClient",
    "ServiceClient",
    "ToolsClient",
    "TrainerClient",
    "close_shared_http",
    "run",
    "shared_http",
]
