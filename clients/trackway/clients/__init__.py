"""Async HTTP clients of the five services, over one shared httpx client per process."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trackway.clients.agent import AgentClient
    from trackway.clients.base import CallPolicy, Deadline, ServiceClient
    from trackway.clients.http_client import close_shared_http, run, shared_http
    from trackway.clients.reward import RewardClient
    from trackway.clients.rollout import RolloutClient
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

_MODULES = {
    "AgentClient": "agent",
    "RewardClient": "reward",
    "RolloutClient": "rollout",
    "ToolsClient": "tools",
    "TrainerClient": "trainer",
    "close_shared_http": "http_client",
    "run": "http_client",
    "shared_http": "http_client",
}
"""Modules imported at first use: a program needs few of the clients, each with the models of its service's routes."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'base')}"), name)
