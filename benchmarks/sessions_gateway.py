"""The gateway of `sessions.py`: the agent service as at a replica's own port, which sets the garbage collector."""

from fastapi import FastAPI

from trackway.agent.app import create_app as create_agent
from trackway.deploy.serve.direct_port import freeze_garbage_collector


def create_app() -> FastAPI:
    """The agent service, its settings from the environment."""
    app = create_agent()
    freeze_garbage_collector()
    return app
