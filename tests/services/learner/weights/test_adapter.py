"""LoRA: only the adapter trains and is saved, engines get merged weights, the reference is the base model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from trackway.learner.learner import Learner
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]
IDS = [5, 9, 2, 33, 7, 1, 60]
LORA = {"lora_rank": 4, "lora_alpha": 8, "lr": 1e-2}


@pytest.fixture
def batch(rollout: Rollout) -> list[Trajectory]:
    return [rollout(row // 2, row % 2, float(row % 2), response_ids=[row, 2, 3, 4, 5, 6]) for row in range(4)]


def adapted(model: Path, **settings: object) -> Learner:
    return Learner(learner_config(model, dtype="float64", **LORA | settings))


def transformers_logprobs(folder: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(IDS[1:]).unsqueeze(-1)).squeeze(-1).tolist()


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def bits(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.policy.model.state_dict().items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float = 0.0) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def test_a_new_adapter_changes_nothing(tiny_model: Path, tmp_path: Path):
    learner, whole = adapted(tiny_model), adapted(tiny_model, lora_rank=0)

    assert logprobs_of(learner, IDS) == logprobs_of(whole, IDS)
    learner.export(tmp_path / "adapted")
    whole.export(tmp_path / "whole")
    assert_equal(weights(tmp_path / "adapted"), weights(tmp_path / "whole"))


def test_exported_weights_answer_as_the_model_with_its_adapter(
    tiny_model: Path, batch: list[Trajectory], tmp_path: Path
):
    learner = adapted(tiny_model)
    base = logprobs_of(learner, IDS)
    learner.update(batch)

    learner.export(tmp_path)

    logprobs = logprobs_of(learner, IDS)
    assert transformers_logprobs(tmp_path) == pytest.approx(logprobs, abs=1e-10)
    assert max(abs(now - before) for now, before in zip(logprobs, base, strict=True)) > 1e-2
    (scored,) = learner.policy.published_logprobs([IDS])
    assert scored.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert weights(tmp_path).keys() == weights(tiny_model).keys() | {"lm_head.weight"}


def test_the_update_is_scaled_once_however_often_it_is_published(
    tiny_model: Path, batch: list[Trajectory], tmp_path: Path
):
    learner = adapted(tiny_model)
    learner.update(batch)
    before = bits(learner)

    for name in ("first", "second"):
        learner.export(tmp_path / name)
        learner.proof(tmp_path / name, 1)

    assert_equal(weights(tmp_path / "first"), weights(tmp_path / "second"))
    assert_equal(bits(learner), before)
    name = "model.layers.1.mlp.down_proj"
    update = before[f"{name}.lora_B.default.weight"] @ before[f"{name}.lora_A.default.weight"] * 8 / 4
    merged = before[f"{name}.base_layer.weight"] + update
    assert_equal({name: weights(tmp_path / "first")[f"{name}.weight"]}, {name: merged}, atol=1e-14)


def test_only_the_adapter_is_trained(tiny_model: Path, batch: list[Trajectory]):
    learner = adapted(tiny_model)
    before = bits(learner)

    learner.update(batch)

    changed = {name for name, tensor in bits(learner).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(changed) == 2 * 2 * 7
    assert sum(map(len, (group["params"] for group in learner.optimizer.param_groups))) == 2 * 2 * 7


def test_the_checkpoint_holds_the_adapter_and_training_goes_on_exactly(
    tiny_model: Path, batch: list[Trajectory], tmp_path: Path
):
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    learner = adapted(tiny_model, **settings)
    learner.update(batch)
    learner.save(tmp_path)
    straight = learner.update(batch).metrics

    resumed = adapted(tiny_model, **settings | {"seed": 1})
    resumed.load(tmp_path)

    assert {name.split(".")[-3] for name in weights(tmp_path)} == {"lora_A", "lora_B"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "extra_state.safetensors",
        "model.safetensors",
        "optim.safetensors",
    ]
    assert resumed.update(batch).metrics == straight
    assert_equal(bits(resumed), bits(learner))


def test_an_adapter_is_not_loaded_onto_another_base_model(tiny_model: Path, batch: list[Trajectory], tmp_path: Path):
    learner = adapted(tiny_model)
    learner.update(batch)
    learner.save(tmp_path / "checkpoint")
    learner.export(tmp_path / "other")

    with pytest.raises(ValueError, match=r"expected the base model that the adapter was trained on, got .*/other"):
        adapted(tmp_path / "other").load(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="resume with the model and the LoRA keys that the run started from"):
        adapted(tiny_model, lora_rank=2).load(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="resume with the model and the LoRA keys that the run started from"):
        adapted(tiny_model, lora_rank=0).load(tmp_path / "checkpoint")


@pytest.mark.parametrize("kl_loss_type", ["low_var_kl", "full"])
def test_the_reference_is_the_base_model(tiny_model: Path, batch: list[Trajectory], kl_loss_type: str):
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kl_loss_type}
    learner, second_model = adapted(tiny_model, **settings), adapted(tiny_model, **settings)
    learner.update(batch)
    second_model.update(batch)
    second_model.reference = Learner(
        learner_config(tiny_model, dtype="float64", use_kl_loss=True, kl_loss_type=kl_loss_type)
    ).reference

    ours, theirs = learner.update(batch).metrics, second_model.update(batch).metrics

    assert ours == pytest.approx(theirs, abs=1e-12)
    assert ours["actor/kl_loss"] > 1e-4


def test_layers_are_chosen_by_name_by_expression_and_by_exclusion(tiny_model: Path):
    def layers(**settings: object) -> set[str]:
        names = adapted(tiny_model, **settings).policy.tensors()
        return {name.removeprefix("model.layers.").split(".lora_")[0] for name in names}

    assert layers(target_modules=["q_proj", "v_proj"]) == {f"{i}.self_attn.{x}_proj" for i in "01" for x in "qv"}
    assert layers(target_modules=r".*\.1\.mlp\.(up|down)_proj") == {"1.mlp.up_proj", "1.mlp.down_proj"}
    assert layers(target_modules=["q_proj", "k_proj"], exclude_modules=r".*\.0\..*") == {
        "1.self_attn.q_proj",
        "1.self_attn.k_proj",
    }


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("target", "error"),
    [
        (["lm_head"], "expected model.target_modules to name linear layers other than the head, got .*names lm_head"),
        (["embed_tokens"], "which names model.embed_tokens; name others, or take all-linear"),
        (["nothing"], "nothing"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(tiny_model: Path, target: list[str], error: str):
    with pytest.raises(ValueError, match=error):
        adapted(tiny_model, target_modules=target)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_layers_that_hold_their_weights_transposed_are_merged_so(batch: list[Trajectory], tmp_path: Path):
    gpt2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.5)
    GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    learner = adapted(tmp_path / "gpt2")
    learner.update(batch)

    learner.export(tmp_path / "out")

    assert transformers_logprobs(tmp_path / "out") == pytest.approx(logprobs_of(learner, IDS), abs=1e-10)


@pytest.mark.parametrize("setting", ["remove_padding", "gradient_checkpointing", "param_offload", "optimizer_offload"])
def test_adapters_train_alike_with(tiny_model: Path, batch: list[Trajectory], setting: str):
    plain, other = adapted(tiny_model), adapted(tiny_model, **{setting: True})

    for learner in (plain, other):
        learner.update(batch)

    assert_equal(other.policy.tensors(), plain.policy.tensors(), atol=1e-12)


def test_the_model_folder_stays_as_it_is(tiny_model: Path, batch: list[Trajectory], tmp_path: Path):
    shutil.copytree(tiny_model, tmp_path / "model")
    learner = adapted(tmp_path / "model")
    learner.update(batch)
    learner.export(tmp_path / "out")

    assert_equal(weights(tmp_path / "model"), weights(tiny_model))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_engines_get_the_adapter_alone_as_peft_loads_it(tiny_model: Path, batch: list[Trajectory], tmp_path: Path):
    learner = adapted(tiny_model)
    learner.update(batch)

    learner.export_to_engines(tmp_path / "adapter")

    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert learner.proof(tmp_path / "adapter", 1).digests == []
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    assert transformers_logprobs(tmp_path / "merged") == pytest.approx(logprobs_of(learner, IDS), abs=1e-10)


def test_with_merge_engines_get_whole_weights(tiny_model: Path, tmp_path: Path):
    learner = adapted(tiny_model, **{"actor_rollout_ref.model.lora.merge": True})

    learner.export_to_engines(tmp_path / "published")
    learner.export(tmp_path / "whole")

    assert_equal(weights(tmp_path / "published"), weights(tmp_path / "whole"))
    assert len(learner.proof(tmp_path / "published", 1).digests) == len(weights(tmp_path / "whole"))
