"""Start a run on a running deployment and follow it: progress while it trains, a checkpoint on Ctrl-C."""

import asyncio
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path

from pydantic import JsonValue

from trackway.clients import TrainerClient, run
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.system.user_error import UserError
from trackway.tracing import TracingSettings
from trackway.trainer.config import RunConfig
from trackway.trainer.config.changes import RECORDED
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.traces.preflight import refuse, unusable, without_entity
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.names import checked_run_name
from trackway.wire.tracing import TraceBackend
from trackway.wire.trainer import ENDED, RunInfo, RunRequest, RunState

Show = Callable[[RunInfo], None]

_POLL_S = 0.5
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
)
"""Keys of one path each, besides the models'."""
STOP_DEADLINE_S = 180.0
"""Longest wait for a run to save its checkpoint and stop."""
OUTAGE_DEADLINE_S = 600.0
"""Longest wait for attached services that do not answer, or for one of their runs that was interrupted. Both may
recover, for example when Kubernetes moves a pod."""


def start_run(deployment: Deployment, config: RunConfig, name: str | None = None) -> RunInfo:
    """Start a run and return at once; raises TrackwayError (a run is active, the name is taken)."""
    request = RunRequest(config=config.model_dump(mode="json"), run=name)
    return run(_client(deployment).start(request))


def check_run_name(option: str, name: str | None) -> None:
    """Raise UserError for an invalid run name; None is accepted."""
    try:
        _ = name is None or checked_run_name(name)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def occupied(outputs: Path, name: str) -> str:
    """The reason why a new run cannot take the name; empty when it can."""
    if not RunFolder(outputs.resolve() / name).exists:
        return ""
    return (
        f"run {name!r} exists in {outputs}; resume it with `trackway train --resume {name}`, or give another "
        "trainer.experiment_name"
    )


def placed(
    config: RunConfig,
    deployment: Deployment | None,
    folder: Path | None = None,
    from_here: frozenset[str] = frozenset(),
) -> RunConfig:
    """The configuration with paths as the services' machines see them; `folder` and `from_here` as in `localised`.

    Without `actor_rollout_ref.model.path`, it is the model that the services of this machine serve, or would serve.

    Raises:
        UserError: the deployment is attached, and a path is local to this machine.
    """
    return (
        elsewhere(config)
        if deployment and deployment.attached
        else localised(_with_model(config, deployment), folder, from_here)
    )


def _with_model(config: RunConfig, deployment: Deployment | None) -> RunConfig:
    if config.actor_rollout_ref.model.path:
        return config
    served = deployment and serve_config.args_of(deployment.serve_config, "rollout").get("model_path")
    return config.with_values({_MODEL: served or str(UpSettings.read().model_path)})


def localised(config: RunConfig, folder: Path | None = None, from_here: frozenset[str] = frozenset()) -> RunConfig:
    """The configuration with absolute local paths, because services and learner have other working directories.

    Relative paths are relative to `folder`, by default the working folder, except those of the keys `from_here`.
    """

    def base_of(key: str) -> Path:
        return Path.cwd() if folder is None or key in from_here else folder

    return _with_paths(
        config,
        lambda key, path: _whole_path(path, base_of(key)),
        lambda key, path: _whole_model(path, base_of(key)),
    )


def elsewhere(config: RunConfig) -> RunConfig:
    """The configuration if none of its paths is local to this machine; else raises UserError with the path."""
    return _with_paths(config, _path_there, _model_there)


def _with_paths(config: RunConfig, path: Callable[[str, str], str], model: Callable[[str, str], str]) -> RunConfig:
    """The configuration with `path(key, value)` applied to every path and `model(key, value)` to a model's path."""
    changed: dict[str, object] = {
        key: [path(key, file) for file in attrgetter(key)(config)] for key in ("data.train_files", "data.val_files")
    }
    changed |= {key: path(key, value) for key in _PATHS if (value := attrgetter(key)(config))}
    changed |= {key: model(key, value) for key in _MODELS if (value := attrgetter(key)(config))}
    return config.with_values(changed)


def _whole_model(path: str, folder: Path) -> str:
    """The absolute path of a model folder; any other name is a Hub id and stays unchanged."""
    whole = _whole_path(path, folder)
    return whole if "://" not in path and Path(whole).is_dir() else path


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


def _whole_path(path: str, folder: Path) -> str:
    return path if "://" in path else str(folder.absolute() / Path(path).expanduser())


def check_backends_here(config: RunConfig) -> None:
    """Raise TrackwayError for the trace backends that services started from this environment could not export to.

    MLflow is always accepted, because the start brings its own server.
    """
    wanted = config.actor_rollout_ref.rollout.trace.backend
    usable = [TraceBackend.MLFLOW, *TracingSettings().usable]
    refuse([*unusable(wanted, usable, "this command"), *without_entity(config)])


def info_of(deployment: Deployment, name: str) -> RunInfo:
    """The status of a run. Raises TrackwayError for an unknown one."""
    return run(_client(deployment).run(name))


def resume_run(
    deployment: Deployment,
    name: str,
    show: Show = lambda info: None,
    skip_damaged: bool = False,
    changes: Mapping[str, JsonValue] | None = None,
) -> RunInfo:
    """Resume a run from its last checkpoint, or with `skip_damaged` from the last intact one.

    Does nothing for a run that is active, for example because it was resumed automatically. Waits for a run that is
    being stopped; if that run finishes instead, there is nothing to resume. `changes` are new values of CHANGEABLE
    keys; UserError for an active run.
    """

    async def resume() -> RunInfo:
        client = _client(deployment)
        info = await client.run(name)
        was_stopping = info.state is RunState.STOPPING and not info.interrupted
        if was_stopping:
            info = await _until_ended(deployment, name, show, STOP_DEADLINE_S)
        if info.state not in ENDED and changes:
            keys = [key for key in changes if key not in RECORDED]
            raise UserError(
                f"{', '.join(keys)}: expected a run that has ended, got run {name}, which is {info.state}; stop it "
                "first (Ctrl-C in its command), or resume it without new values"
            )
        if info.state not in ENDED or (was_stopping and info.state is RunState.FINISHED):
            return info
        try:
            return await client.resume(name, skip_damaged, changes)
        except TrackwayError as error:
            info = await client.run(name)
            if error.code is ErrorCode.CONFLICT and info.state not in ENDED and not changes:
                return info
            raise

    return run(resume())


def follow(deployment: Deployment, name: str, show: Show) -> RunInfo:
    """Show a run until it ends. Ctrl-C makes the run save a checkpoint and stop, and is then raised again.

    Raises:
        UserError: the run failed; it was interrupted and not resumed automatically; or attached services became
            unreachable while the run may continue.
    """
    try:
        info = run(_until_ended(deployment, name, show, deadline_s=None))
    except KeyboardInterrupt:
        stop_run(deployment, name, show)
        raise
    except TrackwayError as error:
        if not (deployment.attached and _may_pass(error)):
            raise
        again = f"trackway train --resume {name}"
        raise UserError(f"{error.message}; the run may still be active; follow it with `{again}`") from error
    log = Path(info.folder) / "worker.log"
    if info.interrupted:
        raise UserError(
            f"run {name} was interrupted and was not resumed automatically ({info.message}); resume it with `trackway "
            f"train --resume {name}`; its log is {log}"
        )
    if info.state is RunState.UNREADABLE:
        raise UserError(f"run {name}: {info.message}: `trackway train --resume {name}`; its log is {log}")
    if info.state is RunState.FAILED:
        raise UserError(f"run {name} failed: {info.message}; its log is {log}")
    return info


def stop_run(deployment: Deployment, name: str, show: Show) -> RunInfo:
    """Ask a run to save a checkpoint and stop, and wait until it has."""

    async def stop() -> RunInfo:
        await _client(deployment).stop(name)
        return await _until_ended(deployment, name, show, STOP_DEADLINE_S)

    return run(stop())


async def _until_ended(deployment: Deployment, name: str, show: Show, deadline_s: float | None) -> RunInfo:
    client = _client(deployment)
    started = lived = time.monotonic()
    while True:
        now = time.monotonic()
        patient = deployment.attached and deadline_s is None and now - lived < OUTAGE_DEADLINE_S
        info = await _look(client, name, patient)
        if info is not None:
            show(info)
            if info.state in ENDED and not (info.interrupted and patient):
                return info
            lived = lived if info.interrupted else now
        if deadline_s is not None and now - started > deadline_s:
            down = "" if deployment.attached else "; or stop it together with its services: `trackway down`"
            raise UserError(
                f"run {name}: expected it to stop within {deadline_s:.0f} s, but it is still running; "
                f"`trackway train --resume {name}` waits again, then resumes it{down}"
            )
        await asyncio.sleep(_POLL_S)


async def _look(client: TrainerClient, name: str, patient: bool) -> RunInfo | None:
    """The state of the run; None when there was no answer and `patient` allows another attempt."""
    try:
        return await client.run(name)
    except TrackwayError as error:
        if patient and _may_pass(error):
            return None
        raise


def _may_pass(error: TrackwayError) -> bool:
    return error.retryable or error.code is ErrorCode.DEADLINE_EXCEEDED


def _client(deployment: Deployment) -> TrainerClient:
    return TrainerClient(deployment.url("trainer"))
