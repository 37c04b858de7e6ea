import json
import re
import shlex
from pathlib import Path

import pytest
from pydantic import JsonValue

from trackway.run_config import RunConfig, UnsupportedKey, compose, given_to_deployment, no_effect, resolve
from trackway.run_config.compose import PRESETS, known_keys, leaves
from trackway.run_config.unsupported_keys import NO_EFFECT, ONLY, limited
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import TraceBackend

SCRIPT = (Path(__file__).parents[2] / "e2e" / "reproduce.sh").read_text()
for _given, _shell in (("\\\n", " "), ("$HOME", ""), ("$PROJECT_DIR", "")):
    SCRIPT = SCRIPT.replace(_given, _shell)
REPRODUCE = [word for word in shlex.split(SCRIPT.partition("main_ppo")[2].partition('"$@"')[0]) if word[:2] != "--"]
"""The arguments of verl's GSM8K script, as a shell gives them."""

ACTOR = "actor_rollout_ref.actor"
TRACE = "actor_rollout_ref.rollout.trace"

GSM8K_YAML = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  train_batch_size: 256
  return_raw_chat: True
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_assistant_turns: 5
"""


def test_without_anything_every_key_has_its_default():
    config = compose([])

    assert config == RunConfig()
    assert config.data.train_batch_size == 1024
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6


def test_the_reproduce_script_composes_on_its_own_yaml_file(tmp_path):
    (tmp_path / "gsm8k_multiturn_grpo.yaml").write_text(GSM8K_YAML)

    config = compose(REPRODUCE, tmp_path, "gsm8k_multiturn_grpo")

    assert config.data.train_files == ["/data/gsm8k/train.parquet"]
    assert config.actor_rollout_ref.rollout.n == 16
    assert config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 5
    trace = config.actor_rollout_ref.rollout.trace
    assert (trace.backend, trace.token2text, config.traced_prompts) == ((TraceBackend.WEAVE,), True, 256)


def test_every_key_of_the_reproduce_script_is_honoured_or_told_with_a_reason():
    keys = [argument.lstrip("+").split("=")[0] for argument in REPRODUCE]

    told = dict(no_effect(compose(REPRODUCE).trackway.ignored_keys))

    silent = [key for key in keys if key not in known_keys() and key not in told and limited(key) is None]
    assert silent == []
    assert told["trainer.rollout_trace.backend"] == "another spelling, read as actor_rollout_ref.rollout.trace.backend"


def test_an_honoured_key_is_never_told_as_without_effect():
    assert no_effect(compose(["data.seed=3", "trainer.save_freq=5"]).trackway.ignored_keys) == []


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_plus_signs_on_a_known_key_change_nothing(prefix: str):
    assert compose([f"{prefix}actor_rollout_ref.rollout.n=4"]).actor_rollout_ref.rollout.n == 4


def test_a_tilde_gives_a_key_its_default_back(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer:\n  save_freq: 7\n")

    assert compose(["~trainer.save_freq"], tmp_path / "mine.yaml").trainer.save_freq == -1


@pytest.mark.parametrize("argument", ["data.train_bach_size=3", "+data.train_bach_size=3"])
def test_an_unknown_key_is_refused_and_the_nearest_one_is_named(argument: str):
    with pytest.raises(TrackwayError) as caught:
        compose([argument])

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert "unknown key 'data.train_bach_size': did you mean data.train_batch_size" in caught.value.message


def test_an_unknown_key_in_a_file_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer:\n  safe_freq: 7\n")

    with pytest.raises(TrackwayError, match=r"unknown key 'trainer.safe_freq': did you mean trainer.save_freq"):
        compose([], tmp_path / "mine.yaml")


def test_every_mistake_is_told_at_once(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer:\n  safe_freq: 7\n")
    words = ["data.train_bach_size=3", "data.seed", f"{ACTOR}.optim.lr=nan", "trainer.experiment_name=a/b"]

    with pytest.raises(TrackwayError) as caught:
        compose([*words, "data.max_prompt_length=0"], tmp_path / "mine.yaml")

    for said in (
        "'data.train_bach_size'",
        "'data.seed'",
        "'trainer.safe_freq'",
        "optim.lr",
        "experiment_name",
        "prompt_l",
    ):
        assert said in caught.value.message


def test_replicas_that_take_more_gpus_than_the_run_has_are_refused():
    gpus = ["actor_rollout_ref.rollout.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=2"]

    with pytest.raises(TrackwayError, match=r"tensor_model_parallel_size: expected at most the run's 2 GPUs .*, got 4"):
        compose(gpus)
    assert compose([*gpus, "trainer.nnodes=2"]).trainer.nnodes == 2


def test_several_ranks_of_a_learner_cannot_share_one_gpu():
    ranks = "trackway.learner_ranks=2"

    with pytest.raises(TrackwayError, match=r"trackway\.device: expected cuda, cpu or auto with .*=2, got cuda:1; "):
        compose([ranks, "trackway.device=cuda:1"])
    assert compose([ranks, "trackway.device=cuda"]).trackway.learner_ranks == 2


@pytest.mark.parametrize(
    ("words", "got"),
    [
        (["trackway.device=cpu"], "trackway.device=cpu"),
        (["trackway.learner_ranks=2"], "a learner of 2 ranks"),
        (
            ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=false"],
            "an adapter alone (model.lora_rank with lora.merge=false)",
        ),
    ],
)
def test_weights_that_are_not_whole_on_one_gpu_are_not_offered_there(words: list[str], got: str):
    with pytest.raises(TrackwayError) as caught:
        compose(["trackway.weights_transport=ipc", *words])
    assert f"on a GPU, got {got}; set weights_transport=store" in caught.value.message


def test_sequences_are_divided_over_ranks_that_they_fit_and_packed():
    key = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"

    with pytest.raises(TrackwayError, match=r"ulysses_sequence_parallel_size: expected a divisor of .* \(6\), got 4"):
        compose(["trackway.learner_ranks=6", f"{key}=4"])
    with pytest.raises(TrackwayError, match=r"use_remove_padding: expected true with .*=2, got false"):
        compose(["trackway.learner_ranks=6", f"{key}=2", "actor_rollout_ref.model.use_remove_padding=false"])
    assert compose(["trackway.learner_ranks=6", f"{key}=3"]).actor_rollout_ref.actor.ulysses_sequence_parallel_size == 3
    assert compose([f"{key}=8"]).placement.ranks == 1  # a recipe of verl's, in one process


def test_a_file_that_is_not_yaml_is_refused_with_its_place(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("data:\n  train_files: [rows.jsonl\n")
    with pytest.raises(
        TrackwayError,
        match=r"^the configuration does not compose: while parsing a flow sequence\n.*mine.yaml\", line 2, column 16",
    ):
        compose([], tmp_path / "mine.yaml")


def test_the_ranks_that_share_weights_divide_the_ranks():
    for key in ("actor_rollout_ref.actor.fsdp_config.fsdp_size", "critic.fsdp.fsdp_size"):
        with pytest.raises(TrackwayError, match=rf"{key}: expected a divisor of .* \(6\), or -1, got 4"):
            compose(["trackway.learner_ranks=6", f"{key}=4"])
        for size in (-1, 2, 6, 8):
            compose(["trackway.learner_ranks=6", f"{key}={size}"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.train_batch_size=many", "data.train_batch_size: Input should be a valid integer"),
        (
            "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side=x",
            "multi_turn.tool_response_truncate_side: Input should be 'left', 'right' or 'middle', got 'x'",
        ),
        ("data.train_batch_size=8", "ppo_mini_batch_size: expected at most data.train_batch_size"),
        ("data.seed", "expected key=value in Hydra's grammar, got 'data.seed'"),
        ("data.seed=${nowhere}", "the configuration does not compose"),
        (f"{ACTOR}.optim.betas=[0.9,1.0]", f"{ACTOR}.optim.betas.1: Input should be less than 1, got 1.0"),
        ("actor_rollout_ref.rollout.top_k=-2", "rollout.top_k: Input should be greater than or equal to -1, got -2"),
        (
            "trackway.device=gpu",
            "trackway.device: String should match pattern '^(auto|cpu|cuda(:[0-9]+)?)$', got 'gpu'",
        ),
        ("trackway.seed=9223372036854775808", "trackway.seed: Input should be less than 9223372036854775808"),
        (
            "actor_rollout_ref.rollout.max_model_len=512",
            "actor_rollout_ref.rollout.max_model_len: expected more than data.max_prompt_length (512), got 512",
        ),
        (f"{ACTOR}.optim.lr=inf", f"{ACTOR}.optim.lr: Input should be a finite number, got inf"),
        (f"{ACTOR}.optim.lr=1e999", f"{ACTOR}.optim.lr: Input should be a finite number, got inf"),
        (f"{ACTOR}.optim.betas=[0.9,nan]", f"{ACTOR}.optim.betas.1: Input should be a finite number, got nan"),
        (f"{ACTOR}.clip_ratio=1e300", f"{ACTOR}.clip_ratio: Input should be a number of float32, at most 3.4e+38"),
        (f"{ACTOR}.entropy_coeff=-1e39", f"{ACTOR}.entropy_coeff: Input should be a number of float32"),
        (
            "actor_rollout_ref.rollout.temperature=1e-38",
            "actor_rollout_ref.rollout.temperature: Input should be greater than or equal to 0.000001",
        ),
        (f"{ACTOR}.entropy_coeff=-inf", f"{ACTOR}.entropy_coeff: Input should be a finite number, got -inf"),
        ("trainer.experiment_name=../../evil", "trainer.experiment_name: expected a run name of letters, digits"),
        ("trainer.experiment_name=''", "trainer.experiment_name: expected a run name of letters, digits"),
        ("trainer.experiment_name=weights", "trainer.experiment_name: expected a run name other than mlflow, spool"),
        ("trainer.project_name=../evil", "trainer.project_name: expected a name of 1 to 256 printable characters"),
        (f"{TRACE}.experiment_name=''", f"{TRACE}.experiment_name: expected a name of 1 to 256 printable"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(argument: str, message: str):
    with pytest.raises(TrackwayError) as caught:
        compose([argument])

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert message in caught.value.message


EVERY_TRACE_KEY = ["backend=weave", "token2text=true", "max_samples_per_step_per_worker=3", "project_name=me/p"]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize("section", [TRACE, "trainer.rollout_trace"])
def test_every_trace_key_is_read_in_both_spellings_with_or_without_plus(section: str, prefix: str):
    config = compose([f"{prefix}{section}.{line}" for line in [*EVERY_TRACE_KEY, "experiment_name=e"]])

    assert config.actor_rollout_ref.rollout.trace.model_dump() == {
        "backend": (TraceBackend.WEAVE,),
        "token2text": True,
        "max_samples_per_step_per_worker": 3,
        "project_name": "me/p",
        "experiment_name": "e",
    }
    assert (config.traced_prompts, config.trace_project, config.trace_experiment) == (3, "me/p", "e")


@pytest.mark.parametrize(
    ("given", "backends"),
    [
        ("null", ()),
        ("[]", ()),
        ("otlp", (TraceBackend.OTLP,)),
        ("[weave,mlflow]", (TraceBackend.WEAVE, TraceBackend.MLFLOW)),
        ("[mlflow,mlflow]", (TraceBackend.MLFLOW,)),
    ],
)
def test_one_backend_several_or_none(given: str, backends: tuple[TraceBackend, ...]):
    assert compose([f"{TRACE}.backend={given}"]).actor_rollout_ref.rollout.trace.backend == backends


@pytest.mark.parametrize("section", [TRACE, "+trainer.rollout_trace"])
@pytest.mark.parametrize("given", ["dummy", "[dummy]"])
def test_the_backend_dummy_traces_nothing_as_in_verl(section: str, given: str):
    config = compose([f"{section}.backend={given}", "trackway.trace_prompts_per_step=3"])

    assert config.actor_rollout_ref.rollout.trace.backend == ()
    assert (config.traced_prompts, config.trackway.trace_validation_samples) == (0, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("backend=wandb", "trace.backend.0: Input should be 'mlflow', 'weave' or 'otlp', got 'wandb'"),
        ("backend=[mlflow,w]", "trace.backend.1: Input should be 'mlflow', 'weave' or 'otlp', got 'w'"),
        ("backend=3", "trace.backend: Input should be a valid tuple, got 3"),
        ("max_samples_per_step_per_worker=-1", "Input should be greater than or equal to 0, got -1"),
    ],
)
@pytest.mark.parametrize("section", [TRACE, "+trainer.rollout_trace"])
def test_a_bad_trace_value_is_refused_and_the_known_ones_are_named(section: str, line: str, message: str):
    with pytest.raises(TrackwayError) as caught:
        compose([f"{section}.{line}"])

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("backend=weave", "backend=mlflow", "backend=weave and {}.backend=mlflow disagree; give only {}.backend"),
        ("backend=weave", "backend=[weave,mlflow]", "backend=weave and {}.backend=[weave,mlflow] disagree"),
        ("token2text=true", "token2text=false", "token2text=True and {}.token2text=False disagree"),
        ("token2text=false", "token2text=true", "token2text=False and {}.token2text=True disagree"),
        ("project_name=a", "project_name=b", "project_name=a and {}.project_name=b disagree"),
    ],
)
def test_an_old_and_a_new_trace_key_that_disagree_are_refused(old: str, new: str, message: str):
    with pytest.raises(TrackwayError) as caught:
        compose([f"+trainer.rollout_trace.{old}", f"{TRACE}.{new}"])

    assert f"trainer.rollout_trace.{message.format(TRACE, TRACE)}" in caught.value.message


@pytest.mark.parametrize("new", ["backend=weave", "backend=[weave]"])
@pytest.mark.parametrize("old", ["backend=weave", "backend=null"])
def test_an_old_and_a_new_trace_key_that_agree_are_one_and_null_says_nothing(old: str, new: str):
    config = compose([f"trainer.rollout_trace.{old}", f"{TRACE}.{new}"])

    assert config.actor_rollout_ref.rollout.trace.backend == (TraceBackend.WEAVE,)


def test_an_old_trace_key_in_a_file_disagrees_with_a_new_one_on_the_command_line(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ntrainer:\n  rollout_trace:\n    token2text: true\n"
    )

    assert compose([], tmp_path / "mine.yaml").actor_rollout_ref.rollout.trace.token2text is True
    with pytest.raises(TrackwayError, match="disagree; give only"):
        compose([f"{TRACE}.token2text=false"], tmp_path / "mine.yaml")


def test_traces_take_the_names_of_the_run_unless_told_otherwise():
    config = compose(["trainer.project_name=p", "trainer.experiment_name=e"])

    assert (config.trace_project, config.trace_experiment, config.traced_prompts) == ("p", "e", 0)


@pytest.mark.parametrize("run_id", ["me/p:r1", "r:1"])
def test_a_wandb_run_that_weave_would_drop_is_refused(run_id: str):
    with pytest.raises(TrackwayError, match=r"trackway.wandb_run_id: String should match"):
        compose([f"trackway.wandb_run_id={run_id!r}"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "trainer.critic_warmup=5",
            "trainer.critic_warmup: expected 0 without a value model, got 5; set algorithm.adv",
        ),
        ("critic.model.lora_adapter_path=a", "critic.model.lora_adapter_path: expected null, got a; merge the adapter"),
        ("actor_rollout_ref.rollout.full_determinism=true", "full_determinism: expected False, got True; rollout.seed"),
        (f"{ACTOR}.fsdp_config.forward_only=true", "fsdp_config.forward_only: expected False, got True; verl sets it"),
        (f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=bf16", "reduce_dtype: expected fp32 or float32, got bf16"),
        (
            "critic.fsdp.seed=7",
            "critic.fsdp.seed: expected the value of actor_rollout_ref.actor.fsdp_config.seed, which is 42, got 7",
        ),
        ("critic.optim.optimizer=SGD", "critic.optim.optimizer: expected AdamW, got SGD; other optimizers are not"),
        ("reward_model.enable=True", "reward.reward_model.model_path: expected a model with enable=true, got none"),
        (
            "+reward.reward_model.rollout.quantization=fp8",
            "reward.reward_model.rollout.quantization: expected null, got fp8; serve the model yourself",
        ),
        (
            "+reward_model.rollout.engine_kwargs.vllm.swap_space=8",
            "reward_model.rollout.engine_kwargs.vllm.swap_space: expected null, got 8; serve the model yourself",
        ),
        ("+actor_rollout_ref.model.lora.rank=32", "lora.rank: expected 0, got 32; set"),
        ("+actor_rollout_ref.model.override_config.tie=true", "override_config.tie: expected null, got True; change"),
        ("+reward.reward_kwargs.alpha=1", "reward.reward_kwargs.alpha: expected null, got 1; give arguments"),
        ("trainer.default_local_dir=s3://b/c", "trainer.default_local_dir: expected a folder, got the URL s3://b/c"),
        (f"{ACTOR}.strategy=megatron", f"{ACTOR}.strategy: expected fsdp or fsdp2, got megatron; the learner is PyT"),
        ("critic.strategy=megatron", "critic.strategy: expected fsdp or fsdp2, got megatron; the learner is PyTorch's"),
        ("critic.fsdp.strategy=veomni", "critic.fsdp.strategy: expected fsdp or fsdp2, got veomni; the learner is"),
        (
            "data.tool_config_path=t.yaml",
            "data.tool_config_path: expected the value of actor_rollout_ref.rollout.multi_turn.tool_config_path, which "
            "is None, got t.yaml; set actor_rollout_ref.rollout.multi_turn.tool_config_path alone",
        ),
        (
            "data.function_tool_path=t.py",
            "expected the value of actor_rollout_ref.rollout.multi_turn.function_tool_path",
        ),
        (
            "+reward.max_rpm=60",
            "reward.max_rpm: expected null, got 60; a judge of the reward service has judges.max_in",
        ),
        ("reward.reward_manager.name=batch", "got batch, whose function may compare the responses of a batch"),
        ("reward_model.reward_manager=batch", "set trackway.scores_are_independent=true"),
        ("reward.reward_manager.name=mine", "reward.reward_manager.name: Input should be 'naive', 'dapo'"),
        ("actor_rollout_ref.rollout.quantization=fp8", "quantization: expected null, got fp8; give it to the engine"),
        (
            f"{ACTOR}.fsdp_config.dtype=float16",
            "fsdp_config.dtype: expected float32 or bfloat16, got float16; float16 needs",
        ),
        (
            f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16",
            "mixed_precision.param_dtype: expected float32 or bfloat16, got fp16; float16 needs",
        ),
        ("data.image_key=pictures", "data.image_key: expected images, got pictures; rows are text"),
        (
            "data.sampler.class_path=a.py",
            "data.sampler.class_path: expected null, got a.py; order the rows in the file",
        ),
        ("reward_model.sandbox_fusion.url=u", "reward_model.sandbox_fusion.url: expected null, got u; run code in"),
        ("reward_model.reward_loop_module_path=m", "expected null, got m; give custom_reward_function.path"),
        ("trainer.v1.sampler.custom_sampler.path=a.py", "expected null, got a.py; algorithm.filter_groups and trackw"),
        ("trainer.v1.sampler.sync_refill_failed_groups=true", "expected False, got True; missing rollouts of a group"),
        ("async_training.compute_prox_log_prob=true", "expected False, got True; algorithm.rollout_correction.bypass"),
        (
            "async_training.use_rollout_log_probs=true",
            "use_rollout_log_probs: expected the value of algorithm.rollout_correction.bypass_mode, which is False, "
            "got True; set algorithm.rollout_correction.bypass_mode alone",
        ),
        (
            "actor_rollout_ref.rollout.response_length=1024",
            "response_length: expected the value of data.max_response_length, which is 512, got 1024; set data.max_",
        ),
        (
            "critic.rollout_n=4",
            "critic.rollout_n: expected the value of actor_rollout_ref.rollout.n, which is 1, got 4",
        ),
        (
            "actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs-mode=raw_logprobs",
            "engine_kwargs.vllm: expected arguments that the rollout service leaves open, got logprobs-mode",
        ),
    ],
)
def test_a_value_that_would_change_the_training_is_refused_with_its_remedy(line: str, message: str):
    with pytest.raises(TrackwayError, match=re.escape(message)):
        compose([line])


def test_a_dry_run_collects_what_trackway_lacks_and_plans_without_it():
    lacks = {
        "model_engine": ("megatron", "dp", "megatron"),
        "algorithm.use_pf_ppo": ("true", "False", "True"),
        "actor_rollout_ref.actor.optim.optimizer": ("SGD", "AdamW", "SGD"),
        "+actor_rollout_ref.rollout.enable_rollout_routing_replay": ("true", "False", "True"),
        "actor_rollout_ref.rollout.name": ("trtllm", "vllm, sglang, hf or torch", "trtllm"),
        "global_profiler.tool": ("nsys", "torch", "nsys"),
    }
    lines = [f"{key}={value}" for key, (value, _, _) in lacks.items()]
    listed: list[UnsupportedKey] = []

    config = compose([*lines, "reward.reward_manager.name=batch", "data.seed=3"], unsupported=listed)

    found = {key.key: (key.expected, key.got) for key in listed}
    batch = found.pop("reward.reward_manager.name")
    assert found == {key.lstrip("+"): (expected, got) for key, (_, expected, got) in lacks.items()}
    assert batch[0] == "a manager that scores each response by itself"
    assert all(key.remedy for key in listed)
    assert leaves(config.model_dump(mode="json")) == leaves(compose(["data.seed=3"]).model_dump(mode="json"))
    with pytest.raises(TrackwayError) as refused:
        compose([*lines, "reward.reward_manager.name=batch"])
    assert str(refused.value).split("; ")[0] == listed[0].sentence.split("; ")[0]
    assert all(key.sentence in str(refused.value) for key in listed)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model_engine=megatrom", "model_engine: expected dp, got megatrom"),
        (f"{ACTOR}.strategy=1", f"{ACTOR}.strategy: expected fsdp or fsdp2, got 1"),
        (
            "actor_rollout_ref.model.mtp.enable=perhaps",
            "actor_rollout_ref.model.mtp.enable: expected False, got perhaps",
        ),
        (f"{ACTOR}.optim.optimizer=true", f"{ACTOR}.optim.optimizer: expected AdamW, got True"),
        ("actor_rollout_ref.model.lora.rank=many", "lora.rank: expected 0, got many"),
        ("actor_rollout_ref.model.lora.rank=true", "lora.rank: expected 0, got True"),
        ("actor_rollout_ref.rollout.name=vlm", "actor_rollout_ref.rollout.name: Input should be 'vllm'"),
        ("critic.rollout_n=4", "critic.rollout_n: expected the value of actor_rollout_ref.rollout.n"),
        ("critic.rolout_n=4", "unknown key 'critic.rolout_n'"),
        ("data.train_batch_size=0", "data.train_batch_size: Input should be greater than or equal to 1"),
    ],
)
def test_a_dry_run_refuses_what_verl_would_not_take_either(line: str, message: str):
    listed: list[UnsupportedKey] = []

    with pytest.raises(TrackwayError, match=re.escape(message)):
        compose([line, "reward.reward_manager.name=batch", "algorithm.use_pf_ppo=true"], unsupported=listed)

    assert listed == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["critic.enable=false"], "critic.enable: expected true or null with algorithm.adv_estimator=gae, got false"),
        (
            ["critic.ppo_mini_batch_size=2048"],
            "critic.ppo_mini_batch_size: expected at most data.train_batch_size (1024)",
        ),
    ],
)
def test_a_value_model_that_gae_cannot_train_is_refused(lines: list[str], message: str):
    with pytest.raises(TrackwayError, match=re.escape(message)):
        compose(["algorithm.adv_estimator=gae", *lines])


def test_an_adapter_brings_its_rank_alpha_and_layers_unless_a_rank_is_given(tmp_path: Path):
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(adapter))
    path = f"+actor_rollout_ref.model.lora_adapter_path={tmp_path}"

    model = compose([path]).actor_rollout_ref.model
    given = compose([path, "actor_rollout_ref.model.lora_rank=2"]).actor_rollout_ref.model
    elsewhere = compose([f"{path}/gone"]).actor_rollout_ref.model

    assert (model.lora_rank, model.lora_alpha, model.target_modules, model.lacks_rank) == (4, 8, ["q_proj"], False)
    assert (given.lora_rank, given.lora_alpha, given.target_modules) == (2, 16, "all-linear")
    assert elsewhere.lacks_rank
    file.write_text("{}")
    with pytest.raises(TrackwayError, match=r"lora_adapter_path: expected PEFT's settings in .*, got KeyError"):
        compose([path])


def test_the_value_that_is_trained_anyway_is_accepted_and_null_too():
    lines = ["critic.model.lora_rank=0", "reward_model.enable=null", "reward_model.reward_manager=dapo"]
    lines += ["++actor_rollout_ref.model.override_config.attn_implementation=sdpa"]

    told = no_effect(compose(lines).trackway.ignored_keys)

    assert [key for key, _ in told] == [
        "reward_model.enable",
        "reward_model.reward_manager",
        "actor_rollout_ref.model.override_config.attn_implementation",
    ]


def test_the_reward_managers_that_score_as_in_verl_are_accepted():
    alike = ["naive", "dapo", "prime", "gdpo", "rate_limited", "remote", "null"]

    names = [compose([f"reward.reward_manager.name={name}"]).reward.reward_manager.name for name in alike]
    batch = compose(["reward.reward_manager.name=batch", "trackway.scores_are_independent=true"])

    assert names == [*alike[:-1], None]
    assert batch.reward.reward_manager.name == "batch"


@pytest.mark.parametrize(
    ("manager", "is_refused"), [("naive", True), ("prime", True), ("dapo", False), ("null", False)]
)
def test_a_penalty_on_long_responses_that_the_named_manager_has_not_is_refused(manager: str, is_refused: bool):
    buffer = ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=9"]

    if is_refused:
        with pytest.raises(TrackwayError, match=f"expected dapo with .*enable=true, got {manager}, which ignores"):
            compose([f"reward.reward_manager.name={manager}", *buffer])
    else:
        compose([f"reward.reward_manager.name={manager}", *buffer])


def test_files_of_tools_may_be_given_to_the_length_filter_too():
    path = "actor_rollout_ref.rollout.multi_turn.tool_config_path"

    assert compose([f"{path}=t.yaml", "data.tool_config_path=t.yaml"]).trackway.ignored_keys == [
        "data.tool_config_path"
    ]


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_key_that_verl_never_reads_is_accepted_with_that_reason(value: str):
    told = no_effect(compose([f"actor_rollout_ref.rollout.do_sample={value}"]).trackway.ignored_keys)

    assert told == [
        ("actor_rollout_ref.rollout.do_sample", "verl 0.9.1 never reads it; rollout.temperature decides"),
    ]


def test_every_key_that_is_refused_is_named_with_its_remedy():
    keys = [f"actor_rollout_ref.actor.megatron.key_{number}" for number in range(12)]

    with pytest.raises(TrackwayError) as caught:
        compose([f"+{key}=1" for key in keys])

    remedy = f"expected null, got 1; {ONLY['model_engine'].remedy}"
    assert caught.value.message.split("; actor") == [
        f"{'actor' if number == 0 else ''}{key.removeprefix('actor')}: {remedy}" for number, key in enumerate(keys)
    ]


def test_a_key_that_repeats_another_one_says_so():
    lines = ["data.max_response_length=64", "actor_rollout_ref.rollout.response_length=64", "critic.rollout_n=null"]

    assert no_effect(compose(lines).trackway.ignored_keys) == [
        ("actor_rollout_ref.rollout.response_length", "data.max_response_length decides; another value is refused"),
        ("critic.rollout_n", "actor_rollout_ref.rollout.n decides; another value is refused"),
    ]


def test_arguments_of_the_engine_and_of_the_chat_template_are_free():
    config = compose(
        [
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8",
            "++actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL",
            "+data.apply_chat_template_kwargs.enable_thinking=false",
        ]
    )

    vllm = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {
        "kv_cache_dtype": "fp8",
        "compilation_config": {"cudagraph_mode": "FULL"},
    }
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert given_to_deployment(config) == [
        f"{vllm}.kv_cache_dtype",
        f"{vllm}.compilation_config.cudagraph_mode",
        "data.apply_chat_template_kwargs.enable_thinking",
    ]


def test_a_configuration_survives_the_wire_and_keeps_its_notes():
    sent = compose(["trainer.balance_batch=true", "data.train_batch_size=512"])

    received = resolve(sent.model_dump(mode="json"))

    assert received == sent
    assert received.trackway.ignored_keys == ["trainer.balance_batch"]


def test_the_demo_preset_is_the_measured_recipe():
    config = compose([], config_name="tiny_demo")

    actor = config.actor_rollout_ref.actor
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (12, 8)
    assert (actor.optim.lr, actor.optim.betas, actor.optim.lr_warmup_steps) == (5e-4, (0.9, 0.95), 5)
    assert config.actor_rollout_ref.rollout.val_kwargs.model_dump() == {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "n": 1,
    }
    assert (actor.optim.lr_scheduler_type, actor.optim.min_lr_ratio) == ("cosine", 0.1)
    assert (config.trainer.total_training_steps, config.traced_prompts) == (30, 2)
    trace = config.actor_rollout_ref.rollout.trace
    assert (trace.backend, trace.token2text) == ((TraceBackend.MLFLOW,), True)


def test_an_unknown_preset_names_the_ones_there_are():
    names = [
        *("dapo", "default", "dr_grpo", "fully_async_ppo_trainer", "grpo", "gspo", "one_step_off_ppo_trainer"),
        *("ppo", "ppo_trainer", "reinforce_plus_plus", "rloo", "sft", "tiny_demo"),
    ]
    with pytest.raises(TrackwayError, match=f"found: {', '.join(names)}"):
        compose([], config_name="huge_demo")
    assert sorted(path.stem for path in PRESETS.glob("*.yaml")) == names


def test_every_key_has_a_sentence_and_none_is_both_honoured_and_without_effect():
    keys = known_keys()

    assert [key for key, sentence in keys.items() if not sentence.endswith(".")] == []
    assert set(keys) & set(NO_EFFECT) == set()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({f"k{number}": 1 for number in range(4097)}, "expected a configuration of at most 4096 keys, got 4097"),
        ({"x" * 201: 1}, f"expected keys of at most 200 characters, got '{'x' * 40}' of 201"),
        ({"data": {"train_files": ["a"] * 16_385}}, "data.train_files: expected at most 16384 items, got 16385"),
        ({"data": {"train_files": "a" * 16_385}}, "data.train_files: expected at most 16384 characters, got 16385"),
    ],
)
def test_a_configuration_of_no_reasonable_size_is_refused(tree: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(TrackwayError) as refused:
        resolve(tree)
    assert refused.value.message.startswith(message)


def test_only_the_first_ten_unknown_keys_are_looked_up() -> None:
    with pytest.raises(TrackwayError) as refused:
        resolve({f"nonsense_{number:04}": 1 for number in range(4000)})
    assert refused.value.message.count("unknown key") == 10


@pytest.mark.parametrize("prefix", ["", "+reward."])
def test_a_reward_function_is_read_in_both_spellings_of_verl(prefix: str):
    section = f"{prefix}custom_reward_function"
    words = [f"{section}.path=rewards.py", f"{section}.name=score", f"{section}.reward_kwargs.share=0.5"]

    function = compose(words).custom_reward_function

    assert (function.path, function.name, function.reward_kwargs) == ("rewards.py", "score", {"share": 0.5})


def test_any_key_is_known_below_reward_kwargs_only():
    whole = compose(["custom_reward_function.reward_kwargs={limits: {low: 1}}"])

    assert whole.custom_reward_function.reward_kwargs == {"limits": {"low": 1}}
    with pytest.raises(TrackwayError, match=r"unknown key 'custom_reward_function\.share'"):
        compose(["custom_reward_function.share=0.5"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["trackway.dtype=float32", "critic.fsdp.model_dtype=bf16"],
            "trackway.dtype: expected bfloat16 with fsdp_config",
        ),
        (
            [f"{ACTOR}.fsdp_config.dtype=fp32", f"{ACTOR}.fsdp_config.model_dtype=bf16"],
            f"{ACTOR}.fsdp_config.dtype: expected bfloat16 with fsdp_config.model_dtype=bf16, got fp32; leave one",
        ),
    ],
)
def test_bfloat16_weights_compute_in_bfloat16(lines: list[str], message: str):
    with pytest.raises(TrackwayError, match=re.escape(message)):
        compose(lines)
