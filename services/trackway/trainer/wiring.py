"""Builds the parts of a run from its folder, at its newest checkpoint when there is one."""

import asyncio
import logging
from dataclasses import dataclass

from trackway.clients import AgentClient, CallPolicy
from trackway.clients.weights import WeightStore
from trackway.trainer.background import Background
from trackway.trainer.checkpoint import find_latest, load_checkpoint
from trackway.trainer.config import RunConfig
from trackway.trainer.config.compose import leaves
from trackway.trainer.dataset import Prompts, load_samples
from trackway.trainer.feedback import Feedback
from trackway.trainer.learner import Learner
from trackway.trainer.mapping import learner_config, patience, plan, training_ask, validation_ask
from trackway.trainer.prompt_filter import Fits, prompt_filter
from trackway.trainer.publisher import Publisher
from trackway.trainer.rollouts import Rollouts
from trackway.trainer.run_folder import RunFolder
from trackway.trainer.settings import ServiceUrls
from trackway.trainer.tracking import ConsoleSink, FileSink, MlflowRun, MlflowSink, Sink, open_mlflow
from trackway.trainer.training import Progress, Training
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow

logger = logging.getLogger("trackway.trainer")


@dataclass
class Tracking:
    """The run's MLflow side; None and nothing to close when it is off."""

    run: MlflowRun | None
    background: Background

    def close(self, status: str, deadline_s: float) -> None:
        """Send what is queued and end the MLflow run with a status, within the deadline."""
        if self.run is not None:
            run = self.run
            self.background.submit(lambda: run.finish(status))
        self.background.close(deadline_s)


async def build(folder: RunFolder, stop: asyncio.Event) -> tuple[Training, Tracking]:
    """Everything that `fit` needs, at the newest checkpoint when there is one. Raises TrackwayError."""
    config, services = folder.config(), folder.services()
    fits = await prompt_filter(config, services.tools_url)
    tracking = await asyncio.to_thread(_tracking, folder, config)
    training = await asyncio.to_thread(_training, folder, config, services, stop, fits, tracking)
    folder.update(total_steps=training.plan.total_steps, step=training.step)
    return training, tracking


def _training(
    folder: RunFolder,
    config: RunConfig,
    services: ServiceUrls,
    stop: asyncio.Event,
    fits: Fits | None,
    mlflow: Tracking,
) -> Training:
    data, own = config.data, config.trackway
    train = load_samples(data.train_files, data.train_max_samples, fits)
    prompts = Prompts(train, data.train_batch_size, own.seed if data.seed is None else data.seed, data.shuffle)
    schedule = plan(config, prompts.steps_per_epoch)
    learner = _learner(config, schedule.total_steps)
    progress, saved = _resumed(folder, config, learner)
    store = WeightStore(services.weights_url)
    agents = _agent_client(config, services)
    experiment_id = None if mlflow.run is None else mlflow.run.experiment_id
    return Training(
        plan=schedule,
        folder=folder,
        prompts=prompts,
        rollouts=Rollouts(agents, training_ask(config, folder.name, experiment_id), patience(config)),
        validation_rows=load_samples(data.val_files, data.val_max_samples, fits),
        validation_rollouts=Rollouts(agents, validation_ask(config, folder.name, experiment_id), patience(config)),
        learner=learner,
        publisher=Publisher(store, learner, folder.name, folder.path / "export", own.keep_weights),
        sinks=_sinks(config, folder, mlflow),
        feedback=_feedback(config, mlflow),
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


def _tracking(folder: RunFolder, config: RunConfig) -> Tracking:
    trainer = config.trainer
    run = open_mlflow(config.trackway.mlflow_uri, trainer.project_name, trainer.experiment_name, folder.info().run_id)
    background = Background("mlflow")
    if run is not None:
        folder.update(mlflow_uri=run.uri, experiment_id=run.experiment_id, run_id=run.run_id)
        if run.is_new:
            background.submit(lambda: run.log_params(leaves(config.model_dump(mode="json"))))
    return Tracking(run, background)


def _sinks(config: RunConfig, folder: RunFolder, mlflow: Tracking) -> list[Sink]:
    sinks: list[Sink] = [FileSink(folder)]
    if "console" in config.trainer.logger:
        sinks.append(ConsoleSink())
    if mlflow.run is not None:
        sinks.append(MlflowSink(mlflow.run, mlflow.background))
    return sinks


def _feedback(config: RunConfig, mlflow: Tracking) -> Feedback | None:
    if mlflow.run is None:
        return None
    own = config.trackway
    return Feedback(mlflow.run, mlflow.background, own.feedback_deadline_s, assessments=own.feedback)
