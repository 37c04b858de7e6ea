"""Builds the parts of a run from its folder, at its newest checkpoint when there is one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from transformers import AutoTokenizer

from trackway.clients import AgentClient, CallPolicy
from trackway.clients.weights import WeightStore
from trackway.learner.config import LearnerConfig
from trackway.learner.learner import Learner
from trackway.learner.measuring import ActiveTime
from trackway.learner.ranks.group import LeadingLearner, RankGroup, require_shared
from trackway.learner.ranks.publication import RankWriters
from trackway.run_config import RunConfig, no_effect
from trackway.serving.user_code import add_to_path
from trackway.system.process import warn_experimental
from trackway.system.waits import Waits
from trackway.trainer.data.conversations import EncodedRow
from trackway.trainer.data.dataset import PromptBatches, Rows, load_data, prompts_of
from trackway.trainer.data.name_check import check_names
from trackway.trainer.data.prompt_filter import prompt_filter
from trackway.trainer.delivery import ConsoleSink, FileSink, Sink, Tracking, open_tracking
from trackway.trainer.loop.base import BaseTraining
from trackway.trainer.loop.build_traces import open_traces, run_target, weave_url
from trackway.trainer.loop.colocation import open_engines
from trackway.trainer.loop.from_config import (
    anchor_every,
    experimental,
    group_filter,
    learner_config,
    overlong_penalty,
    pacing,
    plan,
    profiler,
    retry_policy,
    session_limits,
    sharing,
    training_template,
    update_mode,
    validation_retry_policy,
    validation_template,
)
from trackway.trainer.loop.group_source import GroupSource
from trackway.trainer.loop.resume import Beginning, begin
from trackway.trainer.loop.rollout_client import GroupTemplate, Rollouts
from trackway.trainer.loop.schedule import Schedule
from trackway.trainer.loop.scheduler import GroupScheduler
from trackway.trainer.loop.session_groups import SessionGroups, SessionSlots
from trackway.trainer.loop.supervised import SupervisedTraining, load_supervised
from trackway.trainer.loop.teaching import Teaching, open_teaching
from trackway.trainer.loop.training import Training, Validation
from trackway.trainer.loop.weight_publisher import CLAIM_WAIT_S, Publisher, require_takers, sender_of
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.session_inbox import SessionInbox
from trackway.trainer.run_state.trajectories import Generations
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.settings import taken_over
from trackway.trainer.traces.run import RunTraces
from trackway.wire.errors import ErrorCode, TrackwayError

RUN = "the run"
AnyTraining = TypeVar("AnyTraining", bound=BaseTraining)

logger = logging.getLogger("trackway.trainer")


class _Parts(NamedTuple):
    """Parts of a run that are opened before its learner."""

    folder: RunFolder
    config: RunConfig
    stop: asyncio.Event
    waits: Waits
    tracking: Tracking
    traces: RunTraces
    skip_damaged: bool


async def build(
    folder: RunFolder, stop: asyncio.Event, skip_damaged: bool = False, waits: Waits | None = None
) -> tuple[Training, Tracking]:
    """Everything that `fit` needs, at the newest checkpoint when there is one. Raises TrackwayError.

    `waits` gets what the run waits for meanwhile, and from then on.
    """
    return await _built(_from_rollouts, folder, stop, skip_damaged, waits or Waits())


async def build_supervised(
    folder: RunFolder, stop: asyncio.Event, skip_damaged: bool = False, waits: Waits | None = None
) -> tuple[SupervisedTraining, Tracking]:
    """Build a run of supervised training, as `build` does."""
    return await _built(_from_rows, folder, stop, skip_damaged, waits or Waits())


async def _built(
    of: Callable[[RunFolder, RunConfig, ServiceUrls, Waits], Awaitable[Callable[[_Parts], AnyTraining]]],
    folder: RunFolder,
    stop: asyncio.Event,
    skip_damaged: bool,
    waits: Waits,
) -> tuple[AnyTraining, Tracking]:
    config, services, settings = folder.config(), folder.services(), taken_over()
    for key, reason in no_effect(config.trackway.ignored_keys):
        logger.info("%s has no effect here: %s", key, reason)
    if config.idle_gpus:
        logger.warning("%s", config.idle_gpus)
    make = await of(folder, config, services, waits)
    with waits(RUN, "the rollout service to say whether its engines can sleep"):
        engines = await open_engines(sharing(config), services.rollout_url)
    with waits(RUN, "MLflow's id of the run, and the other loggers"):
        tracking = await asyncio.to_thread(open_tracking, folder, config, settings.mlflow_uri)
    target = await asyncio.to_thread(run_target, config, tracking.run)
    traces = open_traces(folder, config, target, settings, tracking)
    with waits(RUN, "the services to say how many spans they have"):
        await traces.open()
    try:
        if engines is not None:
            with waits(RUN, "the engines to go to sleep"):
                await engines.sleep()
        parts = _Parts(folder, config, stop, waits, tracking, traces, skip_damaged)
        training = await asyncio.to_thread(make, parts)
        folder.update(total_steps=training.plan.total_steps, step=training.step, weave_url=weave_url(target, settings))
    except BaseException:
        if engines is not None:
            await engines.close()
        raise
    training.engines = engines
    return training, tracking


async def _from_rows(
    folder: RunFolder, config: RunConfig, services: ServiceUrls, waits: Waits
) -> Callable[[_Parts], SupervisedTraining]:
    with waits(RUN, "its rows to be read and encoded"):
        rows, held_out = await asyncio.to_thread(load_supervised, config)
    return partial(_supervised, rows=rows, held_out=held_out)


def _supervised(parts: _Parts, rows: Sequence[EncodedRow], held_out: Sequence[EncodedRow]) -> SupervisedTraining:
    config, batches = parts.config, prompts_of(parts.config, rows)
    schedule, learner, beginning = _begun(parts, batches.steps_per_epoch)
    return SupervisedTraining(
        plan=schedule,
        folder=parts.folder,
        batches=batches,
        held_out=held_out,
        batch_size=config.data.train_batch_size,
        learner=learner,
        sinks=_sinks(config, parts.folder, parts.tracking),
        traces=parts.traces,
        beginning=beginning,
        stop=parts.stop,
        waits=parts.waits,
        profiler=profiler(config, parts.folder.path),
    )


async def _from_rollouts(
    folder: RunFolder, config: RunConfig, services: ServiceUrls, waits: Waits
) -> Callable[[_Parts], Training]:
    with waits(RUN, "its rows to be read"):
        keep = await prompt_filter(config, services.tools_url)
        rows, held_out = await asyncio.to_thread(load_data, config, keep)
    with waits(RUN, "the services to say which agent loops, tools and scorers they have"):
        tools = await check_names(config, {"data.train_files": rows, "data.val_files": held_out}, services)
    if tools:
        folder.write_tools(tools)
    with waits(RUN, "its teachers"):
        student = config.actor_rollout_ref.model.path or ""
        teaching = await open_teaching(config.distillation, student, services, rows.samples)
    with waits(RUN, "the rollout service to say how its engines take weights"):
        await require_takers(config.trackway.weights_transport, services)
    return partial(_training, services=services, rows=rows, held_out=held_out, teaching=teaching)


def _begun(parts: _Parts, steps_per_epoch: int) -> tuple[Schedule, Learner, Beginning]:
    """The schedule, and the learner at the checkpoint that the run continues from."""
    folder, config, waits = parts.folder, parts.config, parts.waits
    schedule = plan(config, steps_per_epoch)
    nodes = config.placement.described(config.learner_needs_gpus) + ", and " if config.placement.nodes > 1 else ""
    with waits(RUN, f"{nodes}its model to be loaded"):
        learner = _learner(folder, config, schedule.total_steps)
    folder.update(threads=learner.threads)
    with waits(RUN, "its checkpoint to be loaded"):
        beginning = begin(folder, config, learner, parts.skip_damaged)
    parts.tracking.catch_up(folder.rows())
    return schedule, learner, beginning


def _training(parts: _Parts, services: ServiceUrls, rows: Rows, held_out: Rows, teaching: Teaching | None) -> Training:
    folder, config, stop, waits, tracking, traces, _ = parts
    own = config.trackway
    takes_sessions = own.rollouts_from == "sessions"
    prompts: PromptBatches = (
        SessionSlots(config.data.train_batch_size, config.trainer.total_training_steps or 1)
        if takes_sessions
        else prompts_of(config, rows.samples)
    )
    schedule, learner, beginning = _begun(parts, prompts.steps_per_epoch)
    store, uid = WeightStore(services.weights_url), folder.info().uid
    with waits(RUN, f"the lock of the weight store {services.weights_url}", CLAIM_WAIT_S):
        scratch, mode = folder.path / "export", update_mode(config)
        every = anchor_every(config, store)
        writers = RankWriters(learner) if isinstance(learner, LeadingLearner) else None
        sender = sender_of(own.weights_transport, store, learner)
        keep = own.keep_weights
        publisher = Publisher(store, learner, folder.name, uid, scratch, keep, mode, every, writers, sender)
    agents = _agent_client(config, services)

    active = ActiveTime()

    def rollouts(template: GroupTemplate) -> Rollouts:
        baseline = config.group_size > template.n and not template.validation
        policy = validation_retry_policy(config) if template.validation else retry_policy(config)
        return Rollouts(agents, template, policy, active, overlong_penalty(config), baseline)

    template = training_template(config, folder.name, traces.target)
    template = replace(template, policy=services.policy, teachers=teaching)
    held_out_template = replace(validation_template(config, folder.name, traces.target), policy=services.policy)
    resumed = beginning.progress.scheduler
    source: GroupSource = rollouts(template)
    if takes_sessions:
        limits, overlong = session_limits(config), overlong_penalty(config)
        inbox, first = SessionInbox(folder.path), (publisher.newest() or 0) + 1
        source = SessionGroups(inbox, template, limits, resumed.drawn, active, overlong, first)
    return Training(
        plan=schedule,
        folder=folder,
        scheduler=GroupScheduler(
            prompts,
            source,
            pacing(config),
            resumed,
            beginning.finished,
            group_filter(config),
        ),
        validation=Validation(
            held_out.samples,
            rollouts(held_out_template),
            _generations(config.trainer.validation_data_dir, config, held_out),
        ),
        learner=learner,
        publisher=publisher,
        sinks=_sinks(config, folder, tracking),
        traces=traces,
        beginning=beginning,
        stop=stop,
        waits=waits,
        samples=_generations(config.trainer.rollout_data_dir, config, rows),
        profiler=profiler(config, folder.path),
    )


def _learner(folder: RunFolder, config: RunConfig, total_steps: int) -> Learner:
    settings = learner_config(config, total_steps)
    for feature in experimental(config, settings.device):
        warn_experimental(feature)
    # The number at the run's first start: another one would round differently.
    threads = folder.info().threads
    code_path = config.trackway.code_path
    try:
        if code_path and any(":" in name for name in (settings.algorithm.adv_estimator, settings.loss_mode)):
            add_to_path(Path(code_path))
        return _started(replace(settings, threads=threads or settings.threads), config, folder.path)
    except (OSError, ValueError) as error:  # no such model, or not one that can be trained as asked
        model = config.actor_rollout_ref.model.path
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"no learner for the model {model!r}: {error}") from error


def _generations(folder: str | None, config: RunConfig, rows: Rows) -> Generations | None:
    if folder is None:
        return None
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    truths = {row.index: row.reward_model.ground_truth for row in rows.samples}
    return Generations(Path(folder), lambda ids: tokenizer.decode(ids, skip_special_tokens=True), truths)


def _started(settings: LearnerConfig, config: RunConfig, folder: Path) -> Learner:
    """The learner in this process, or the first rank of one in several."""
    placement, own = config.placement, config.trackway
    if placement.ranks == 1:
        return Learner(settings)
    group = RankGroup(settings, placement, own.rank_timeout_s, own.placement_timeout_s)
    try:
        learner = LeadingLearner(settings, group)
        if placement.nodes > 1:
            require_shared(learner, folder)
        return learner
    except BaseException:
        group.close()
        raise


def _agent_client(config: RunConfig, services: ServiceUrls) -> AgentClient:
    # A group's stream is silent until its first trajectory ends.
    policy = CallPolicy(
        read_s=config.trackway.trajectory_timeout_s + 30.0,
        total_s=config.trackway.group_timeout_s,
        max_in_flight=config.trackway.max_inflight_groups,
    )
    return AgentClient(services.agent_url, policy=policy, direct=services.direct)


def _sinks(config: RunConfig, folder: RunFolder, tracking: Tracking) -> list[Sink]:
    sinks: list[Sink] = [FileSink(folder)]
    if "console" in config.trainer.logger:
        sinks.append(ConsoleSink())
    return [*sinks, *tracking.backends]
