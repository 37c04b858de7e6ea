"""Folders of safetensors, judged by their headers."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.services.rollout.rollout_models import build
from trackway.rollout.engines.weight_folder import check_finite, check_same_model, lacks_head, tensors, with_head
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


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_a_value_that_is_not_finite_is_found_and_its_tensor_named(
    tmp_path: Path, dtype: torch.dtype, number: float
) -> None:
    values = torch.ones(3 << 18)
    values[-1] = number
    save_file({"a": values.to(dtype), "b": torch.ones(4, dtype=dtype)}, tmp_path / "model.safetensors")

    with pytest.raises(
        TrackwayError, match=f"expected finite weights in {tmp_path}, got NaN or infinities in a;"
    ) as got:
        check_finite(tmp_path)
    assert got.value.code is ErrorCode.WEIGHTS_CORRUPT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_the_largest_numbers_and_whole_ones_are_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    ends = torch.tensor([limits.max, limits.min, -0.0], dtype=torch.float64).to(dtype)
    save_file({"a": ends, "b": torch.tensor([-1, 2**62]), "none": ends[:0]}, tmp_path / "model.safetensors")

    check_finite(tmp_path)
