"""The policy against transformers' own forward, and the folder it exports."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.services.trainer.learner_settings import learner_config
from trackway.clients.weights import WeightStore
from trackway.learner.learner import Learner
from trackway.learner.policy import Policy
from trackway.trainer.loop.weight_publisher import IpcSender
from trackway.wire.trajectory import Trajectory
from trackway.wire.weights import SharedMemory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]
LONGEST = {"actor_rollout_ref": 4321, "critic": 1234}
"""Longest sequence of a model that its folder does not name."""


def reference_logprobs(folder: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
    """transformers' logprobs of tokens 1..n-1 of one unpadded sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("micro_batch_size", [1, None])
def test_logprobs_equal_transformers_own_at_each_model_token(
    tiny_model: Path, rollout: Rollout, temperature: float, micro_batch_size: int | None
):
    long = rollout()
    short = rollout(prompt_ids=[5], response_ids=[6, 7], response_mask=[0, 1], response_logprobs=[0, -1])
    learner = Learner(learner_config(tiny_model, temperature=temperature, micro_batch_size=micro_batch_size))

    logprobs = learner.log_probs([long, short])

    of_long = reference_logprobs(tiny_model, long.prompt_ids + long.response_ids, temperature)
    of_short = reference_logprobs(tiny_model, [5, 6, 7], temperature)
    expected = [*of_long[2:4], 0.0, 0.0, *of_long[6:8]]
    assert logprobs[0] == pytest.approx(expected, abs=1e-5)
    assert logprobs[1] == pytest.approx([0.0, of_short[1]], abs=1e-5)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("key", ["attention_dropout", "resid_pdrop"])
def test_a_model_with_dropout_in_its_configuration_trains_without_it(
    tiny_model: Path, rollout: Rollout, tmp_path: Path, key: str, gradient_checkpointing: bool
):
    folder = tmp_path / "model"
    if key == "attention_dropout":
        shutil.copytree(tiny_model, folder)
        configuration = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**configuration, key: 0.5}))
    else:
        gpt2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.5)
        GPT2LMHeadModel(gpt2).save_pretrained(folder)
    assert getattr(AutoConfig.from_pretrained(folder), key) > 0
    trajectory = rollout()

    learner = Learner(learner_config(folder, gradient_checkpointing=gradient_checkpointing))
    [logprobs] = learner.log_probs([trajectory])

    reference = reference_logprobs(folder, trajectory.prompt_ids + trajectory.response_ids)
    assert logprobs == pytest.approx([*reference[2:4], 0.0, 0.0, *reference[6:8]], abs=1e-5)


def test_logprobs_of_a_trajectory_without_model_tokens_are_zeros(tiny_model: Path, rollout: Rollout):
    learner = Learner(learner_config(tiny_model))

    assert learner.log_probs([rollout(response_mask=[0] * 6)]) == [[0.0] * 6]


def test_export_of_a_tied_model_holds_an_explicit_head_and_loads_in_transformers(
    tiny_model: Path, rollout: Rollout, tmp_path: Path
):
    learner = Learner(learner_config(tiny_model, lr=1e-2))
    learner.update([rollout(rollout_n=0, score=1.0), rollout(rollout_n=1, response_ids=[1, 2, 3, 4, 5, 6])])

    learner.export(tmp_path)

    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    trained = rollout()
    ids = trained.prompt_ids + trained.response_ids
    assert reference_logprobs(tmp_path, ids)[2] == pytest.approx(learner.log_probs([trained])[0][0], abs=1e-6)
    assert reference_logprobs(tiny_model, ids)[2] != pytest.approx(learner.log_probs([trained])[0][0], abs=1e-3)


def test_a_run_may_take_the_model_to_read_longer_sequences_than_its_folder_names(tiny_model: Path, tmp_path: Path):
    longest = {f"{part}.model.override_config.max_position_embeddings": n for part, n in LONGEST.items()}
    keys: dict[str, object] = {"algorithm.adv_estimator": "gae", "use_kl_loss": True, **longest}
    learner = Learner(learner_config(tiny_model, **keys))
    assert isinstance(learner.reference, Policy) and learner.critic is not None

    learner.export(tmp_path)

    models = (learner.policy, learner.reference, learner.critic.model)
    assert [policy.model.config.max_position_embeddings for policy in models] == [4321, 4321, 1234]
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 4321
    assert AutoConfig.from_pretrained(tiny_model).max_position_embeddings != 4321


def test_export_copies_the_tokenizers_files_unchanged_and_is_readable_by_others(tiny_model: Path, tmp_path: Path):
    Learner(learner_config(tiny_model)).export(tmp_path)

    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (tiny_model / name).read_bytes()
    modes = {(tmp_path / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


def test_export_of_a_bfloat16_learner_is_bfloat16_while_its_masters_are_float32(tiny_model: Path, tmp_path: Path):
    learner = Learner(learner_config(tiny_model, dtype="bfloat16"))

    learner.export(tmp_path)

    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert {p.dtype for p in learner.policy.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"]
)
def test_a_model_dtype_is_that_of_its_own_models_weights(tiny_model: Path, key: str):
    keys = {"algorithm.adv_estimator": "gae", "use_kl_loss": True, f"{key}.model_dtype": "bf16"}
    learner = Learner(learner_config(tiny_model, dtype="bfloat16", **keys))
    assert isinstance(learner.reference, Policy) and learner.critic is not None
    models = {"actor": learner.policy, "ref": learner.reference, "critic": learner.critic.model}

    halved = {name for name, model in models.items() if {p.dtype for p in model.model.parameters()} == {torch.bfloat16}}

    assert halved == {name for name in models if f"{name}.fsdp" in key}


def test_an_offer_of_a_learner_has_the_tensors_that_it_exports_to_the_bit(tiny_model: Path, tmp_path: Path):
    learner, store = Learner(learner_config(tiny_model, dtype="bfloat16")), WeightStore(str(tmp_path / "store"))
    memory: dict[int, Tensor] = {}

    def share(buffer: Tensor) -> SharedMemory:
        memory[len(memory)] = buffer
        none = {"gpu": "", "handle": "", "counter": "", "event": ""}
        return SharedMemory(**none, size=0, offset=0, counter_offset=0, event_sync=False)

    learner.export_to_engines(tmp_path / "1")
    allocate = partial(torch.empty, dtype=torch.uint8)
    IpcSender(store, learner, allocate, share, chunk_bytes=10_000).offer(1, tmp_path / "1")

    offer = store.offered()
    assert offer is not None
    parts = {
        name: part.view(getattr(torch, chunk.dtype)).view(shape)
        for chunk, buffer in zip(offer.chunks, memory.values(), strict=True)
        for name, part, shape in zip(chunk.names, buffer.split(chunk.sizes), chunk.shapes, strict=True)
    }
    exported = load_file(tmp_path / "1" / "model.safetensors")
    assert len(offer.chunks) > 1
    assert parts.keys() == exported.keys() >= {"lm_head.weight"}
    assert all(torch.equal(parts[name], tensor) for name, tensor in exported.items())


def test_a_proof_has_what_transformers_computes_of_the_exported_weights(tiny_model: Path, tmp_path: Path):
    learner = Learner(learner_config(tiny_model, temperature=0.5))
    learner.export(tmp_path)

    [probe] = learner.proof(tmp_path, None).probes

    assert probe.positions == list(range(1, 16))
    assert probe.logprobs == pytest.approx(reference_logprobs(tmp_path, probe.token_ids), abs=1e-5)


def test_weights_of_another_model_are_refused(tiny_model: Path, tmp_path: Path):
    learner = Learner(learner_config(tiny_model))
    learner.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="got other names or shapes in"):
        learner.load(tmp_path)


def test_bfloat16_logprobs_are_float32_and_near_the_exact_ones(tiny_model: Path, rollout: Rollout):
    exact = Learner(learner_config(tiny_model)).log_probs([rollout()])[0]
    learner = Learner(learner_config(tiny_model, dtype="bfloat16"))

    rounded = learner.log_probs([rollout()])[0]

    assert rounded == pytest.approx(exact, abs=0.5)
    assert rounded != pytest.approx(exact, abs=1e-5)
    assert learner.update([rollout(score=1.0)]).metrics["actor/grad_norm"] > 0.0


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_float32_head_makes_float32_logits_of_bfloat16_weights_and_states(
    tiny_model: Path, rollout: Rollout, in_chunks: bool
):
    keys = {"dtype": "bfloat16", "use_fused_kernels": in_chunks, "chunk_size": 2}
    given: list[torch.Tensor] = []
    learner = Learner(learner_config(tiny_model, **keys, float32_head=True))
    learner.policy.model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))

    logprobs = learner.log_probs([rollout()])[0]
    loss = learner.update([rollout(score=1.0)]).metrics

    (states,) = given[:1]
    weight = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"].bfloat16().double()
    exact = torch.log_softmax(states.bfloat16().double() @ weight.T, -1)[0]
    places = range(len(rollout().prompt_ids) - 1, exact.shape[0])
    expected = [
        float(exact[place, token]) if mask else 0.0
        for place, token, mask in zip(places, rollout().response_ids, rollout().response_mask, strict=False)
    ]
    assert logprobs == pytest.approx(expected, abs=1e-5)
    assert logprobs != pytest.approx(Learner(learner_config(tiny_model, **keys)).log_probs([rollout()])[0], abs=1e-5)
    assert loss["actor/grad_norm"] > 0.0


def test_a_float32_head_changes_nothing_in_float32(tiny_model: Path, rollout: Rollout):
    plain, float32_head = (Learner(learner_config(tiny_model, float32_head=wanted)) for wanted in (False, True))

    assert float32_head.log_probs([rollout()]) == plain.log_probs([rollout()])


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_bfloat16_copy_of_a_weight_is_not_kept_until_the_forward_ends(
    tiny_model: Path, rollout: Rollout, gradient_checkpointing: bool
):
    config = learner_config(tiny_model, dtype="bfloat16", gradient_checkpointing=gradient_checkpointing)
    learner = Learner(config)
    seen: list[tuple[bool, bool]] = []

    def look(*_: object) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))

    learner.policy.model.model.norm.register_forward_pre_hook(look)
    learner.update([rollout(score=1.0)])

    assert (True, False) in seen
    assert (True, True) not in seen
