"""What ranks load of a folder, each its share, is what one process loads of it, in less memory."""

import re
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.services.trainer.learner_settings import learner_config
from tests.services.trainer.rank_processes import RankProcesses, rank_processes
from trackway.learner.config import LearnerConfig, PolicySettings
from trackway.learner.critic import WEIGHT
from trackway.learner.learner import Learner
from trackway.learner.policy import Policy
from trackway.learner.ranks.sharding import ALONE, Ranks, gathered

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "intermediate_size": 25,
}
"""Which no number of ranks divides."""
EXPERTS: dict[str, Any] = {
    **SIZES,
    "hidden_size": 16,  # the kernel of expert layers takes multiples of 16 bytes only
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Qwen2, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "GPT-2, tied": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=20, n_layer=2, n_head=2, n_positions=32)),
    "Qwen3 with experts, whose weights are converted": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)),
}
GAE = {"algorithm.adv_estimator": "gae"}
SETTINGS: dict[str, dict[str, Any]] = {
    "a policy and its reference": {"use_kl_loss": True},
    "a policy with bfloat16 weights": {"actor_rollout_ref.actor.fsdp_config.model_dtype": "bf16"},
    "LoRA": {"lora_rank": 3},
    "a value model": GAE,
    "LoRA of a value model": {**GAE, "critic.model.lora_rank": 3},
}
LARGE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1408,
}
PEAK_SHARE = {2: 0.75, 4: 0.5}
"""Most of a model's bytes that loading may take in a rank, by their number."""


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankProcesses]:
    with rank_processes(2) as processes:
        yield processes


@pytest.fixture(
    scope="module",
    params=[1, 2, pytest.param(4, marks=pytest.mark.extended)],  # four load as two do
)
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with rank_processes(request.param) as processes:
        yield processes


def saved(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    """Saves a model with random weights, so that none has its initial value, and returns the folder."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    assert model.generation_config is not None
    model.generation_config.max_length = 33
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def held(learner: Learner) -> dict[str, Tensor]:
    """All weights and buffers of a learner's models, whole, in the first rank."""
    policies = {"policy": learner.policy, "reference": learner.reference}
    if learner.critic is not None:
        policies["critic"] = learner.critic.model
    found: dict[str, Tensor] = {}
    for name, policy in policies.items():
        if isinstance(policy, Policy):
            tensors = gathered(policy.model.state_dict() | dict(policy.model.named_buffers()), keep=True)
            found |= {f"{name} {of}": tensor for of, tensor in tensors.items()}
            found |= {
                f"{name} {of} is trained": torch.tensor(p.requires_grad) for of, p in policy.model.named_parameters()
            }
    return found


def loaded(ranks: Ranks, config: LearnerConfig, folder: Path | None = None) -> dict[str, Tensor]:
    """The weights and buffers of a new learner. With a folder, exports them there, and as shards to a second folder."""
    learner = Learner(config, ranks)
    if folder is not None:
        learner.export(folder)
        learner.policy.export_shares(folder.with_suffix(".shares"))
    return held(learner)


def same(ranks: RankProcesses, config: LearnerConfig, folder: Path | None = None) -> None:
    expected = loaded(ALONE, config, None if folder is None else folder / "one")
    for own in ranks.run(loaded, config, None if folder is None else folder / "several"):
        torch.testing.assert_close(own, expected, rtol=0, atol=0)


@pytest.mark.parametrize("model", MODELS)
def test_ranks_load_what_one_process_loads_and_export_the_same_folder(ranks: RankProcesses, tmp_path: Path, model: str):
    folder = saved(MODELS[model](), tmp_path / "model")

    same(ranks, learner_config(folder, use_kl_loss=True, fsdp_size=2 if "Qwen3" in model else -1), tmp_path)

    files = [{path.name: path.read_bytes() for path in (tmp_path / of).iterdir()} for of in ("several", "one")]
    assert files[0] == files[1]
    shares = [load_file(path) for path in (tmp_path / "several.shares").glob("*.safetensors")]
    whole = load_file(tmp_path / "one" / "model.safetensors")
    torch.testing.assert_close(dict(ChainMap(*shares)), whole, rtol=0, atol=0)


@pytest.mark.parametrize("setting", SETTINGS)
def test_adapters_and_value_heads_are_those_of_one_process(ranks: RankProcesses, tmp_path: Path, setting: str):
    folder = saved(MODELS["Qwen2, tied"](), tmp_path / "model")
    weights = load_file(folder / "model.safetensors") | {WEIGHT: torch.full((1, SIZES["hidden_size"]), 0.5)}
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    same(ranks, learner_config(folder, **SETTINGS[setting]))


def test_what_a_model_keeps_in_float32_is_so_in_ranks_too_or_refused_by_name(two_ranks: RankProcesses, tmp_path: Path):
    bfloat16 = {"dtype": "bfloat16", **SETTINGS["a policy with bfloat16 weights"]}
    sizes: dict[str, Any] = SIZES | {"hidden_size": 16, "moe_intermediate_size": 8}
    experts: dict[str, Any] = {
        "n_routed_experts": 3,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    dots = Dots1ForCausalLM(Dots1Config(**sizes, **experts, first_k_dense_replace=1))
    ernie = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**sizes, moe_num_experts=3, moe_k=2))

    same(two_ranks, learner_config(saved(dots, tmp_path / "a buffer"), **bfloat16))
    config = learner_config(saved(ernie, tmp_path / "a parameter"), **bfloat16)
    kept = [name for name, weight in loaded(ALONE, config).items() if "gate" in name and weight.dtype == torch.float32]

    assert "policy model.layers.1.mlp.gate.weight" in kept
    assert two_ranks.run(refusals, config)[0].startswith(
        "expected fsdp_config.model_dtype=fp32 for several ranks of Ernie4_5_MoeForCausalLM, which keeps model.layers.1"
    )


def test_files_of_an_index_are_read_and_those_beside_them_are_not(two_ranks: RankProcesses, tmp_path: Path):
    folder = saved(MODELS["Llama"](), tmp_path / "model", max_shard_size="5KB")
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    save_file({"lm_head.weight": torch.zeros(61, 20)}, folder / "model-00009-of-00009.safetensors")

    same(two_ranks, learner_config(folder))

    assert len(names) > 3


def test_a_folder_of_torch_files_alone_is_loaded_by_the_first_rank(two_ranks: RankProcesses, tmp_path: Path):
    folder = saved(MODELS["Qwen2, tied"](), tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    same(two_ranks, learner_config(folder, lora_rank=3))


def refusals(ranks: Ranks, config: LearnerConfig) -> str:
    """The error of a learner that cannot be made."""
    with pytest.raises(ValueError, match="expected") as raised:
        Learner(config, ranks)
    return str(raised.value)


def changed(folder: Path, weights: dict[str, Tensor | None]) -> LearnerConfig:
    """The model of a folder with these weights, or without them."""
    tensors: dict[str, Tensor | None] = {**load_file(folder / "model.safetensors"), **weights}
    copy = Path(shutil.copytree(folder, folder.parent / "changed", dirs_exist_ok=True))
    left = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(left, copy / "model.safetensors", {"format": "pt"})
    return learner_config(copy)


def test_weights_that_do_not_fit_the_model_are_refused_by_name(two_ranks: RankProcesses, tmp_path: Path):
    folder, norm = saved(MODELS["Qwen2, tied"](), tmp_path / "model"), "model.norm.weight"
    weights = f"expected the weights of Qwen2ForCausalLM in {folder.parent / 'changed'}"

    missing = changed(folder, {norm: None})
    expected = f"{weights}, got none for {norm}; give the folder of the whole model"
    assert [refusals(ALONE, missing), *two_ranks.run(refusals, missing)] == [expected] * 3
    assert two_ranks.run(refusals, changed(folder, {norm: torch.ones(21)}))[1] == (
        f"{weights}, got other shapes of {norm}; give the config.json of this model"
    )
    not_finite = changed(folder, {norm: torch.tensor([1.0] * 19 + [torch.nan])})
    expected = f"expected finite weights, got NaN or infinities in {norm} (1 of 20)"
    assert [refusals(ALONE, not_finite), *two_ranks.run(refusals, not_finite)] == [expected] * 3
    unequal = changed(folder, {"lm_head.weight": torch.zeros(61, 20)})
    untied = [refusals(ALONE, unequal), *two_ranks.run(refusals, unequal)]
    told = "expected lm_head.weight and model.embed_tokens.weight in .* to be equal, as its config.json ties them"
    assert all(re.match(told, error) for error in untied)


def peak_of_loading(ranks: Ranks, config: LearnerConfig) -> int:
    """Bytes by which making a policy raises the peak of the memory of this process."""
    status = Path("/proc/self/status")

    def peak() -> int:
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # starts the peak again
    before = peak()
    Policy(PolicySettings(config.model_path), ranks)
    return peak() - before


@pytest.mark.parametrize("count", PEAK_SHARE)
def test_loading_a_share_takes_less_memory_than_the_model_has(tmp_path: Path, count: int):
    folder = saved(Qwen3ForCausalLM(Qwen3Config(**LARGE, tie_word_embeddings=True)), tmp_path / "model")
    size = (folder / "model.safetensors").stat().st_size

    with rank_processes(count) as processes:  # new ones, which have no freed memory to use again
        peaks = processes.run(peak_of_loading, learner_config(folder))

    assert size > 200e6
    assert max(peaks) < PEAK_SHARE[count] * size, [round(peak / size, 2) for peak in peaks]
