"""A run together with its services: those already running for its outputs folder, or its own for the run's duration.

run = prepare(overrides, config_path, config_name, outputs)
run.check(load=True, report).findings.refuse()
deployment = run.bring_up(report)
info = run.train(deployment, show)
run.take_down(deployment, report)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trackway.deploy.checks.run import Checked, Subject, check_run
from trackway.deploy.config import serve_config
from trackway.deploy.config.engine_python import SERVERS
from trackway.deploy.config.services_for_run import (
    Decision,
    RunServices,
    decided_already,
    gpus_here,
    not_scoring,
    services_for,
)
from trackway.deploy.deployment.installation_check import check_interpreters
from trackway.deploy.deployment.progress import Report
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.running import find_running
from trackway.deploy.local import up
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import launch, project
from trackway.reward.reward_model import REWARD_MODEL
from trackway.system.user_error import UserError
from trackway.trainer.config import RunConfig, UnsupportedKey, compose
from trackway.trainer.config.changes import CHANGEABLE, RECORDED, changed, changes_between
from trackway.trainer.config.compose import given, leaves
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import RunInfo, RunState

_PORTS = ("port", "dashboard_port", "ray_port", "mlflow_port")
SERVER_START_S = 1200.0
"""Longest start of the services when each rollout replica starts a server that compiles and loads a model."""


@dataclass(frozen=True)
class StandaloneRun:
    """A run's configuration and its services."""

    config: RunConfig
    settings: UpSettings
    running: Deployment | None
    services: RunServices | None
    """Services to start; None when they are already running."""
    unsupported: tuple[UnsupportedKey, ...] = ()
    """Keys that the configuration leaves out, as Trackway does not have what they ask for."""

    @property
    def decisions(self) -> list[Decision]:
        """How the keys that describe the deployment were applied."""
        if self.services is not None:
            return self.services.decisions
        return decided_already(self.config)

    @property
    def subject(self) -> Subject:
        """The subject of the checks before a start."""
        return Subject(
            self.config, self.services, self.running, self._start_settings, self._occupied(), self.unsupported
        )

    def check(self, load: bool, report: Report = lambda name, state: None) -> Checked:
        """The findings and the plan of the run; `load` as in `check_run`."""
        return check_run(self.subject, load, report)

    def _occupied(self) -> str:
        """The reason why the run's name is not available; empty when it is."""
        folder = self._folder
        if not folder.exists or self.left_off() is not None:
            return ""
        state = folder.info().state
        resume = ", or set trainer.resume_mode=auto to resume it"
        if state is RunState.FINISHED:
            resume = ", or a larger trainer.total_training_steps to extend it"
        name = "give another trainer.experiment_name or --outputs"
        return f"run {folder.name!r} is {state} in {self.settings.outputs}; {name}{resume}"

    def bring_up(self, report: Report) -> Deployment:
        """Start the services unless they are running; returns once they are ready."""
        if self.services is None:
            assert self.running is not None
            check_interpreters(self.running)
            return self.running
        settings = self._start_settings.model_copy(update={"model_path": model_of(self.config)})
        return up.bring_up(settings, report, with_models(self.services.serve_config))

    @property
    def _start_settings(self) -> UpSettings:
        """The settings with free ports unless set explicitly, and more time for servers that load a model."""
        changes: dict[str, object] = {name: 0 for name in _PORTS if name not in self.settings.model_fields_set}
        if self.services is not None and self.services.engine in SERVERS:
            changes["start_timeout_s"] = max(self.settings.start_timeout_s, SERVER_START_S)
        return self.settings.model_copy(update=changes)

    def left_off(self) -> RunFolder | None:
        """The folder of the run to resume; None to start a new run."""
        folder = self._folder
        if not folder.exists or self.config.trainer.resume_mode != "auto":
            return None
        steps, info = self.config.trainer.total_training_steps, folder.info()
        has_ended = info.state is RunState.FINISHED and (steps is None or steps <= info.step)
        return None if has_ended else folder

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.settings.outputs.resolve() / self.config.trainer.experiment_name)

    def train(self, deployment: Deployment, show: launch.Show, skip_damaged: bool = False) -> RunInfo:
        """Start the run, or resume a stopped or failed one, and follow it until it ends.

        skip_damaged: resume from the last intact checkpoint.
        """
        folder = self.left_off()
        if folder is None:
            info = launch.start_run(deployment, self.config)
        else:
            changes = changes_between(folder.config(), self.config)
            info = launch.resume_run(deployment, folder.name, show, skip_damaged, changes)
        return launch.follow(deployment, info.run, show)

    def take_down(self, deployment: Deployment, report: Report) -> None:
        """Stop what `bring_up` started."""
        if self.running is None:
            up.take_down(deployment, report)


def resumes_with(folder: RunFolder, config: RunConfig) -> str:
    """Differences between a run's own settings and `config`, in words: those it keeps, and those it takes."""
    began, changes = leaves(folder.config().model_dump(mode="json")), changes_between(folder.config(), config)
    kept = ", ".join(changed_since(folder, config))
    taken = ", ".join(f"{key}={value} instead of {began[key]}" for key, value in changes.items())
    return ", and".join([*([f" with its original {kept}"] if kept else []), *([f" with {taken}"] if taken else [])])


def changed_since(folder: RunFolder, config: RunConfig) -> list[str]:
    """`key=value` for each original setting of a run that differs from `config`, and that it keeps when resumed."""
    began, now = (leaves(settings.model_dump(mode="json")) for settings in (folder.config(), config))
    taken = {*RECORDED, *CHANGEABLE, "trainer.resume_mode"}
    changed = [key for key in {**began, **now} if began.get(key) != now.get(key) and key not in taken]
    return [f"{key}={began.get(key)}" for key in changed]


def configured(
    overrides: list[str],
    config_path: Path | None,
    config_name: str,
    unsupported: list[UnsupportedKey] | None = None,
) -> RunConfig:
    """The configuration of a command line, with absolute paths; `unsupported` as in `compose`."""
    if config_path is not None and not config_path.exists():
        raise UserError(f"--config-path: expected a folder or a YAML file, got {config_path}; correct the path")
    if project.project_file(config_path, config_name) is not None:
        return project.configured(overrides, config_path, config_name, unsupported=unsupported)
    return launch.localised(compose(overrides, config_path, config_name, unsupported))


def prepare(
    overrides: list[str],
    config_path: Path | None,
    config_name: str,
    outputs: Path,
    *,
    plan_only: bool = False,
    resume: str | None = None,
) -> StandaloneRun:
    """The run of a command line; starts nothing. Raises TrackwayError and UserError for an invalid command line.

    plan_only: collect the keys that ask for what Trackway does not have; otherwise they are errors.
    resume: the name of a run to resume with its own settings and the changes of the command line.
    """
    unsupported: list[UnsupportedKey] = []
    if resume is None:
        config = configured(overrides, config_path, config_name, unsupported if plan_only else None)
    else:
        own = RunFolder(outputs.resolve() / resume).config()
        config = changed(own, given(overrides)).with_values({"trainer.resume_mode": "auto"})
    settings = UpSettings.read(outputs=outputs)
    running = find_running(outputs)
    if running and running.attached:
        raise UserError(
            f"{outputs} is attached to services at {running.address}, but this command uses local services; use "
            "`trackway train` for attached ones, or give another --outputs"
        )
    services = None if running else services_for(config, gpus_here(), serve_config.load(settings.config))
    return StandaloneRun(services.config if services else config, settings, running, services, tuple(unsupported))


def services_of_project(settings: UpSettings) -> tuple[UpSettings, dict[str, Any] | None]:
    """The settings and the Serve config that start the services for the project of the working folder.

    Outside of a project the settings are returned unchanged, with None. Raises UserError for what this machine lacks.
    """
    file = project.project_file(None)
    if file is None:
        return settings, None
    services = services_here(project.configured([], None, "default"), settings)
    given = "model_path" in settings.model_fields_set
    model = {} if given else {"model_path": model_of(services.config)}
    return settings.model_copy(update=model), services.serve_config


def services_here(config: RunConfig, settings: UpSettings) -> RunServices:
    """The services that this machine would start for a configuration; raises UserError for what it lacks."""
    services = services_for(config, gpus_here(), serve_config.load(settings.config))
    if services.missing:
        raise UserError("; ".join(services.missing))
    services.serve_config = with_models(services.serve_config)
    return services


def model_of(config: RunConfig) -> Path:
    """The model's folder. A Hub id is downloaded here once, before the services need it."""
    return _folder_of("actor_rollout_ref.model.path", str(config.actor_rollout_ref.model.path))


def with_models(config: dict[str, Any]) -> dict[str, Any]:
    """The Serve config with the folder of the reward model, if there is one; a Hub id is downloaded here once.

    UserError for a generative model that no function asks.
    """
    path = serve_config.args_of(config, REWARD_MODEL).get("model_path")
    if path is None:
        return config
    folder = _folder_of("reward.reward_model.model_path", path)
    asked = serve_config.args_of(config, "reward").get("custom_reward_function") is not None
    if problem := "" if asked else not_scoring(folder):
        raise UserError(problem)
    return serve_config.with_options(config, REWARD_MODEL, {"model_path": str(folder)})


def _folder_of(key: str, path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from trackway.trainer.learner.policy import model_folder  # imports transformers' models, which takes seconds

    try:
        return model_folder(path)
    except Exception as error:  # the Hub's client raises many types, including httpx's
        raise UserError(
            f"{key}: expected a model's folder or an id on the Hugging Face Hub, got {path}: {error}"
        ) from error
