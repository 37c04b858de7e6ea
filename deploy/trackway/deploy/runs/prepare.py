"""From a command line to a run and its services: `prepare` reads, decides and starts nothing.

In a folder with `trackway.yaml`, a project, that file is the configuration. `--config` names another file. Its relative
paths are relative to the file, and its folder is on the Python path of the services that import `trackway.modules`,
unless the configuration sets `trackway.code_path`. A path given on the command line is relative to the working folder.
"""

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from trackway.deploy.checks.run import Subject
from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import SERVERS
from trackway.deploy.config.services_for_run import gpus_here, not_scoring, services_for
from trackway.deploy.deployment.record import Deployment, recorded
from trackway.deploy.local.settings import UpSettings
from trackway.reward.models import REWARD_MODEL
from trackway.run_config import RunConfig, UnsupportedKey, compose
from trackway.run_config.compose import CHANGEABLE, RECORDED, changed, given, leaves
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import RunInfo, RunState

PROJECT = "trackway.yaml"
_DEFAULT = "default"
_MODEL = "actor_rollout_ref.model.path"
_MODELS = (_MODEL, "actor_rollout_ref.model.lora_adapter_path", "reward.reward_model.model_path")
_PATHS = (
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "trainer.resume_from_path",
    "trainer.default_local_dir",
    "trainer.default_hdfs_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "global_profiler.save_path",
    "custom_reward_function.path",
    "trackway.code_path",
    "trackway.functions_file",
)
"""Keys of one path each, besides the models'."""
_TRAIN_FILES, _VAL_FILES = "data.train_files", "data.val_files"
_ONE_ROW = {_TRAIN_FILES: [], _VAL_FILES: [], "trainer.n_gpus_per_node": None, "trainer.nnodes": None}
"""Values for a trial, which reads its rows here and needs one engine."""
_PORTS = ("port", "dashboard_port", "ray_port", "mlflow_port")
SERVER_START_S = 1200.0
"""Longest start of the services when each rollout replica starts a server that compiles and loads a model."""


def prepare(
    overrides: Sequence[str],
    config: Path | None,
    config_name: str,
    settings: UpSettings,
    *,
    unsupported: list[UnsupportedKey] | None = None,
    resume: str | None = None,
    trial: bool = False,
) -> Subject:
    """Return the run of a command line with its services, which run in the outputs folder or are to be started.

    resume: the run with its own settings, and these overrides of CHANGEABLE keys. unsupported: as in `compose`. trial:
    rows are read on this machine, wherever the services are.

    Raises:
        UserError: there is no such run or file, or services elsewhere would be given a path of this machine.
        TrackwayError: the configuration is not valid.
    """
    outputs, running = settings.outputs.resolve(), recorded(settings.outputs)
    if resume is None:
        run_config = configured(overrides, config, config_name, running, unsupported, trial)
    elif RunFolder(outputs / resume).is_evaluation:
        raise UserError(
            f"--resume: expected a training run, got the evaluation {resume!r}, which trains nothing; continue it with "
            f"`trackway evaluate --resume {resume}`, or start a run with `trackway train`"
        )
    elif RunFolder(outputs / resume).exists:
        run_config = changed(RunFolder(outputs / resume).config(), given(overrides))
    else:
        raise UserError(f"--resume: expected a run in {settings.outputs}, got {resume}; `trackway train` starts one")
    services = None
    if running is None:
        services = services_for(run_config, gpus_here(), serve_config.load(settings.config))
        free: dict[str, object] = {name: 0 for name in _PORTS if name not in settings.model_fields_set}
        if services.engine in SERVERS:
            free["start_timeout_s"] = max(settings.start_timeout_s, SERVER_START_S)
        settings, run_config = settings.model_copy(update=free), services.config
    values = leaves(run_config.model_dump(mode="json"))
    changes = {key: values[key] for key in typed(overrides) & {*CHANGEABLE}}
    subject = Subject(run_config, services, running, settings, unsupported=unsupported or (), changes=changes)
    folder = RunFolder(outputs / run_config.trainer.experiment_name)
    if (running is None or not running.attached) and folder.exists:
        if resume is not None or goes_on(folder.info(), subject):
            subject.resumes = f"run {folder.name}{'' if resume else _kept(folder, run_config, changes)}"
        else:
            subject.occupied = _occupied(folder.info(), subject)
    return subject


def goes_on(info: RunInfo, subject: Subject) -> bool:
    """Return whether the subject continues the run of its name: the run is unfinished, or gets more steps."""
    steps = subject.changes.get("trainer.total_training_steps")
    ended = info.state is RunState.FINISHED and not (isinstance(steps, int) and steps > info.step)
    return subject.config.trainer.resume_mode == "auto" and not ended


def _occupied(info: RunInfo, subject: Subject) -> str:
    ended = info.state is RunState.FINISHED
    resume = (
        "a larger trainer.total_training_steps to extend it" if ended else "set trainer.resume_mode=auto to resume it"
    )
    return (
        f"run {info.run!r} is {info.state} in {subject.settings.outputs}; give another trainer.experiment_name or "
        f"--outputs, or {resume}"
    )


def _kept(folder: RunFolder, config: RunConfig, changes: Collection[str]) -> str:
    """The settings that the run keeps although `config` has others, in words."""
    own, now = (leaves(settings.model_dump(mode="json")) for settings in (folder.config(), config))
    taken = {*RECORDED, *changes, "trainer.resume_mode"}
    kept = [f"{key}={own.get(key)}" for key in {**own, **now} if own.get(key) != now.get(key) and key not in taken]
    return f" with its original {', '.join(kept)}" if kept else ""


def project_file(config: Path | None, config_name: str = _DEFAULT) -> Path | None:
    """The project's file that a command takes: the named one, or the working folder's `trackway.yaml`."""
    if config is not None:
        return None if config.is_dir() else config
    return Path(PROJECT) if config_name == _DEFAULT and Path(PROJECT).is_file() else None


def configured(
    overrides: Sequence[str],
    config: Path | None,
    config_name: str,
    deployment: Deployment | None = None,
    unsupported: list[UnsupportedKey] | None = None,
    trial: bool = False,
) -> RunConfig:
    """The configuration of a command line, with paths as the machines of the services see them.

    Without `actor_rollout_ref.model.path`, it is the model that the services of this machine serve, or would serve.
    For the other parameters and the errors, see `prepare`.
    """
    if config is not None and not config.exists():
        raise UserError(f"--config: expected a folder or a YAML file, got {config}; correct the path")
    file = project_file(config, config_name)
    composed = compose([*overrides], file or config, config_name, unsupported)
    folder = Path.cwd() if file is None else file.absolute().parent
    attached = deployment is not None and deployment.attached
    if file is not None and composed.trackway.code_path is None and not attached:
        composed = composed.with_values({"trackway.code_path": str(folder)})
    own = typed(overrides)
    if not trial:
        return placed(composed, deployment, folder, own)
    here = localised(composed, folder, own).data
    rows = {_TRAIN_FILES: [*here.train_files]} | ({_VAL_FILES: [*here.val_files]} if _VAL_FILES in own else {})
    return placed(composed.with_values(_ONE_ROW), deployment, folder, own).with_values(rows)


def typed(overrides: Sequence[str]) -> set[str]:
    """The keys of a command line."""
    return {word.lstrip("+~").partition("=")[0] for word in overrides}


def placed(
    config: RunConfig, deployment: Deployment | None, folder: Path | None = None, from_here: Collection[str] = ()
) -> RunConfig:
    """Return the configuration with paths as the services' machines see them. For the parameters, see `localised`."""
    if deployment and deployment.attached:
        return _with_paths(config, _path_there, _model_there)
    if not config.actor_rollout_ref.model.path:
        served = deployment and serve_config.args_of(deployment.serve_config, "rollout").get("model_path")
        config = config.with_values({_MODEL: served or str(UpSettings.read().model_path)})
    return localised(config, folder, from_here)


def localised(config: RunConfig, folder: Path | None = None, from_here: Collection[str] = ()) -> RunConfig:
    """The configuration with absolute local paths, because services and learner have other working directories.

    Relative paths are relative to `folder`, by default the working folder, except the paths of the keys `from_here`.
    """

    def whole(key: str, path: str) -> str:
        base = Path.cwd() if folder is None or key in from_here else folder
        return path if "://" in path else str(base.absolute() / Path(path).expanduser())

    def model(key: str, path: str) -> str:  # any other name is a Hub id
        return whole(key, path) if "://" not in path and Path(whole(key, path)).is_dir() else path

    return _with_paths(config, whole, model)


def _with_paths(config: RunConfig, path: Callable[[str, str], str], model: Callable[[str, str], str]) -> RunConfig:
    """The configuration with `path(key, value)` applied to every path and `model(key, value)` to a model's path."""
    changed: dict[str, object] = {
        key: [path(key, file) for file in attrgetter(key)(config)] for key in (_TRAIN_FILES, _VAL_FILES)
    }
    changed |= {key: path(key, value) for key in _PATHS if (value := attrgetter(key)(config))}
    changed |= {key: model(key, value) for key in _MODELS if (value := attrgetter(key)(config))}
    return config.with_values(changed)


def _path_there(key: str, path: str) -> str:
    if "://" in path or path.startswith("/"):
        return path
    raise UserError(
        f"{key}: expected an absolute path on the services' volume or a URL, got {path}; the services run elsewhere: "
        "copy the file to their volume and give its path there"
    )


def _model_there(key: str, path: str) -> str:
    here = path.startswith((".", "~")) or Path(path).is_dir()
    return _path_there(key, path) if here else path


def to_start(subject: Subject) -> tuple[UpSettings, dict[str, Any]]:
    """The settings and the Serve config that start the subject's services, with their models on this machine.

    Raises UserError for what this machine lacks.
    """
    assert subject.services is not None
    if problems := [*subject.services.missing, *subject.services.not_found]:
        raise UserError("; ".join(problems))
    config = with_models(subject.services.serve_config)
    return subject.settings.model_copy(update={"model_path": model_of(subject.config)}), config


def model_of(config: RunConfig) -> Path:
    """The model's folder. A Hub id is downloaded here once, before the services need it."""
    return _folder_of(_MODEL, str(config.actor_rollout_ref.model.path))


def with_models(config: dict[str, Any]) -> dict[str, Any]:
    """Return the Serve config with the folder of the reward model, if it has one. A Hub id is downloaded here once.

    Raises UserError for a generative model that no function asks.
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
    from trackway.learner.policy import model_folder  # imports transformers' models, which takes seconds

    try:
        return model_folder(path)
    except Exception as error:  # the Hub's client raises many types, including httpx's
        raise UserError(
            f"{key}: expected a model's folder or an id on the Hugging Face Hub, got {path}: {error}"
        ) from error
