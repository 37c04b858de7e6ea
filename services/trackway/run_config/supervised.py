"""Supervised training (SFT): the keys of verl's SFT trainer, and where they stand in the configuration of a run.

verl's trainer (verl/trainer/config/sft_trainer_engine.yaml, release 0.9.1) has sections of its own. With
`trackway.rollouts_from=rows` they are read as the sections that a run has for its policy, so that the tables of keys
without effect and of refused values hold for both.
"""

from collections.abc import Mapping

from pydantic import JsonValue

from trackway.wire.errors import ErrorCode, TrackwayError

ROWS = "trackway.rollouts_from"
_ACTOR = "actor_rollout_ref.actor"
SECTIONS = {
    "model": "actor_rollout_ref.model",
    "optim": f"{_ACTOR}.optim",
    "engine": f"{_ACTOR}.fsdp_config",
    "checkpoint": f"{_ACTOR}.checkpoint",
}
"""Section of verl's SFT trainer -> the section of a run with the same keys."""
RENAMED = {
    "data.micro_batch_size_per_gpu": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "data.use_dynamic_bsz": f"{_ACTOR}.use_dynamic_bsz",
    "data.max_token_len_per_gpu": f"{_ACTOR}.ppo_max_token_len_per_gpu",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
}
"""Key of verl's SFT trainer -> the key of a run with the same meaning."""
GROUPS = ("engine=fsdp", "optim=fsdp", "model=hf_model")
"""Choices of verl's groups that name what a run has anyway."""
OWN = tuple(
    f"data.{name}"
    for name in ("messages_key", "tools_key", "enable_thinking_key", "enable_thinking_default", "max_length")
)
"""Keys that only supervised training reads."""
NOT_READ = (
    *("algorithm", "critic", "custom_reward_function", "reward", "distillation", "async_training", "rollout"),
    *("trainer.v1", "trainer.critic_warmup", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    *("trainer.log_val_generations", "trainer.val_only", "actor_rollout_ref.ref"),
    *(f"data.{name}" for name in ("prompt_key", "reward_fn_key", "gen_batch_size", "val_batch_size")),
    "data.filter_overlong_prompts",
    *(f"{_ACTOR}.{name}" for name in ("policy_loss", "ppo_epochs", "ppo_mini_batch_size", "shuffle", "clip_ratio")),
    *(f"{_ACTOR}.{name}" for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")),
    *(f"{_ACTOR}.{name}" for name in ("loss_scale_factor", "entropy_coeff", "use_kl_loss", "calculate_sum_pi_squared")),
    "actor_rollout_ref.rollout.temperature",
    *("trackway.proximal_logprobs", "trackway.save_token_values", "trackway.max_staleness"),
    "trackway.over_sample_rate",
)
"""Sections and keys of reinforcement learning that supervised training does not read, and so refuses."""


def spelled(key: str) -> str:
    """The key of a run that a key of verl's SFT trainer stands for, or the key itself."""
    section, _, rest = key.partition(".")
    return f"{SECTIONS[section]}.{rest}" if rest and section in SECTIONS else RENAMED.get(key, key)


def renamed(given: Mapping[str, JsonValue], defaults: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The keys in the spelling of a run. A key of the SFT trainer counts where the other spelling has its default.

    Raises TrackwayError(INVALID_REQUEST) where both spellings are given and disagree.
    """
    others = {key: value for key, value in given.items() if spelled(key) == key}
    for key, value in given.items():
        name = spelled(key)
        if name == key:
            continue
        other = others.get(name)
        if other not in (None, value, defaults.get(name)):
            message = f"{key}={value} and {name}={other} disagree; give only {key}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message, key=key)
        others[name] = value
    return others


def misplaced(
    values: Mapping[str, JsonValue], defaults: Mapping[str, JsonValue], *, supervised: bool
) -> list[TrackwayError]:
    """An error for each key whose value differs from its default, and that this kind of training does not read."""
    names = NOT_READ if supervised else OWN
    remedy = (
        "supervised training does not read it; leave it out"
        if supervised
        else f"only supervised training reads it; leave it out, or set {ROWS}=rows"
    )
    return [
        TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"{key}: expected the default {defaults.get(key)}, got {value}; {remedy}",
            key=key,
        )
        for key, value in values.items()
        if any(f"{key}.".startswith(f"{name}.") for name in names) and value != defaults.get(key)
    ]
