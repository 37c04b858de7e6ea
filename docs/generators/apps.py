"""The five services as apps that are made but never started, to be asked for their routes and metrics."""

from functools import cache

from fastapi import FastAPI

from trackway.agent.app import create_app as create_agent
from trackway.agent.settings import AgentSettings
from trackway.deploy.bundled import TINY_MODEL
from trackway.reward.app import create_app as create_reward
from trackway.reward.settings import RewardSettings
from trackway.rollout.app import create_app as create_rollout
from trackway.rollout.settings import RolloutSettings
from trackway.tools.app import create_app as create_tools
from trackway.tools.settings import ToolsSettings
from trackway.tracing import TracingSettings
from trackway.trainer.app import create_app as create_trainer
from trackway.trainer.settings import TrainerSettings

MODEL = TINY_MODEL


@cache
def service_apps() -> dict[str, FastAPI]:
    """App by service, with an OTLP receiver so that the metrics of its export are there."""
    tracing = TracingSettings(otlp_endpoint="http://127.0.0.1:4318/v1/traces")
    return {
        "agent": create_agent(AgentSettings(model_path=str(MODEL), tracing=tracing)),
        "rollout": create_rollout(RolloutSettings(model_path=MODEL, device="cpu", tracing=tracing)),
        "tools": create_tools(ToolsSettings(tracing=tracing)),
        "reward": create_reward(RewardSettings(tracing=tracing)),
        "trainer": create_trainer(TrainerSettings(tracing=tracing)),
    }
