"""Weights that are NaN or infinite: neither exported, nor saved, nor loaded."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.services.trainer.learner_settings import learner_config
from trackway.clients.weights import WeightStore
from trackway.learner.finite import NotFiniteError, require_finite, require_finite_logprobs
from trackway.learner.learner import Learner
from trackway.system import digests
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.trainer.run_state.checkpoint import Manifest, find_all, load_checkpoint, save_checkpoint
from trackway.wire.errors import ErrorCode, TrackwayError

NUMBERS = [math.nan, math.inf, -math.inf]


@pytest.fixture
def learner(tiny_model: Path) -> Learner:
    return Learner(learner_config(tiny_model))


def spoil(learner: Learner, number: float) -> None:
    """One value of one tensor."""
    with torch.no_grad():
        learner.policy.model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = number


@pytest.mark.parametrize("number", NUMBERS)
def test_one_value_in_one_tensor_is_found_and_its_tensor_named(number: float):
    tensors = {"a": torch.ones(1000), "b": torch.ones(10, 10), "ids": torch.arange(3)}
    tensors["b"][3, 3] = number

    with pytest.raises(NotFiniteError, match=r"got NaN or infinities in b \(1 of 100\)$"):
        require_finite(tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_finite_whose_sum_is_not(dtype: torch.dtype):
    require_finite({"a": torch.full((100,), torch.finfo(dtype).max, dtype=dtype), "empty": torch.ones(0)})


def test_infinities_that_cancel_each_other_are_found():
    with pytest.raises(NotFiniteError, match="a \\(2 of 3\\), b \\(1 of 1\\), c \\(1 of 1\\) and 1 tensors more"):
        require_finite(
            {"a": torch.tensor([math.inf, -math.inf, 0.0]), **{name: torch.tensor([math.nan]) for name in "bcd"}}
        )


@pytest.mark.parametrize("logprobs", [[-1.0, math.nan], [-math.inf]])
def test_logprobs_of_a_model_that_cannot_compute_are_refused(logprobs: list[float]):
    with pytest.raises(NotFiniteError, match="the weights are finite, but too large to compute with"):
        require_finite_logprobs(logprobs)


@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_is_published_and_readers_stay_at_the_version_before(learner: Learner, tmp_path: Path, number: float):
    store = WeightStore(str(tmp_path / "weights"))
    publisher = Publisher(store, learner, "run", "uid", tmp_path / "scratch", keep=2)
    publisher.publish()
    spoil(learner, number)

    with pytest.raises(NotFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \(1 of 2048\)"):
        publisher.publish()
    publisher.close()

    latest = store.latest()
    assert latest is not None and latest.version == 1
    assert store.versions() == [1]


def test_weights_that_are_finite_and_cannot_be_computed_with_are_not_published(learner: Learner, tmp_path: Path):
    store = WeightStore(str(tmp_path / "weights"))
    publisher = Publisher(store, learner, "run", "uid", tmp_path / "scratch", keep=2)
    with torch.no_grad():
        learner.policy.model.get_parameter("model.norm.weight").fill_(1e38)

    with pytest.raises(NotFiniteError, match="expected finite logprobs, got nan"):
        publisher.publish()
    publisher.close()

    assert store.latest() is None


def test_a_checkpoint_of_them_is_not_saved_and_the_one_before_stays(learner: Learner, tmp_path: Path):
    save_checkpoint(tmp_path, 1, learner.save, {}, keep=1)
    spoil(learner, math.nan)

    with pytest.raises(NotFiniteError):
        save_checkpoint(tmp_path, 2, learner.save, {}, keep=1)

    assert find_all(tmp_path) == [tmp_path / "global_step_1"]
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_checkpoint_with_them_whose_digests_agree_is_damaged(learner: Learner, tmp_path: Path):
    checkpoint = save_checkpoint(tmp_path, 1, learner.save, {})
    file = checkpoint / "actor" / "model.safetensors"
    saved = load_file(file)
    saved["model.norm.weight"][0] = math.nan
    save_file(saved, file)
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    manifest = Manifest(files=digests(checkpoint, files), release="0", format=1)
    (checkpoint / "manifest.json").write_text(manifest.model_dump_json())

    with pytest.raises(TrackwayError, match=r"is damaged: expected finite weights, .* model\.norm\.weight") as caught:
        load_checkpoint(checkpoint, learner)

    assert caught.value.code is ErrorCode.CHECKPOINT_CORRUPT
    assert all(bool(parameter.isfinite().all()) for parameter in learner.policy.model.parameters())


def test_a_model_with_them_cannot_be_trained(tiny_model: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    saved = load_file(folder / "model.safetensors")
    saved["model.norm.weight"][0] = math.inf
    save_file(saved, folder / "model.safetensors", {"format": "pt"})

    with pytest.raises(NotFiniteError, match=r"model\.norm\.weight \(1 of 32\)"):
        Learner(learner_config(folder))


def test_a_proof_of_weights_that_cannot_be_computed_with_is_refused(learner: Learner, tmp_path: Path):
    with torch.no_grad():
        learner.policy.model.get_parameter("model.norm.weight").fill_(1e38)
    learner.export(tmp_path)

    with pytest.raises(NotFiniteError, match="expected finite logprobs"):
        learner.proof(tmp_path, None)
