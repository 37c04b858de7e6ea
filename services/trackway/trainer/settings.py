"""Settings of the trainer service: the runs' folder, the stop deadline, auto-resume."""

import os

from pydantic import Field, SecretStr

from trackway.clients.http_client import TOKEN
from trackway.serving import ServiceSettings
from trackway.serving.app import REMEDY, difference, installation
from trackway.system import secrets_in
from trackway.tracing import TracingSettings
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Installation


class TrainerSettings(ServiceSettings):
    """Settings of the trainer service."""

    outputs_dir: str = "outputs"
    """Folder of the runs, with one subfolder per run."""
    weights_url: str = "outputs/weights"
    """fsspec URL of the weight store, shared with the rollout replicas."""
    stop_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds a learner may take to finish its step and save a checkpoint before it is killed."""
    max_runs: int = Field(default=2, ge=1)
    """Runs that train at once. One trains the rollout service's default policy. Each other one trains a policy of its
    own name, which takes a place there (`max_policies`) and memory here."""
    tinker_max_sessions: int = Field(default=32, ge=1)
    """Open sessions of Tinker's API, each with up to 16 models. Each that trains is a run, counted by `max_runs`."""
    tinker_idle_s: float = Field(default=300.0, gt=0)
    """Seconds without a heartbeat or a request after which a session of Tinker's API ends."""
    resume_interrupted: bool = False
    """Resume interrupted runs (their service or machine was lost) from the last checkpoint once the services are ready,
    at most `trackway.max_restarts` times; meant for trainers on Kubernetes."""
    standby: bool = False
    """Start the process of the first run with the service. It loads PyTorch, which takes seconds and 400 MB, and waits.
    `trackway demo` and `trackway train` set this for services that they start."""

    def service_urls(self) -> ServiceUrls:
        """The URLs for a run's process."""
        return ServiceUrls(
            agent_url=self.url("agent"),
            tools_url=self.url("tools"),
            weights_url=self.weights_url,
            rollout_url=self.url("rollout"),
            reward_url=self.url("reward"),
            direct=self.direct,
        )


_TRACING = "TRACKWAY_WORKER_TRACING"
_INSTALLATION = "TRACKWAY_WORKER_INSTALLATION"


def handed_over(tracing: TracingSettings, token: SecretStr | None = None) -> dict[str, str]:
    """Variables that a run's process reads from a pipe: tracing, the installation it must match, and all secrets.

    Its environment has blanks for them: any process of the same user can read it.
    """
    key = tracing.weave_api_key
    plain = tracing.model_dump_json(exclude={"weave_api_key"})
    secrets = {"WANDB_API_KEY": key, TOKEN: token}
    plain_variables = {_TRACING: plain, _INSTALLATION: installation().model_dump_json()}
    secret_variables = {name: secret.get_secret_value() if secret else "" for name, secret in secrets.items()}
    return {**secrets_in(os.environ), **plain_variables, **secret_variables}


def taken_over() -> TracingSettings:
    """The tracing settings passed by the service, or the environment's when there are none."""
    return TracingSettings.model_validate_json(os.environ.get(_TRACING, "{}"))


def check_installation() -> None:
    """Raise TrackwayError when this process has other packages installed than the service that started it."""
    expected = os.environ.get(_INSTALLATION)
    differences = difference(Installation.model_validate_json(expected), installation()) if expected else ""
    if differences:
        message = f"the learner runs on another installation than the trainer service: {differences}; {REMEDY}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
