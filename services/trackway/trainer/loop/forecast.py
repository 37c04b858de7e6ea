"""Computes from a configuration, before anything runs, its steps, trajectories, updates and trace volume."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from trackway.run_config import RunConfig
from trackway.run_config.models import steps_between
from trackway.trainer.data.dataset import steps_per_epoch

SPAN_BYTES = 700
"""Size of a span without text, as measured: a trajectory of two turns has 7 spans and 5.2 kB with little text."""
TOKEN_BYTES = 4
"""Size of a token's text."""
TEXT_BYTES = 16384
"""Longest text of one span, unless the tracing's own `max_text_bytes` says otherwise."""
UNBOUNDED_TURNS = 8
"""Turns assumed when `multi_turn.max_assistant_turns` is not set."""


class Bounds(NamedTuple):
    """The least and the most of something."""

    least: int
    most: int

    def times(self, factor: int) -> "Bounds":
        """Both bounds times `factor`."""
        return Bounds(self.least * factor, self.most * factor)


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run. Step counts are None when the number of rows is not known."""

    steps_per_epoch: int | None
    total_steps: int | None
    prompts: int
    """Per step."""
    trajectories: int
    """Per step."""
    updates: int
    """Optimiser steps per step."""
    mini_batch: int
    """Trajectories per optimiser step."""
    micro_batch: int
    """Trajectories per forward and backward pass."""
    passes: int
    """Forward and backward passes per optimiser step."""
    value_updates: int
    """Optimiser steps of the value model per step. 0 without one."""
    value_mini_batch: int
    """Trajectories per optimiser step of the value model."""
    validations: list[int]
    """Steps after which the held-out rows are run. Also empty when the number of steps is not known."""
    checkpoints: list[int]
    """Steps after which a checkpoint is saved; always includes the last."""
    traced: int
    """Trajectories per step."""
    spans: Bounds
    """Per trace."""
    trace_bytes: Bounds
    """Per trace, before compression."""


def forecast(config: RunConfig, rows: int | None) -> Forecast:
    """The forecast of a run over `rows` rows, or None when their number is not known.

    Raises TrackwayError(INVALID_REQUEST) when there are too few rows for a batch.
    """
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    prompts, drop_last = config.data.train_batch_size, config.data.drop_last
    mini = (prompts if config.is_supervised else min(actor.ppo_mini_batch_size, prompts)) * n
    micro = min(mini, actor.ppo_micro_batch_size_per_gpu or mini)
    critic = config.critic
    value_mini = min(critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, prompts) * n
    value_updates = (critic.ppo_epochs or actor.ppo_epochs) * math.ceil(prompts * n / value_mini)
    has_value_model = critic.is_used(config.algorithm.adv_estimator)
    per_epoch = None if rows is None else steps_per_epoch(rows, prompts, drop_last)
    total = _total_steps(config, per_epoch)
    return Forecast(
        steps_per_epoch=per_epoch,
        total_steps=total,
        prompts=prompts,
        trajectories=prompts * config.group_size,
        updates=actor.ppo_epochs * math.ceil(prompts * n / mini),
        mini_batch=mini,
        micro_batch=micro,
        passes=math.ceil(mini / micro),
        value_updates=value_updates if has_value_model else 0,
        value_mini_batch=value_mini if has_value_model else 0,
        validations=_validations(config, total, per_epoch or -1),
        checkpoints=_every(steps_between(config.trainer.save_freq, per_epoch or -1), total),
        traced=min(prompts, config.traced_prompts) * config.group_size,
        spans=_spans(config),
        trace_bytes=_trace_bytes(config),
    )


def _total_steps(config: RunConfig, per_epoch: int | None) -> int | None:
    is_set = config.trainer.val_only or config.trainer.total_training_steps is not None
    return config.total_steps(per_epoch or 0) if is_set or per_epoch is not None else None


def _validations(config: RunConfig, total: int | None, per_epoch: int) -> list[int]:
    trainer = config.trainer
    if not config.data.val_files or total is None:
        return []
    first = [0] if trainer.val_before_train or trainer.val_only else []
    return sorted({*first, *_every(steps_between(trainer.test_freq, per_epoch), total)})


def _every(frequency: int, total: int | None) -> list[int]:
    if total is None:
        return []
    return sorted({*(range(frequency, total + 1, frequency) if frequency > 0 else ()), total})


def _turns(config: RunConfig) -> int:
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    return (multi_turn.max_assistant_turns or UNBOUNDED_TURNS) if multi_turn.enable else 1


def _spans(config: RunConfig) -> Bounds:
    """`trajectory` and `reward`, and for each turn `turn`, `chat` and, except in the last, `execute_tool`."""
    turns, parallel = _turns(config), config.actor_rollout_ref.rollout.multi_turn.max_parallel_calls
    return Bounds(4, 2 + 2 * turns + (turns - 1) * parallel)


def _trace_bytes(config: RunConfig) -> Bounds:
    bare = _spans(config).times(SPAN_BYTES)
    if not config.actor_rollout_ref.rollout.trace.token2text:
        return bare
    text = TOKEN_BYTES * (config.data.max_prompt_length + config.data.max_response_length)
    whole = _turns(config) + 1  # each turn's prompt and response so far, and those of the trajectory
    return Bounds(bare.least, bare.most + whole * min(2 * TEXT_BYTES, text))
