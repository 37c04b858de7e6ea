"""Supervised training by the keys of verl's SFT trainer: where each arrives, and what is refused."""

import pytest
from pydantic import JsonValue

from trackway.run_config import UnsupportedKey, compose, explain, resolve
from trackway.run_config.compose import leaves
from trackway.run_config.supervised import SECTIONS
from trackway.wire.errors import TrackwayError

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


def value(words: list[str], key: str) -> JsonValue:
    return leaves(compose(words, config_name="sft").model_dump(mode="json"))[key]


@pytest.mark.parametrize(
    ("word", "key", "arrives"),
    [
        ("model.path=/m", f"{MODEL}.path", "/m"),
        ("model.lora_rank=8", f"{MODEL}.lora_rank", 8),
        ("model.target_modules=[q_proj]", f"{MODEL}.target_modules", ["q_proj"]),
        ("model.enable_gradient_checkpointing=false", f"{MODEL}.enable_gradient_checkpointing", False),
        ("optim.lr=1e-5", f"{ACTOR}.optim.lr", 1e-5),
        ("optim.lr_warmup_steps_ratio=0.1", f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.1),
        ("optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        ("optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        ("optim.clip_grad=0.5", f"{ACTOR}.optim.clip_grad", 0.5),
        ("engine.model_dtype=bf16", f"{ACTOR}.fsdp_config.model_dtype", "bf16"),
        ("engine.ulysses_sequence_parallel_size=2", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2),
        ("checkpoint.save_contents=[model,hf_model]", f"{ACTOR}.checkpoint.save_contents", ["model", "hf_model"]),
        ("data.micro_batch_size_per_gpu=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu", 2),
        ("data.use_dynamic_bsz=false", f"{ACTOR}.use_dynamic_bsz", False),
        ("data.max_token_len_per_gpu=99", f"{ACTOR}.ppo_max_token_len_per_gpu", 99),
        ("data.train_files=a.parquet", "data.train_files", ["a.parquet"]),
        ("data.messages_key=talk", "data.messages_key", "talk"),
        ("data.tools_key=functions", "data.tools_key", "functions"),
        ("data.enable_thinking_default=none", "data.enable_thinking_default", None),
        ("data.max_length=4096", "data.max_length", 4096),
        ("data.truncation=right", "data.truncation", "right"),
        ("data.train_batch_size=8", "data.train_batch_size", 8),
        ("trainer.save_freq=after_each_epoch", "trainer.save_freq", "after_each_epoch"),
        ("trainer.max_ckpt_to_keep=2", "trainer.max_actor_ckpt_to_keep", 2),
        ("trainer.total_epochs=2", "trainer.total_epochs", 2),
        ("trainer.resume_mode=disable", "trainer.resume_mode", "disable"),
    ],
)
def test_a_key_of_verls_sft_trainer_arrives(word: str, key: str, arrives: JsonValue):
    changed = leaves(compose([word], config_name="sft").model_dump(mode="json"))
    before = leaves(compose([], config_name="sft").model_dump(mode="json"))
    apart = {name for name in before if changed[name] != before[name]} - {"trackway.ignored_keys"}

    assert changed[key] == arrives and apart <= {key}


def test_a_pasted_verl_command_keeps_the_choices_of_its_groups_out_of_the_sections():
    words = ["engine=fsdp", "optim=fsdp", "model=hf_model", "engine.strategy=fsdp2", "data.pad_mode=no_padding"]
    words += ["optim.lr=2e-5", "data.num_workers=4", "profiler.enable=false", "trainer.seed=1"]

    config = compose(words, config_name="sft")

    assert config.actor_rollout_ref.actor.optim.lr == 2e-5
    ignored = {"data.pad_mode", "data.num_workers", "profiler.enable", "trainer.seed"}
    assert {*config.trackway.ignored_keys} == ignored


def test_a_file_in_verls_sections_composes_with_a_command_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [sft, _self_]\nmodel: {path: /file}\noptim: {lr: 1e-4, weight_decay: 0.1}\n")

    config = compose(["optim.lr=3e-4"], file)

    policy = config.actor_rollout_ref
    assert (policy.model.path, policy.actor.optim.lr, policy.actor.optim.weight_decay) == ("/file", 3e-4, 0.1)


def test_a_resolved_configuration_is_the_same_when_it_is_resolved_again():
    config = compose(["optim.lr=3e-4", "model.lora_rank=4", "data.train_batch_size=8"], config_name="sft")

    assert resolve(config.model_dump(mode="json")) == config and config.is_supervised


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["algorithm.adv_estimator=rloo"], "algorithm.adv_estimator: expected the default grpo, got rloo; supervised"),
        (["actor_rollout_ref.actor.use_kl_loss=true"], "use_kl_loss: expected the default False, got True; supervised"),
        (["actor_rollout_ref.rollout.temperature=0.7"], "rollout.temperature: expected the default 1.0, got 0.7"),
        (["trainer.val_only=true"], "trainer.val_only: expected the default False, got True"),
        (["data.truncation=middle"], "data.truncation: expected error, left or right"),
        (["actor_rollout_ref.actor.optim.lr=3"], "optim.lr=0.001 and actor_rollout_ref.actor.optim.lr=3 disagree; giv"),
        (["optim.lrr=1"], "unknown key 'actor_rollout_ref.actor.optim.lrr': did you mean actor_rollout_ref.actor.opti"),
        (["data.custom_cls.path=x.py"], "data.custom_cls.path: expected null, got x.py"),
        (["optim.optimizer=SGD"], "optim.optimizer: expected AdamW, got SGD"),
    ],
)
def test_what_supervised_training_does_not_do_is_refused(words: list[str], reason: str):
    with pytest.raises(TrackwayError) as refused:
        compose(words, config_name="sft")

    assert reason in refused.value.message


def test_another_engine_of_verl_is_unsupported():
    unsupported: list[UnsupportedKey] = []

    compose(["engine=megatron"], config_name="sft", unsupported=unsupported)

    assert [(key.key, key.expected, key.got) for key in unsupported] == [("engine", "fsdp", "megatron")]


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_of_the_sft_trainer_are_unknown_in_reinforcement_learning(section: str):
    with pytest.raises(TrackwayError, match=f"unknown key '{section}.lr'"):
        resolve({section: {"lr": 1.0}})


def test_keys_of_conversations_are_refused_in_reinforcement_learning():
    with pytest.raises(TrackwayError, match=r"data\.max_length: expected the default 1024, got 9; only supervised"):
        compose(["data.max_length=9"])


def test_a_key_of_the_sft_trainer_is_explained_by_the_key_that_it_sets():
    assert [explanation.key for explanation in explain("optim.lr")] == ["actor_rollout_ref.actor.optim.lr"]
