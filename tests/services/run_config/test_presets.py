"""The presets of algorithms: which keys they change, with their values."""

import pytest
from pydantic import JsonValue

from trackway.run_config import RunConfig, compose
from trackway.run_config.compose import leaves

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
GSM8K: dict[str, JsonValue] = {
    **{"data.max_prompt_length": 1024, "data.max_response_length": 2048, "data.filter_overlong_prompts": True},
    f"{ROLLOUT}.n": 5,
}
"""What verl's examples on GSM8K and MATH share, where it is not the default."""
IN_REWARD: dict[str, JsonValue] = {"algorithm.use_kl_in_reward": True}
CHANGES: dict[str, dict[str, JsonValue]] = {
    "grpo": {**GSM8K, f"{ACTOR}.use_kl_loss": True},
    "dr_grpo": {
        **GSM8K,
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "ppo": {**{key: value for key, value in GSM8K.items() if key != f"{ROLLOUT}.n"}, "algorithm.adv_estimator": "gae"},
    "rloo": {**GSM8K, **IN_REWARD, "algorithm.adv_estimator": "rloo"},
    "reinforce_plus_plus": {
        **{**GSM8K, **IN_REWARD, "algorithm.adv_estimator": "reinforce_plus_plus"},
        **{f"{ACTOR}.optim.lr": 3e-6, f"{ACTOR}.ppo_mini_batch_size": 1024, f"{ROLLOUT}.n": 8},
    },
    "gspo": {
        **{"data.max_prompt_length": 2048, "data.max_response_length": 8192, "data.filter_overlong_prompts": True},
        **{"data.train_batch_size": 512, f"{ACTOR}.ppo_mini_batch_size": 128, f"{ROLLOUT}.n": 16},
        **{f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
        **{f"{ACTOR}.clip_ratio_low": 3e-4, f"{ACTOR}.clip_ratio_high": 4e-4, f"{ACTOR}.clip_ratio_c": 10.0},
    },
    "dapo": {
        **{"data.max_prompt_length": 2048, "data.max_response_length": 20480, "data.truncation": "left"},
        **{"data.train_batch_size": 512, f"{ACTOR}.ppo_mini_batch_size": 32, f"{ROLLOUT}.n": 16},
        **{f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.28},
        **{f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.val_kwargs.temperature": 1.0},
        **{f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ACTOR}.optim.lr_warmup_steps": 20},
        **{f"algorithm.filter_groups.{name}": value for name, value in (("enable", True), ("metric", "acc"))},
        "algorithm.filter_groups.max_num_gen_batches": 10,
        **{f"{BUFFER}.enable": True, f"{BUFFER}.len": 4096, f"{BUFFER}.penalty_factor": 1.0, f"{BUFFER}.log": True},
    },
    "sft": {
        **{"data.train_batch_size": 256, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, f"{ACTOR}.use_dynamic_bsz": True},
        **{f"{ACTOR}.ppo_max_token_len_per_gpu": 8192, f"{ACTOR}.optim.lr": 1e-3, "trainer.total_epochs": 4},
        **{"trainer.val_before_train": False, "trackway.rollouts_from": "rows", "trackway.max_samples": "first"},
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_preset_changes_these_keys_and_no_others(name: str):
    defaults = leaves(RunConfig().model_dump(mode="json"))

    values = leaves(compose([], config_name=name).model_dump(mode="json"))

    assert {key: value for key, value in values.items() if value != defaults[key]} == CHANGES[name]
