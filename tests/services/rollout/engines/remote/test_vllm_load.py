"""The load of a vLLM by its own metrics, as vLLM 0.32 writes them."""

from pathlib import Path

import pytest

from tests.services.rollout.engines.remote.vllm_transfer_fake import write_model
from trackway.rollout.engines.remote.server import Json
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.rollout import EngineLoad

pytestmark = pytest.mark.anyio

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 12.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.25
vllm:num_preemptions_total{engine="0",model_name="policy"} 7.0
vllm:num_preemptions_total{engine="1",model_name="policy"} 1.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e+09
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",mamba_block_size="99",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",mamba_block_size="99",num_gpu_blocks="200"} 1.0
"""


class Http:
    """Answers `/metrics`."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def get(self, path: str, *, timeout_s: float) -> Json:
        assert path == "/metrics"
        return {"text": self.text}


def engine_with(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    monkeypatch.setattr(VllmEngine, "http", Http(text))
    return VllmEngine(RolloutSettings(engine="vllm", engine_url="http://vllm.test", model_path=write_model(folder, 0)))


async def test_requests_preemptions_and_kv_tokens_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(METRICS, tmp_path / "model", monkeypatch)
    assert await engine.load() == EngineLoad(
        running=16, waiting=3, preemptions=8, kv_used=1600, kv_tokens=4800, max_len=engine.max_len
    )


async def test_a_server_without_these_metrics_has_an_unknown_kv_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with("", tmp_path / "model", monkeypatch)
    assert (await engine.load()).kv_tokens == 0
