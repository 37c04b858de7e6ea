"""verl's asynchronous trainers: their sections, and how their keys set those that decide here.

Three trainers of verl run generation ahead of the learner, each with keys of its own: fully_async_policy
(`async_training.*`, `rollout.*`), one_step_off_policy (a preset) and the V1 trainer (`trainer.v1.*`). Here there is one
mechanism, decided by `async_training.staleness_threshold`, `async_training.trigger_parameter_sync_step`,
`trackway.max_staleness` and `trackway.staleness_strategy`. A step's slowest groups are left to later ones by
`trackway.over_sample_rate`.
"""

from typing import Literal

from pydantic import Field, JsonValue

from trackway.run_config.section import Section
from trackway.wire.errors import ErrorCode, TrackwayError

_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_BATCH = "data.train_batch_size"
_SYNC_STEP = "async_training.trigger_parameter_sync_step"


class AsyncTrainingConfig(Section):
    """Generation that goes on while the learner computes.

    Keys of verl's `verl/experimental/fully_async_policy`, where a version's rollouts are `trigger_parameter_sync_step`
    batches. A batch is `data.train_batch_size` prompts here.
    """

    staleness_threshold: float = Field(default=0.0, ge=0)
    """How far generation runs ahead of the learner, in versions of the weights. Fractions are allowed. 0: the learner
    and the rollout engines take turns; 1: each step trains on rollouts of the version before. Most of the speed comes
    with 0.3 to 1. `trackway.max_staleness` is the bound that holds for every rollout. Without it this key, rounded up,
    is the bound."""
    trigger_parameter_sync_step: int = Field(default=1, ge=1)
    """Steps between two publications of the weights (verl's default is 4)."""
    partial_rollout: bool | None = None
    """True if a generation in flight goes on under new weights. True: with the tokens that it has, whose cache is
    computed again; false: replicas load new weights once their generations have ended. Null leaves it to the rollout
    service's `update_mode`, which by default continues them with their cache (verl's default is true)."""
    require_batches: int | None = Field(default=None, ge=1)
    """Mini-batches of a step: `data.train_batch_size` is this times `actor.ppo_mini_batch_size`. Null leaves it to
    `data.train_batch_size` (verl's default is 1)."""


class ColocateAsyncConfig(Section):
    """The V1 trainer with engines on the learner's GPUs."""

    num_warmup_batches: float = Field(default=1.0, ge=0)
    """Batches that generation runs ahead: sets `async_training.staleness_threshold`."""


class SeparateAsyncConfig(Section):
    """The V1 trainer with engines on GPUs of their own."""

    num_warmup_batches: float = Field(default=1.0, ge=0)
    """Batches that generation runs ahead: sets `async_training.staleness_threshold`."""
    parameter_sync_step: int = Field(default=4, ge=1)
    """Mini-batches between two publications, which are one step here: `data.train_batch_size` is this times
    `actor.ppo_mini_batch_size`."""


class SamplerConfig(Section):
    """Which rollouts the V1 trainer takes in `separate_async` and `colocate_async`."""

    max_off_policy_threshold: int = Field(default=8, ge=1)
    """Versions from a rollout's own to the trained one, both counted: `trackway.max_staleness` is one less."""
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """Sets `trackway.staleness_strategy`."""


class V1Config(Section):
    """The V1 trainer's way to overlap generation and training."""

    trainer_mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """`separate_async` overlaps them. With `colocate_async` engines on the learner's GPUs sleep while it computes, but
    a step does not wait for its slowest rollouts, which go on after it. `sync` leaves the decision to
    `async_training`."""
    colocate_async: ColocateAsyncConfig = Field(default_factory=ColocateAsyncConfig)
    separate_async: SeparateAsyncConfig = Field(default_factory=SeparateAsyncConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)


class RolloutSectionConfig(Section):
    """The rollouts of fully_async_policy."""

    total_rollout_steps: int | None = Field(default=None, ge=1)
    """Prompts of the whole run: sets `trainer.total_training_steps`."""
    test_freq: int | None = Field(default=None, ge=1)
    """Publications between validations: sets `trainer.test_freq`."""


def translate(given: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The keys, by dotted name, with those set that follow from keys of verl's asynchronous trainers.

    Values that do not fit their fields are left to validation. Raises TrackwayError(INVALID_REQUEST) for keys that
    disagree.
    """
    if given.get("trainer.use_v1") is False:
        given = {key: value for key, value in given.items() if not key.startswith("trainer.v1.")}
    found = dict(given)
    mode, mini = given.get("trainer.v1.trainer_mode"), _number(given, _MINI_BATCH, 256)
    if mode == "separate_async":
        source = "trainer.v1.separate_async.parameter_sync_step"
        _set(found, _BATCH, _number(given, source, 4) * mini, f"{source} x {_MINI_BATCH}", (0, 1024))
    if mode in ("separate_async", "colocate_async"):
        source = f"trainer.v1.{mode}.num_warmup_batches"
        warm_up = given.get(source, 1)
        if isinstance(warm_up, int | float):
            _set(found, "async_training.staleness_threshold", float(warm_up), source, (0, 0.0))
        threshold = _number(given, "trainer.v1.sampler.max_off_policy_threshold", 8)
        _set(found, "trackway.max_staleness", threshold - 1, "trainer.v1.sampler.max_off_policy_threshold less 1")
        strategy = given.get("trainer.v1.sampler.max_off_policy_strategy", "drop")
        _set(found, "trackway.staleness_strategy", strategy, "trainer.v1.sampler.max_off_policy_strategy", ("wait",))
    rate = given.get("actor_rollout_ref.rollout.over_sample_rate")
    if rate:
        _set(found, "trackway.over_sample_rate", rate, "actor_rollout_ref.rollout.over_sample_rate", (0,))
    require = _number(given, "async_training.require_batches", 0)
    if require:
        _set(found, _BATCH, require * mini, f"async_training.require_batches x {_MINI_BATCH}", (0, 1024))
    total, batch = _number(given, "rollout.total_rollout_steps", 0), _number(found, _BATCH, 1024)
    if total and batch:
        _set(found, "trainer.total_training_steps", max(1, total // batch), f"rollout.total_rollout_steps / {_BATCH}")
    publications, every = _number(given, "rollout.test_freq", 0), _number(given, _SYNC_STEP, 1)
    if publications:
        _set(found, "trainer.test_freq", publications * every, f"rollout.test_freq x {_SYNC_STEP}", (-1,))
    return found


def _number(given: dict[str, JsonValue], key: str, default: int) -> int:
    value = given.get(key)
    return value if isinstance(value, int) else default


def _set(
    found: dict[str, JsonValue], key: str, value: JsonValue, source: str, unset: tuple[JsonValue, ...] = ()
) -> None:
    """Set a key that is null or a value of `unset`. Refuse another value."""
    own = found.get(key)
    if own is not None and own != value and own not in unset:
        message = f"{key}: expected {source}, which is {value}, got {own}; make them agree"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, key=key)
    found[key] = value
