"""Whether another policy's engine has room in main memory or on the GPU."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from trackway.rollout.engines import lacking_memory
from trackway.rollout.engines.torch.decoder import Decoder
from trackway.rollout.engines.torch.model_config import DecoderConfig
from trackway.rollout.engines.torch.weights import needed_memory, read_weights
from trackway.rollout.settings import RolloutSettings


def settings_of(model_path: Path, **settings: object) -> RolloutSettings:
    return RolloutSettings.model_validate(
        {"model_path": model_path, "max_num_seqs": 4, "max_model_len": 100, **settings}
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_needs_its_weights_and_its_cache_in_its_own_type(model_path: Path, dtype: str) -> None:
    config, cpu, kind = DecoderConfig.read(model_path), torch.device("cpu"), getattr(torch, dtype)
    held = [*read_weights(model_path, config, cpu, kind).tensors(), Decoder(config, 100, cpu, kind).cache(4).data]

    needed = needed_memory(settings_of(model_path, device="cpu", dtype=dtype))

    assert needed == pytest.approx(sum(tensor.nbytes for tensor in held), rel=0.01)  # some norms are repeated


def test_a_gpu_is_asked_for_its_free_memory_after_pytorch_has_given_back_what_it_caches(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(model_path, device="cuda")
    needed, cached = needed_memory(settings), [1]
    assert needed == needed_memory(settings_of(model_path, device="cpu")) // 2  # bfloat16
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - sum(cached), 2 * needed))

    assert lacking_memory(settings) == ""
    cached.append(1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert lacking_memory(settings) == f"{needed / 1e9:.1f} GB of free GPU memory for {needed / 1e9:.1f} GB"


def test_a_server_and_an_engine_of_your_own_are_not_judged(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))

    assert lacking_memory(settings_of(model_path, engine="own:Engine")) == ""
    assert lacking_memory(settings_of(model_path, engine="vllm", engine_url="http://x")) == ""
    assert lacking_memory(settings_of(model_path, device="cpu")) != ""
