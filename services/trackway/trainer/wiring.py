"""Builds the parts of a run from its folder, at its newest checkpoint when there is one."""

import asyncio
import logging

from trackway.clients import AgentClient, CallPolicy
from trackway.clients.weights import WeightStore
from trackway.trainer.checkpoint import find_latest, load_checkpoint
from trackway.trainer.config import RunConfig
from trackway.trainer.dataset import Prompts, load_samples
from trackway.trainer.learner import Learner
from trackway.trainer.mapping import learner_config, patience, plan, training_ask, validation_ask
from trackway.trainer.prompt_filter import Fits, prompt_filter
from trackway.trainer.publisher import Publisher
from trackway.trainer.rollouts import Ask, Rollouts
from trackway.trainer.run_folder import RunFolder
from trackway.trainer.run_traces import RunTraces
from trackway.trainer.settings import ServiceUrls, taken_over
from trackway.trainer.trace_wiring import open_traces, run_target
from trackway.trainer.tracking import ConsoleSink, FileSink, MlflowSink, Sink, Tracking, open_tracking
from trackway.trainer.training import Progress, Training
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow

logger = logging.getLogger("trackway.trainer")


async def build(folder: RunFolder, stop: asyncio.Event) -> tuple[Training, Tracking]:
    """Everything that `fit` needs, at the newest checkpoint when there is one. Raises TrackwayError."""
    config, services, settings = folder.config(), folder.services(), taken_over()
    fits = await prompt_filter(config, services.tools_url)
    tracking = await asyncio.to_thread(open_tracking, folder, config, settings.mlflow_uri)
    target = await asyncio.to_thread(run_target, config, tracking.run)
    traces = open_traces(folder, config, target, settings, tracking)
    await traces.open()
    training = await asyncio.to_thread(_training, folder, config, services, stop, fits, tracking, traces)
    folder.update(total_steps=training.plan.total_steps, step=training.step)
    return training, tracking


def _training(
    folder: RunFolder,
    config: RunConfig,
    services: ServiceUrls,
    stop: asyncio.Event,
    fits: Fits | None,
    tracking: Tracking,
    traces: RunTraces,
) -> Training:
    data, own = config.data, config.trackway
    train = load_samples(data.train_files, data.train_max_samples, fits)
    prompts = Prompts(train, data.train_batch_size, own.seed if data.seed is None else data.seed, data.shuffle)
    schedule = plan(config, prompts.steps_per_epoch)
    learner = _learner(config, schedule.total_steps)
    progress, saved = _resumed(folder, config, learner)
    store = WeightStore(services.weights_url)
    agents = _agent_client(config, services)

    def rollouts(ask: Ask) -> Rollouts:
        return Rollouts(agents, ask, patience(config))

    return Training(
        plan=schedule,
        folder=folder,
        prompts=prompts,
        rollouts=rollouts(training_ask(config, folder.name, traces.target)),
        validation_rows=load_samples(data.val_files, data.val_max_samples, fits),
        validation_rollouts=rollouts(validation_ask(config, folder.name, traces.target)),
        learner=learner,
        publisher=Publisher(store, learner, folder.name, folder.info().uid, folder.path / "export", own.keep_weights),
        sinks=_sinks(config, folder, tracking),
        traces=traces,
        progress=progress,
        stop=stop,
        saved_step=progress.step if saved else None,
    )


def _learner(config: RunConfig, total_steps: int) -> Learner:
    try:
        return Learner(learner_config(config, total_steps))
    except (OSError, ValueError) as error:  # no such model, or not one that can be trained as asked
        model = config.actor_rollout_ref.model.path
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"no learner for the model {model!r}: {error}") from error


def _resumed(folder: RunFolder, config: RunConfig, learner: Learner) -> tuple[Progress, bool]:
    """The newest checkpoint's progress, loaded into the learner; rows after it are removed."""
    latest = find_latest(folder.checkpoints) if config.trainer.resume_mode == "auto" else None
    if latest is None:
        folder.rewind(None)
        return Progress(), False
    progress = Progress.model_validate(load_checkpoint(latest, learner))
    folder.rewind(MetricsRow(step=progress.step, data=progress.metrics))
    logger.info("resumed from %s", latest)
    return progress, True


def _agent_client(config: RunConfig, services: ServiceUrls) -> AgentClient:
    # A group's stream is silent until its first trajectory ends.
    policy = CallPolicy(
        read_s=config.trackway.trajectory_timeout_s + 30.0,
        total_s=config.trackway.group_timeout_s,
        max_in_flight=config.trackway.max_inflight_groups,
    )
    return AgentClient(services.agent_url, policy=policy)


def _sinks(config: RunConfig, folder: RunFolder, tracking: Tracking) -> list[Sink]:
    sinks: list[Sink] = [FileSink(folder)]
    if "console" in config.trainer.logger:
        sinks.append(ConsoleSink())
    if tracking.run is not None:
        sinks.append(MlflowSink(tracking.run, tracking.mlflow))
    return sinks
