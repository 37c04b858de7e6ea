"""A folder of an adapter: what is read of it, what is refused by name, and its merge into the base weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.services.rollout.planted_adapters import with_config
from trackway.rollout.engines.weight_folder import (
    AdapterInfo,
    adaptable_layers,
    is_adapter,
    read_adapter,
    write_merged,
)
from trackway.wire.errors import ErrorCode, TrackwayError

LAYER = "model.layers.0.self_attn.q_proj"
HEAD = "lm_head.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tied model of two matrices and a norm."""
    folder = tmp_path / "base"
    folder.mkdir()
    weights = {
        f"{LAYER}.weight": torch.arange(12.0).view(4, 3),
        "model.norm.weight": torch.ones(3),
        "model.embed_tokens.weight": torch.full((5, 3), 2.0),
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Of rank 2 and alpha 6, so scaled by 3."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 6, "bias": "none"}))
    names = {f"base_model.model.{LAYER}.lora_{part}.weight" for part in "AB"}
    shapes = {name: (2, 3) if ".lora_A." in name else (4, 2) for name in names}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_known_by_its_configuration(base: Path, adapter: Path) -> None:
    assert (is_adapter(adapter), is_adapter(base)) == (True, False)
    assert adaptable_layers(base) == ["q_proj"]
    assert read_adapter(adapter, base) == AdapterInfo(rank=2, scale=3.0, layers=[LAYER])


def test_the_merged_model_has_the_scaled_update_and_an_explicit_head(base: Path, adapter: Path, tmp_path: Path) -> None:
    folder = write_merged(adapter, base, tmp_path / "merged", torch.bfloat16)

    merged = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert merged[f"{LAYER}.weight"].tolist() == (torch.arange(12.0).view(4, 3) + 2 * 3.0).tolist()
    assert merged[HEAD].equal(merged["model.embed_tokens.weight"])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base_model.model.lm.model.layers.0.self_attn.q_proj.lora_A.weight", (2, 3)),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (3, 3)),
        ("base_model.model.model.norm.lora_A.weight", (2, 3)),
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", (4,)),
    ],
    ids=["another prefix", "another rank", "no matrix", "no part of an adapter"],
)
def test_a_name_or_shape_that_the_base_lacks_is_refused(
    base: Path, adapter: Path, name: str, shape: tuple[int, ...]
) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.ones(shape)}, file)

    with pytest.raises(TrackwayError, match=f"another name or shape in {name}") as raised:
        read_adapter(adapter, base)

    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT
    assert raised.value.message.endswith("or set actor_rollout_ref.model.lora.merge=true")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"use_rslora": True}, "expected a plain LoRA adapter in .*, got one with use_rslora"),
        ({"alpha_pattern": {"q": 1}, "use_dora": True}, "got one with use_dora, alpha_pattern"),
        ({"r": 0}, "got ZeroDivisionError"),
        ({"r": "many"}, "got ValueError"),
        ({"lora_alpha": None}, "got TypeError"),
    ],
)
def test_an_adapter_that_rank_and_alpha_do_not_describe_is_refused(
    base: Path, adapter: Path, tmp_path: Path, values: dict[str, object], said: str
) -> None:
    with pytest.raises(TrackwayError, match=said):
        read_adapter(with_config(adapter, tmp_path / "other", **values), base)
