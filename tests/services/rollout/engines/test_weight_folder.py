"""Folders of safetensors, judged by their headers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rollout_models import build
from safetensors.torch import load_file, save_file

from trackway.rollout.engines.weight_folder import check_same_model, lacks_head, tensors, with_head
from trackway.wire.errors import ErrorCode, TrackwayError

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    folder = tmp_path / "tied"
    build(folder, "qwen3-tied")
    return folder


def changed(base: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The base's weights after `change`."""
    weights = load_file(base / "model.safetensors")
    change(weights)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return folder


def test_headers_tell_names_and_shapes(tied: Path) -> None:
    want = {name: tuple(weight.shape) for name, weight in load_file(tied / "model.safetensors").items()}
    assert {name: tensor.shape for name, tensor in tensors(tied).items()} == want


def test_a_folder_of_the_same_tensors_is_the_same_model(tied: Path, tmp_path: Path) -> None:
    check_same_model(changed(tied, tmp_path / "same", lambda w: w.update({"lm_head.weight": torch.ones(2)})), tied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(NORM), rf"expected {NORM} of shape \(32,\) in .*, got none"),
        (lambda w: w.update({NORM: torch.ones(31)}), rf"expected {NORM} of shape \(32,\) in .*, got \(31,\)"),
    ],
)
def test_a_folder_of_another_model_is_refused(tied: Path, tmp_path: Path, change, message: str) -> None:
    with pytest.raises(TrackwayError, match=message) as raised:
        check_same_model(changed(tied, tmp_path / "other", change), tied)
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


@pytest.mark.parametrize("content", [None, b"", b"\x10\0\0\0\0\0\0\0{", b"\2\0\0\0\0\0\0\0[}", b"\xff" * 16])
def test_a_folder_without_readable_weights_is_refused(tied: Path, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(TrackwayError, match="expected safetensors in") as raised:
        check_same_model(tmp_path, tied)
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


def test_only_a_tied_model_without_its_head_lacks_it(tied: Path, tmp_path: Path) -> None:
    free = tmp_path / "free"
    build(free, "qwen3")
    headless = changed(free, tmp_path / "headless", lambda w: w.pop("lm_head.weight"))
    assert lacks_head(tied, tied)
    assert not lacks_head(with_head(tied, tmp_path / "whole"), tied)
    assert not lacks_head(headless, free)


def test_the_head_that_is_added_is_the_embedding_and_an_index_knows_it(tied: Path, tmp_path: Path) -> None:
    index = {"weight_map": dict.fromkeys(tensors(tied), "model.safetensors")}
    (tied / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = with_head(tied, tmp_path / "whole")
    weights = load_file(whole / "model.safetensors")
    assert torch.equal(load_file(whole / "lm_head.safetensors")["lm_head.weight"], weights[EMBEDDING])
    found = json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"]
    assert found == {**index["weight_map"], "lm_head.weight": "lm_head.safetensors"}
    assert "lm_head.weight" not in (tied / "model.safetensors.index.json").read_text()
