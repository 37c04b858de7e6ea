"""Files that do not fit are refused by name; an explicit lm_head overrides the tie."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.services.rollout.rollout_models import FAMILIES
from trackway.rollout.engines.torch.decoder import DecoderWeights
from trackway.rollout.engines.torch.model_config import DecoderConfig
from trackway.rollout.engines.torch.weights import LM_HEAD, read_weights, unfused
from trackway.wire.errors import ErrorCode, TrackwayError

Folders = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def changed(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def read(folder: Path, config: DecoderConfig) -> DecoderWeights:
    return read_weights(folder, config, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model.norm.weight \(expected \(32,\), got None\)"),
        (lambda t: t.update(extra=torch.zeros(2)), r"extra \(expected None, got \(2,\)\)"),
        (lambda t: t.update({LM_HEAD: torch.zeros(5, 32)}), r"lm_head.weight \(expected \(97, 32\), got \(5, 32\)\)"),
        (lambda t: t.pop(LM_HEAD), r"lm_head.weight \(expected \(97, 32\), got None\)"),
    ],
)
def test_names_and_shapes_must_be_the_models(
    model_path: Path, tmp_path: Path, change: Callable[[Tensors], object], said: str
) -> None:
    with pytest.raises(TrackwayError, match=said) as raised:
        read(changed(model_path, tmp_path, change), DecoderConfig.read(model_path))
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


def test_a_file_that_is_not_safetensors_is_refused(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"half a fi")
    with pytest.raises(TrackwayError, match="expected a safetensors file") as raised:
        read(tmp_path, DecoderConfig.read(model_path))
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


def test_a_tied_model_uses_its_embedding_unless_the_files_name_an_lm_head(folders: Folders, tmp_path: Path) -> None:
    source = folders("qwen3-tied")
    config = DecoderConfig.read(source)
    tied = read(source, config)
    assert tied.lm_head is tied.embed
    explicit = changed(source, tmp_path, lambda t: t.update({LM_HEAD: torch.full((97, 32), 2.0)}))
    assert read(explicit, config).lm_head.unique().tolist() == [2.0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"silu"', '"gelu"', "hidden_act gelu"),
        ('"qwen3"', '"gpt2"', "model_type gpt2"),
        ('"rope_type": "default"', '"rope_type": "yarn"', "rope_type yarn"),
        ('"full_attention"', '"sliding_attention"', "sliding windows"),
    ],
)
def test_a_model_that_would_run_wrong_is_refused(
    model_path: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = (model_path / "config.json").read_text()
    assert old in text
    (tmp_path / "config.json").write_text(text.replace(old, new))
    with pytest.raises(TrackwayError, match=said):
        DecoderConfig.read(tmp_path)


def test_a_folder_without_a_config_says_which_setting_to_change(tmp_path: Path) -> None:
    with pytest.raises(TrackwayError, match="set model_path"):
        DecoderConfig.read(tmp_path)


def test_the_stop_ids_of_the_generation_config_come_first(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_path / "config.json").read_text())
    assert DecoderConfig.read(tmp_path).eos_token_ids == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert DecoderConfig.read(tmp_path).eos_token_ids == {7, 8}


def test_a_sliding_window_bounds_the_length_of_sequences(folders: Folders) -> None:
    assert [DecoderConfig.read(folders(family)).max_positions for family in ("mistral", "phi3")] == [512, 1024]


@pytest.mark.parametrize(
    ("family", "old", "new", "said"),
    [
        ("phi3", '"partial_rotary_factor": 1.0', '"partial_rotary_factor": 0.75', "partial_rotary_factor 0.75"),
        ("gemma", '"model_type": "gemma"', '"model_type": "gemma2"', "model_type gemma2"),
        ("gemma", '"gelu_pytorch_tanh"', '"silu"', "hidden_act silu"),
        ("mistral", '"mistral"', '"mixtral"', "model_type mixtral"),
    ],
)
def test_a_refused_model_is_told_the_engines_that_run_it(
    folders: Folders, tmp_path: Path, family: str, old: str, new: str, said: str
) -> None:
    text = (folders(family) / "config.json").read_text()
    assert old in text
    (tmp_path / "config.json").write_text(text.replace(old, new))
    with pytest.raises(TrackwayError, match=f"got {said} in .*run this model with engine: vllm or sglang"):
        DecoderConfig.read(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_tensors_have_the_names_of_the_checkpoint(folders: Folders, family: str) -> None:
    folder = folders(family)
    config = DecoderConfig.read(folder)

    held = dict(unfused(read(folder, config), config))

    published = load_file(folder / "model.safetensors")
    assert held.keys() - {LM_HEAD} == published.keys() - {LM_HEAD}
    assert all(torch.equal(held[name], tensor) for name, tensor in published.items())
