"""Files of models, versions and checkpoints that name, or link to, files outside their folder are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.services.rollout.rollout_models import build
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.learner.weights.loading import load_model
from trackway.rollout.classifiers.embedded import load_classifier
from trackway.rollout.engines.weight_folder import with_head
from trackway.system import find_difference, indexed_files
from trackway.system.files import digests
from trackway.trainer.run_state.checkpoint import find_all
from trackway.wire.errors import ErrorCode, TrackwayError

OUTSIDE = "secret.safetensors"
WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build(tmp_path / "model", "qwen3-tied")
    return tmp_path / "model"


def planted_index(model: Path, name: str) -> Path:
    """The model, whose index names this file in place of its weights, which lie outside."""
    (model / WEIGHTS).rename(model.parent / OUTSIDE)
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    return model


@pytest.mark.parametrize(
    "load", [load_model, lambda folder, dtype: load_classifier(folder, torch.device("cpu"), dtype)]
)
@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_that_names_a_file_outside_the_model_is_refused(
    model: Path, load: Callable[[Path, torch.dtype], object], absolute: bool
) -> None:
    name = str(model.parent / OUTSIDE) if absolute else f"../{OUTSIDE}"
    planted_index(model, name)

    with pytest.raises(
        ValueError, match=r"expected \S+index\.json to name files of its folder, got weight_map\.lm_"
    ) as raised:
        load(model, torch.float32)

    assert name in str(raised.value)


@pytest.mark.parametrize("content", ["[]", '{"weight_map": 5}', "{"])
def test_an_index_without_names_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / f"{WEIGHTS}.index.json").write_text(content)

    with pytest.raises(ValueError, match="to name files of its folder"):
        indexed_files(tmp_path)


@pytest.fixture
def published(tmp_path: Path) -> tuple[WeightStore, Path]:
    """A store with a version, and the version's folder."""
    source, store = tmp_path / "source", WeightStore(str(tmp_path / "store"))
    source.mkdir()
    (source / WEIGHTS).write_bytes(b"weights")
    store.publish(1, "run", source, ANY_PROOF)
    return store, tmp_path / "store" / "1"


def extra_file(folder: Path) -> str:
    (folder / "zz.safetensors").write_bytes(b"others")
    return "got also zz.safetensors"


def extra_link(folder: Path) -> str:
    (folder / "lm_head.safetensors").symlink_to(folder.parent.parent / "source" / WEIGHTS)
    return "got also lm_head.safetensors"


def link_in_place(folder: Path) -> str:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder.parent.parent / "source" / WEIGHTS)
    return "got a link"


@pytest.mark.parametrize("plant", [extra_file, extra_link, link_in_place])
def test_what_is_planted_beside_or_in_place_of_published_files_is_refused(
    published: tuple[WeightStore, Path], tmp_path: Path, plant: Callable[[Path], str]
) -> None:
    store, folder = published
    assert store.fetch(1, tmp_path / "cache") == folder
    said = plant(folder)

    with pytest.raises(TrackwayError, match=said) as raised:
        store.fetch(1, tmp_path / "cache")

    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


def test_a_link_in_a_checkpoint_is_a_difference_in_a_file_and_in_a_folder(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoint", tmp_path / "elsewhere"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "count").write_text("1")
    saved = digests(folder, [folder / "actor" / "count"])
    assert find_difference(folder, saved) is None
    shutil.move(folder / "actor", elsewhere)
    (folder / "actor").symlink_to(elsewhere)

    through_folder = find_difference(folder, saved)
    (folder / "actor").unlink()
    (folder / "actor").mkdir()
    (folder / "actor" / "count").symlink_to(elsewhere / "count")
    as_file = find_difference(folder, saved)

    assert (through_folder and through_folder.got, as_file and as_file.got) == ("a link", "a link")


def test_the_added_head_never_writes_through_a_file_of_that_name(model: Path, tmp_path: Path) -> None:
    outside = tmp_path / OUTSIDE
    save_file({"other": torch.zeros(1)}, outside)
    before = outside.read_bytes()
    (model / "lm_head.safetensors").symlink_to(outside)

    with pytest.raises(TrackwayError, match=r"expected lm_head\.safetensors to hold lm_head\.weight") as raised:
        with_head(model, tmp_path / "whole")

    assert (raised.value.code, outside.read_bytes()) == (ErrorCode.WEIGHTS_CORRUPT, before)


@pytest.mark.parametrize("text", ["1/../../elsewhere", "../elsewhere", "1/."])
def test_the_file_that_names_the_latest_checkpoint_names_no_other_folder(tmp_path: Path, text: str) -> None:
    root = tmp_path / "checkpoints"
    (root / "global_step_1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text(text)

    assert find_all(root) == [root / "global_step_1"]
