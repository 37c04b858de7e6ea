"""The forecast of a GPU's memory against what PyTorch holds, and what it says of GPUs that are too small."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.config import LearnerConfig
from trackway.learner.gpu_memory import (
    ADVICE,
    CONTEXT_BYTES,
    EngineMemory,
    LearnerMemory,
    ModelSize,
    doubt,
    forecast_learner,
    learner_memory,
    shortages,
    with_advice,
)
from trackway.learner.learner import Learner
from trackway.learner.optimizer import state_tensors
from trackway.run_config.placement import Placement
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]
GIB = 2**30
FSDP = "actor_rollout_ref.actor.fsdp_config"
QWEN3_8B = {
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
}
"""https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json"""


@pytest.fixture(scope="module")
def qwen3_8b() -> ModelSize:
    return ModelSize.of(AutoConfig.for_model("qwen3", **QWEN3_8B))


def forecast(config: LearnerConfig, size: ModelSize, ranks: int = 1) -> LearnerMemory:
    return learner_memory(config, Placement(ranks), size, size.with_value_head())


def test_the_parameters_of_a_model_are_counted_without_its_weights(qwen3_8b: ModelSize):
    assert qwen3_8b.parameters == qwen3_8b.trained == 8_190_735_360  # "8.2B" on its model card
    assert qwen3_8b.root + 36 * qwen3_8b.layer == qwen3_8b.parameters
    assert (qwen3_8b.queries, qwen3_8b.keys, qwen3_8b.inner) == (4096, 1024, 12288)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {f"{FSDP}.model_dtype": "bf16", "dtype": "bfloat16"}])
def test_weights_gradients_and_moments_are_the_bytes_that_pytorch_holds(
    tiny_model: Path, rollout: Rollout, settings: dict[str, object]
):
    config = learner_config(tiny_model, lr=1e-2, **settings)
    learner = Learner(config)
    parameters, gradients = list(learner.policy.model.parameters()), list[int]()
    learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))
    )
    learner.update([rollout(0, 0, 1.0), rollout(0, 1, 0.0)])

    held = forecast_learner(config, Placement()).parts
    assert held["weights"] == sum(parameter.nbytes for parameter in parameters)
    assert held["gradients"] == gradients[0]
    assert held["moments"] == sum(tensor.nbytes for tensor in state_tensors(learner.optimizer) if tensor.dim())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_activations_and_copies_are_within_a_quarter_of_what_autograd_keeps(
    tmp_path: Path, family: str, dtype: str, checkpoints: bool
):
    layers = 12 if checkpoints else 4  # of few, what the model keeps of the embeddings shows
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **shape, num_key_value_heads=2, head_dim=32, vocab_size=64, pad_token_id=None)
    ).save_pretrained(tmp_path)
    config = learner_config(
        tmp_path,
        dtype=dtype,
        gradient_checkpointing=checkpoints,
        mini_batch_size=2,
        **{"data.max_prompt_length": 100, "data.max_response_length": 156},
    )
    policy = Learner(config).policy
    own = {tensor.untyped_storage().data_ptr() for tensor in (*policy.model.parameters(), *policy.model.buffers())}
    kept = dict[int, torch.UntypedStorage]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), policy._autocast():
        policy.model.base_model(input_ids=torch.zeros(2, 256, dtype=torch.int64), use_cache=False)

    measured = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)
    size = ModelSize.read(str(tmp_path))
    held = forecast(config, size).parts
    copies = held["gathered"] - (64 * 128 * 2 if dtype == "bfloat16" else 0)  # the head is not computed here
    expected = held["activations"] + copies
    if checkpoints:  # the backward pass computes a layer's activations again, with its copies
        without = config.model.with_values({"enable_gradient_checkpointing": False})
        expected -= forecast(replace(config, model=without), size).parts["activations"] // layers + copies
    assert 0.75 < expected / measured < 1.25


def test_a_share_of_each_rank_and_offload_follow_the_keys(qwen3_8b: ModelSize):
    short = {"micro_batch_size": 1, "data.max_prompt_length": 8, "data.max_response_length": 8}

    def held(ranks: int = 1, **settings: object) -> list[float]:
        """Bytes of a parameter over all ranks: weights, gradients, moments, and between updates."""
        memory = forecast(learner_config("m", dtype="bfloat16", **short, **settings), qwen3_8b, ranks)
        parts = [memory.parts[name] for name in ("weights", "gradients", "moments")]
        return [round(count * ranks / qwen3_8b.parameters, 6) for count in (*parts, memory.resting - CONTEXT_BYTES)]

    assert held() == held(8) == [4, 4, 8, 12]
    assert held(8, fsdp_size=2) == [16, 16, 32, 48]
    assert held(param_offload=True, optimizer_offload=True) == [4, 4, 8, 0]
    assert held(2, param_offload=True) == [0, 0, 0, 0]  # FSDP2 steps the optimizer in main memory
    assert held(2, optimizer_offload=True) == [4, 4, 8, 4]
    assert held(1, **{f"{FSDP}.model_dtype": "bf16"}) == [2, 2, 4, 6]


def test_a_reference_and_a_value_model_are_counted_beside_the_policy(qwen3_8b: ModelSize):
    def others(**settings: object) -> float:
        memory = forecast(learner_config("m", dtype="bfloat16", micro_batch_size=1, **settings), qwen3_8b)
        return round((memory.resting - CONTEXT_BYTES) / qwen3_8b.parameters, 3)

    head = 151936 * 4096 / qwen3_8b.parameters
    assert others() == 12
    assert others(use_kl_loss=True) == 16
    assert others(use_kl_loss=True, ref_param_offload=True) == 12
    assert others(use_kl_loss=True, lora_rank=4) == 12  # the same model without its adapter
    assert others(**{"algorithm.adv_estimator": "gae"}) == round(12 + 12 * (1 - head), 3)


def test_passes_are_bounded_by_the_keys_that_limit_them(qwen3_8b: ModelSize):
    lengths = {"data.max_prompt_length": 1000, "data.max_response_length": 3000}

    def activations(ranks: int = 1, **settings: object) -> float:
        """In tokens' worth."""
        config = learner_config("m", dtype="bfloat16", mini_batch_size=8, **lengths, **settings)
        row = learner_config("m", dtype="bfloat16", mini_batch_size=1, **{**lengths, "data.max_prompt_length": 1})
        each = forecast(row, qwen3_8b, ranks).parts["activations"] / 3001
        return round(forecast(config, qwen3_8b, ranks).parts["activations"] / each)

    assert activations() == 8 * 4000
    assert activations(micro_batch_size=2) == 2 * 4000
    assert activations(4) == 2 * 4000  # its share of the mini-batch
    dynamic = {"use_dynamic_bsz": True}
    assert activations(**dynamic, ppo_max_token_len_per_gpu=10_000) == 10_000
    assert activations(**dynamic, ppo_max_token_len_per_gpu=100) == 4000  # a longer row is computed alone
    assert activations(2, **dynamic, ppo_max_token_len_per_gpu=1000, ulysses_size=2) == 2000


def test_logits_exist_for_a_chunk_of_tokens_where_they_are_large(qwen3_8b: ModelSize):
    def values(**settings: object) -> float:
        parts = forecast(learner_config("m", dtype="bfloat16", mini_batch_size=2, **settings), qwen3_8b).parts
        return parts["logits"] / 151936 / 16

    lengths = {"data.max_prompt_length": 1000, "data.max_response_length": 1000}
    assert values(**lengths) == 1024
    assert values(**lengths, chunk_size=512) == 512
    assert values(**lengths, use_fused_kernels=False) == 4000
    assert values(**dict.fromkeys(lengths, 100)) == 400


def test_a_float32_head_has_larger_logits_and_no_copy(qwen3_8b: ModelSize):
    rounded = learner_config("m", dtype="bfloat16", mini_batch_size=2)
    exact = replace(rounded, float32_head=True)

    parts = [forecast(config, qwen3_8b).parts for config in (rounded, exact)]

    assert parts[1]["logits"] * 16 == parts[0]["logits"] * 20
    assert parts[0]["gathered"] - parts[1]["gathered"] == 2 * 151936 * 4096


def test_an_engine_keeps_the_memory_that_its_weights_leave_for_the_kv_cache(qwen3_8b: ModelSize):
    engine = EngineMemory.of(qwen3_8b, gpus=2, longest=4096, share=0.5, sequences=256, sleeps=True)

    assert engine.weights == 8_190_735_360
    assert engine.token == 2 * 36 * 1024 * 2 // 2
    assert engine.cached_tokens(80 * GIB) == (40 * GIB - 8_190_735_360 - CONTEXT_BYTES) // engine.token
    assert EngineMemory.of(qwen3_8b, gpus=16, longest=1, share=0.5, sequences=1, sleeps=True).token == 2 * 36 * 128 * 2
    embedded = EngineMemory.of(qwen3_8b, gpus=1, longest=100, share=None, sequences=4, sleeps=True)
    assert embedded.taken(80 * GIB) == 2 * 8_190_735_360 + 400 * embedded.token + CONTEXT_BYTES


LEARNER = LearnerMemory({"weights": 30 * GIB, "activations": 25 * GIB}, resting=30 * GIB)
ENGINE = EngineMemory(4 * GIB, 2**17, 8192, 0.5, 256, sleeps=True)


def test_a_gpu_that_is_too_small_for_sure_is_told_apart_from_one_that_may_be():
    assert shortages(LEARNER, ENGINE, 80 * GIB) == []
    assert [said.partition(";")[0] for said in shortages(LEARNER, ENGINE, 24 * GIB)] == [
        "expected at most 24.0 GiB, the GPU's memory, for the learner's weights, gradients and moments, got 30.0 GiB",
        "expected at most 12.0 GiB for the learner while engines are awake, got 30.0 GiB",
    ]
    assert [said.partition(";")[0] for said in shortages(None, ENGINE, 8 * GIB)] == [
        "expected at least 5.5 GiB for an engine's weights and the KV cache of 8192 tokens, got 4.0 GiB of the GPU's "
        "8.0 GiB"
    ]
    assert doubt(LEARNER, ENGINE, 80 * GIB) == doubt(LEARNER, None, 56 * GIB) == ""
    assert doubt(LEARNER, ENGINE, 55 * GIB).startswith(
        "whether an update fits into 55.0 GiB: its peak is forecast as 55.0 GiB, of which 25.0 GiB are estimates. The "
    )
    awake = EngineMemory(4 * GIB, 2**17, 8192, 0.5, 256, sleeps=False)
    assert doubt(LEARNER, awake, 80 * GIB)  # 55 beside 40


def test_a_gpu_without_memory_is_told_with_the_keys_that_help_and_the_forecast(tiny_model: Path):
    config, error = learner_config(tiny_model), torch.OutOfMemoryError("CUDA out of memory")
    with_advice(error, config, Placement())
    with_advice(other := torch.AcceleratorError("CUDA error"), config, Placement())
    with_advice(
        lost := torch.OutOfMemoryError(),
        replace(config, model=config.model.with_values({"path": "/no/model"})),
        Placement(),
    )

    assert error.__notes__ == [
        ADVICE,
        f"Forecast for each GPU of the learner: {forecast_learner(config, Placement()).words}.",
    ]
    assert not hasattr(other, "__notes__")
    assert lost.__notes__ == [ADVICE]
