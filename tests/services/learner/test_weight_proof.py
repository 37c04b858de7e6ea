"""What is published beside weights: digests of the files, and logprobs of what engines get."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.services.trainer.learner_settings import learner_config
from trackway.clients.weights import WeightStore
from trackway.learner import weight_proof
from trackway.learner.learner import Learner
from trackway.learner.weight_proof import (
    ScoredSequence,
    choose_sequences,
    probes_of,
    rounding_of,
    tensor_digests,
)
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.wire.trajectory import Trajectory
from trackway.wire.weights import Probe

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def group(rollout: Rollout) -> list[Trajectory]:
    """Two rollouts of one prompt, one of them good, and another prompt whose rollouts are alike."""
    good, bad = rollout(0, 0, 1.0), rollout(0, 1, 0.0, response_ids=[20, 21, 30, 31, 24, 25])
    return [good, bad, rollout(1, 0, 1.0, prompt_ids=[5]), rollout(1, 1, 1.0, prompt_ids=[5])]


def exact(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> list[float]:
    """Transformers' logprobs of the exported weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        logprobs = model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def test_sequences_are_the_shortest_that_move_the_weights_each_once_and_cut(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_proof, "LONGEST", 8)
    monkeypatch.setattr(weight_proof, "SEQUENCES", 2)
    long, short, shorter = (rollout(0, n, prompt_ids=list(range(1, size))) for n, size in enumerate((6, 3, 2)))
    still = rollout(0, 3, prompt_ids=[9])

    assert choose_sequences([long, short, short, shorter, still], [1.0, -1.0, 0.5, 2.0, 0.0]) == [
        [1, 20, 21, 30, 31, 22, 23],
        [1, 2, 20, 21, 30, 31, 22, 23],
    ]
    assert choose_sequences([long], [0.0]) == [[1, 2, 3, 4, 5, 20, 21, 30]]


def test_probes_are_the_tokens_that_changed_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_proof, "TOKENS", 3)
    sequences = [[1, 2, 3], [4, 5], [6, 7, 8]]
    before = list(map(ScoredSequence, sequences, [[-1.0, -2.0], [-3.0], [0.0, 0.0]]))
    now = list(map(ScoredSequence, sequences, [[-1.0, -2.5], [-3.0], [-0.1, 0.2]]))

    assert probes_of(now, before) == [
        Probe(token_ids=[1, 2, 3], positions=[2], logprobs=[-2.5], previous=[-2.0]),
        Probe(token_ids=[6, 7, 8], positions=[1, 2], logprobs=[-0.1, 0.2], previous=[0.0, 0.0]),
    ]
    assert probes_of(now[:1], None) == [Probe(token_ids=[1, 2, 3], positions=[1, 2], logprobs=[-1.0, -2.5])]


def test_rounding_is_that_of_the_probes_tokens_and_of_no_others() -> None:
    probes = [
        Probe(token_ids=[1, 2, 3], positions=[2], logprobs=[-2.5]),
        Probe(token_ids=[6, 7, 8], positions=[1, 2], logprobs=[-0.1, 0.2]),
    ]
    rounded = list(map(ScoredSequence, [[1, 2, 3], [4, 5], [6, 7, 8]], [[-9.0, -2.4], [-9.0], [-0.3, 0.2]]))

    assert rounding_of(probes, rounded) == pytest.approx(((0.01 + 0.04) / 3) ** 0.5)


@pytest.mark.parametrize(
    ("published", "narrower"), [(torch.float32, [torch.bfloat16]), (torch.bfloat16, [])], ids=["float32", "bfloat16"]
)
def test_digests_are_of_each_tensors_bytes_as_published_and_rounded(
    tmp_path: Path, published: torch.dtype, narrower: list[torch.dtype]
) -> None:
    tensors = {"b": torch.randn(3, 2).to(published), "a": torch.randn(4).to(published)}
    save_file({"b": tensors["b"]}, tmp_path / "1.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "2.safetensors")

    digests = tensor_digests(tmp_path)

    name = str(published).removeprefix("torch.")
    assert [(digest.name, digest.dtype) for digest in digests] == [("a", name), ("b", name)]
    for digest in digests:
        types = [published, *narrower]
        assert digest.sha256 == {
            str(dtype).removeprefix("torch."): sha256(tensors[digest.name].to(dtype)) for dtype in types
        }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_proof_says_what_the_exported_weights_answer_and_what_those_before_did(
    tiny_model: Path, rollout: Rollout, tmp_path: Path, dtype: str
) -> None:
    learner = Learner(learner_config(tiny_model, dtype=dtype, lr=1e-3))
    learner.export(tmp_path / "1")
    learner.update(group(rollout))
    learner.export(tmp_path / "2")

    proof = learner.proof(tmp_path / "2", 1)

    sequences = [probe.token_ids for probe in proof.probes]
    assert [10, 11, 12, 20, 21, 30, 31, 22, 23] in sequences
    assert [5, 20, 21, 30, 31, 22, 23] not in sequences
    differences = []
    for probe in proof.probes:
        places = [position - 1 for position in probe.positions]
        new, old = exact(tmp_path / "2", probe.token_ids), exact(tmp_path / "1", probe.token_ids)
        rounded = exact(tmp_path / "2", probe.token_ids, torch.bfloat16)
        assert probe.logprobs == pytest.approx([new[place] for place in places], abs=1e-5)
        assert probe.previous == pytest.approx([old[place] for place in places], abs=1e-5)
        differences += [rounded[place] - new[place] for place in places]
    assert proof.rounding == pytest.approx(torch.tensor(differences).square().mean().sqrt().item(), rel=0.1)
    assert proof.previous_version == 1
    weights = load_file(tmp_path / "2" / "model.safetensors")
    assert {digest.name: digest.sha256[dtype] for digest in proof.digests} == {
        name: sha256(tensor) for name, tensor in weights.items()
    }
    assert "lm_head.weight" in weights


def test_the_learners_own_weights_are_as_before_after_a_proof(
    tiny_model: Path, rollout: Rollout, tmp_path: Path
) -> None:
    learner = Learner(learner_config(tiny_model, dtype="bfloat16", lr=1e-3))
    learner.update(group(rollout))
    learner.export(tmp_path)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in learner.policy.model.named_parameters()}

    learner.proof(tmp_path, 1)

    after = dict(learner.policy.model.named_parameters())
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == {n: place for n, (place, _) in before.items()}
    assert all(torch.equal(after[name], tensor) for name, (_, tensor) in before.items())


def test_a_forward_that_fails_gives_the_weights_back(tiny_model: Path) -> None:
    learner = Learner(learner_config(tiny_model, dtype="bfloat16"))
    before = {name: tensor.dtype for name, tensor in learner.policy.model.named_parameters()}

    with pytest.raises(IndexError):
        learner.policy.published_logprobs([[1, 999, 2]], torch.bfloat16)

    assert {name: tensor.dtype for name, tensor in learner.policy.model.named_parameters()} == before


def test_only_what_this_run_published_last_is_the_version_before(
    tiny_model: Path, rollout: Rollout, tmp_path: Path
) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    learner = Learner(learner_config(tiny_model, lr=1e-3))
    publisher = Publisher(store, learner, "run", "0123456789", tmp_path / "export", 5)
    learner.update(group(rollout))  # as before a checkpoint from which a run goes on
    for _ in range(2):
        publisher.publish()
        learner.update(group(rollout))
    publisher.close()

    first, second = (store.manifest(version).proof for version in (1, 2))
    assert (first.previous_version, [probe.previous for probe in first.probes]) == (None, [[]])
    assert (second.previous_version, all(probe.previous for probe in second.probes)) == (1, True)
