"""The reward model of the session's deployment."""

from pathlib import Path
from typing import Any

from tests.services.rollout.tiny_classifier import write_classifier
from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.config import serve_config
from trackway.deploy.config.services_for_run import services_for
from trackway.reward.models import REWARD_MODEL
from trackway.run_config import compose

CLASSIFIED = "e2e/classified"
"""The data source that the reward model scores."""


def with_reward_model(folder: Path) -> dict[str, Any]:
    """The Serve config of a run with a classifier as its reward model, beside the built-in scorer."""
    words = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={write_classifier(folder)}"]
    services = services_for(compose(words), 0, serve_config.load(CPU_CONFIG))
    assert services.missing == []
    scorer = {"name": "classified", "data_sources": [CLASSIFIED], "weights": {REWARD_MODEL: 1.0}}
    return serve_config.with_options(services.serve_config, "reward", {"weighted_scorers": [scorer]})
