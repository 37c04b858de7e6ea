"""Starting a run on a running deployment and following it: a bar while it trains, a checkpoint on Ctrl-C."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from trackway.clients import TrainerClient, run
from trackway.deploy.errors import UserError
from trackway.deploy.settings import SPOOL, Deployment
from trackway.tracing import TracingSettings
from trackway.trainer.config import RunConfig
from trackway.trainer.runs import runnable
from trackway.trainer.trace_check import require, weave_project
from trackway.trainer.tracking import check_loggers
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tracing import TraceBackend
from trackway.wire.trainer import ENDED, RunInfo, RunRequest, RunState

Show = Callable[[RunInfo], None]

_POLL_S = 0.5
STOP_DEADLINE_S = 180.0
"""Longest wait for a run to save its checkpoint and end."""


def start_run(deployment: Deployment, config: RunConfig, name: str | None = None) -> RunInfo:
    """Start a run and return at once; raises TrackwayError (a run is active, the name is taken)."""
    request = RunRequest(config=config.model_dump(mode="json"), run=name)
    return run(_client(deployment).start(request))


def localised(config: RunConfig) -> RunConfig:
    """The configuration with every path of this machine made whole: services and learner work in other folders."""
    tree = config.model_dump(mode="json")
    data, trainer, policy = tree["data"], tree["trainer"], tree["actor_rollout_ref"]
    turns, model = policy["rollout"]["multi_turn"], policy["model"]
    for name in ("train_files", "val_files"):
        data[name] = [_whole_path(file) for file in data[name]]
    for place, name in ((turns, "tool_config_path"), (turns, "function_tool_path"), (trainer, "resume_from_path")):
        place[name] = place[name] and _whole_path(place[name])
    if model["path"] and Path(model["path"]).expanduser().is_dir():  # any other name is a Hub id
        model["path"] = _whole_path(model["path"])
    return RunConfig.model_validate(tree)


def refusals(config: RunConfig) -> list[str]:
    """Why services started from this environment would refuse the run; empty when they would not."""
    reasons = []
    for check in (runnable, _check_files, _check_loggers, check_backends_here):
        try:
            check(config)
        except TrackwayError as error:
            reasons.append(error.message)
    return reasons


def _check_files(config: RunConfig) -> None:
    for key in ("train_files", "val_files"):
        for file in getattr(config.data, key):
            if "://" not in file and not Path(file).is_file():
                message = f"data.{key}: expected a file, got {file}; `trackway data` writes such files"
                raise TrackwayError(ErrorCode.INVALID_REQUEST, message)


def _check_loggers(config: RunConfig) -> None:
    check_loggers(config, "that of the start")  # which brings an MLflow of its own


def _whole_path(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def check_backends_here(config: RunConfig) -> None:
    """Raise TrackwayError for a trace backend that services started from this environment could not send to.

    MLflow is not among them: a start brings its own.
    """
    weave_project(config)
    wanted = config.actor_rollout_ref.rollout.trace.backend
    require(wanted, [TraceBackend.MLFLOW, *TracingSettings().usable], "this command")


def resume_run(deployment: Deployment, name: str) -> RunInfo:
    """Go on from a run's last checkpoint."""
    return run(_client(deployment).resume(name))


def follow(deployment: Deployment, name: str, show: Show) -> RunInfo:
    """Show a run until it ends; Ctrl-C asks it to save and stop, waits for that, and is raised again.

    Raises:
        UserError: the run failed.
    """
    try:
        info = run(_until_ended(deployment, name, show, deadline_s=None))
    except KeyboardInterrupt:
        stop_run(deployment, name, show)
        raise
    if info.state is RunState.FAILED:
        raise UserError(f"run {name} failed: {info.message}; its log is {Path(info.folder) / 'worker.log'}")
    return info


def stop_run(deployment: Deployment, name: str, show: Show) -> RunInfo:
    """Ask a run to save a checkpoint and end, and wait until it has."""

    async def stop() -> RunInfo:
        await _client(deployment).stop(name)
        return await _until_ended(deployment, name, show, STOP_DEADLINE_S)

    return run(stop())


def trace_losses(info: RunInfo, outputs: Path) -> list[str]:
    """A sentence for each way in which spans of the run are not where they should be; none when all arrived."""
    traces = info.traces
    if traces is None:
        return []
    said = []
    if traces.spans_lost:
        parts = {"found no room": traces.spans_dropped, "were refused by a backend": traces.spans_refused}
        reasons = ", ".join(f"{count} {how}" for how, count in parts.items() if count)
        said.append(f"{traces.spans_lost} spans lost: {reasons}; the services' logs say why")
    if traces.spool_bytes:
        size = f"{traces.spool_bytes / 1e6:.1f} MB" if traces.spool_bytes >= 1e5 else f"{traces.spool_bytes} bytes"
        where = outputs / SPOOL
        said.append(f"{size} of traces wait on disk in {where} and are sent when the backend is back and services run")
    elif traces.spans_waiting:
        said.append(f"{traces.spans_waiting} spans were still on their way when the run ended")
    if traces.unknown:
        said.append(f"what became of their spans was not to be learned from: {', '.join(traces.unknown)}")
    return said


async def _until_ended(deployment: Deployment, name: str, show: Show, deadline_s: float | None) -> RunInfo:
    client = _client(deployment)
    deadline = None if deadline_s is None else time.monotonic() + deadline_s
    while True:
        info = await client.run(name)
        show(info)
        if info.state in ENDED:
            return info
        if deadline is not None and time.monotonic() > deadline:
            raise UserError(f"run {name} is still {info.state} after {deadline_s:.0f} s; `trackway down` ends it")
        await asyncio.sleep(_POLL_S)


def _client(deployment: Deployment) -> TrainerClient:
    return TrainerClient(f"{deployment.base_url}/trainer")
