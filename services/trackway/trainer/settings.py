"""Settings of the trainer service: where runs live, how long a learner may take to stop, whether runs go on alone."""

import os

from pydantic import BaseModel, Field, SecretStr

from trackway.clients.token import TOKEN
from trackway.serving import ServiceSettings
from trackway.serving.environment_check import REMEDY, difference, installation
from trackway.tracing import TracingSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import Installation


class ServiceUrls(BaseModel):
    """What a run's own process is told about the services around it; `services.json` in the run's folder."""

    agent_url: str
    """Agent service."""
    tools_url: str
    """Tool server, asked for the tools' schemas when overlong prompts are filtered."""
    weights_url: str
    """Weight store that the rollout replicas pull from."""
    rollout_url: str | None = None
    """Rollout service, asked for what became of its spans."""
    reward_url: str | None = None
    """Reward service, asked likewise."""

    @property
    def traced(self) -> dict[str, str]:
        """URLs of the services that make spans, by name."""
        urls = {
            "agent": self.agent_url,
            "rollout": self.rollout_url,
            "tools": self.tools_url,
            "reward": self.reward_url,
        }
        return {name: url for name, url in urls.items() if url is not None}


class TrainerSettings(ServiceSettings):
    """Settings of the trainer service."""

    outputs_dir: str = "outputs"
    """Folder of the runs, one subfolder for each."""
    weights_url: str = "outputs/weights"
    """fsspec URL of the weight store, shared with the rollout replicas."""
    stop_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds that a learner may take to finish its step and save before it is killed."""
    resume_interrupted: bool = False
    """Resume interrupted runs (their service or machine was lost) from the last checkpoint once the services are ready,
    at most `trackway.max_restarts` times; meant for trainers on Kubernetes."""

    def service_urls(self) -> ServiceUrls:
        """What is handed to a run's process."""
        return ServiceUrls(
            agent_url=self.url("agent"),
            tools_url=self.url("tools"),
            weights_url=self.weights_url,
            rollout_url=self.url("rollout"),
            reward_url=self.url("reward"),
        )


_TRACING = "TRACKWAY_WORKER_TRACING"
_INSTALLATION = "TRACKWAY_WORKER_INSTALLATION"


def handed_over(tracing: TracingSettings, token: SecretStr | None = None) -> dict[str, str]:
    """Environment variables that give a run's own process this tracing, the token for the services, and what it must
    run on, which is what this process does.

    Secrets go this way and no other.
    """
    key = tracing.weave_api_key
    plain = tracing.model_dump_json(exclude={"weave_api_key"})
    secrets = {"WANDB_API_KEY": key, TOKEN: token}
    ours = {_TRACING: plain, _INSTALLATION: installation().model_dump_json()}
    return {**ours, **{name: secret.get_secret_value() if secret else "" for name, secret in secrets.items()}}


def taken_over() -> TracingSettings:
    """The tracing that the service handed over; without one what the environment says."""
    return TracingSettings.model_validate_json(os.environ.get(_TRACING, "{}"))


def check_installation() -> None:
    """Raise TrackwayError when this process runs on other packages than the service that started it."""
    wanted = os.environ.get(_INSTALLATION)
    different = difference(Installation.model_validate_json(wanted), installation()) if wanted else ""
    if different:
        message = f"the learner runs on another installation than the trainer service: {different}; {REMEDY}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
