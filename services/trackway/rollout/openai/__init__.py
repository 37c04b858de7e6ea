"""The OpenAI-compatible API of the rollout service; every generation goes through `RolloutService`."""

from trackway.rollout.openai.routes import openai_routes

__all__ = ["openai_routes"]
