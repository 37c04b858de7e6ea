"""Adapters in a real vLLM."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.servers.adapters import *  # noqa: F403
from tests.vllm.vllm_runs import MARKS, started
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.wire.errors import TrackwayError

pytestmark = [*MARKS, pytest.mark.extended]


def changed_base(base: Path, into: Path) -> Path:
    """A copy of a model in which every tensor is another."""
    shutil.copytree(base, into)
    file = into / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return into


async def test_a_run_with_another_base_than_the_server_that_it_shares_is_refused(
    engine: VllmEngine, base: Path, tmp_path: Path
) -> None:
    await engine._call_weights("default")  # as a server that nobody has loaded whole weights into
    server = {"engine_url": engine.http.base_url, "max_lora_rank": 8, "engine_shared": True, "engine_args": []}
    other = {"model_path": changed_base(base, tmp_path / "other"), "weights_url": str(tmp_path / "run")}
    with pytest.raises(TrackwayError, match=r"to serve .*/other, got none of its \d+ parameters as there"):
        async with started(VllmEngine(engine.settings.model_copy(update={**server, **other}))):
            pass
