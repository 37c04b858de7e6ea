"""The memory that a run takes of each GPU, in its plan and in `trackway doctor`, on machines with fake GPUs."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from tests.services.learner.test_gpu_memory import QWEN3_8B
from trackway.deploy.bundled import CPU_CONFIG, TINY_MODEL
from trackway.deploy.checks.doctor import examine
from trackway.deploy.checks.gpu_memory import GpuMemory, gpu_memory
from trackway.deploy.config import serve_config, services_for_run
from trackway.deploy.config.services_for_run import services_for
from trackway.deploy.local.settings import UpSettings
from trackway.main_ppo import app
from trackway.run_config import compose

pytestmark = pytest.mark.slow

GIB = 2**30
R = "actor_rollout_ref.rollout"
FSDP = "actor_rollout_ref.actor.fsdp_config"
LENGTHS = ("data.max_prompt_length=1024", "data.max_response_length=2048")
DYNAMIC = ("actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192")
Forecast = Callable[..., GpuMemory]
Gpus = Callable[[int, int], None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Gives this machine so many GPUs of so many GiB."""

    def give(count: int, size: int) -> None:
        monkeypatch.setattr(services_for_run, "has_gpu_driver", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Mock(total_memory=size * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Fake GPU")

    return give


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_8b")
    shape = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps({**QWEN3_8B, **shape}))
    return folder


@pytest.fixture
def forecast(qwen3_8b: Path) -> Forecast:
    """Forecasts a run of Qwen3-8B on so many GPUs of so many GiB, with vLLM unless the words name another engine."""

    def made(count: int, size: int, *words: str) -> GpuMemory:
        path = f"actor_rollout_ref.model.path={qwen3_8b}"
        config = compose([path, f"{R}.name=vllm", *LENGTHS, *DYNAMIC, *words])
        services = services_for(config, count, serve_config.load(CPU_CONFIG))
        memory = gpu_memory(services.config, services.serve_config, [size * GIB] * count, download=False)
        assert memory is not None
        return memory

    return made


def test_eight_gpus_hold_what_one_does_not(forecast: Forecast):
    one, eight = forecast(1, 80), forecast(8, 80)

    assert [text.partition(";")[0] for text in one.missing] == [
        "GPU memory: expected at most 80.0 GiB, the GPU's memory, for the learner's weights, gradients and moments, "
        "got 122.1 GiB",
        "GPU memory: expected at most 40.0 GiB for the learner while engines are awake, got 92.0 GiB",
    ]
    assert (eight.missing, eight.not_sure) == ([], [])
    assert eight.learner.exact == 16 * 8_190_735_360 // 8


def test_the_keys_of_the_message_make_a_run_fit(forecast: Forecast):
    tight = forecast(2, 80)
    assert [text.partition(";")[0] for text in tight.missing] == [
        "GPU memory: expected at most 40.0 GiB for the learner while engines are awake, got 46.3 GiB"
    ]

    assert forecast(2, 80, f"{R}.gpu_memory_utilization=0.4").missing == []
    assert forecast(2, 80, f"{FSDP}.optimizer_offload=true").missing == []


def test_an_engine_needs_room_for_its_weights_and_one_sequence(forecast: Forecast):
    assert [text.partition("; ")[0] for text in forecast(8, 24).missing][:1] == [
        "GPU memory: expected at least 16.3 GiB for an engine's weights and the KV cache of 4096 tokens, got 12.0 GiB "
        "of the GPU's 24.0 GiB"
    ]
    assert forecast(8, 24, f"{R}.tensor_model_parallel_size=2", f"{FSDP}.optimizer_offload=true").missing == []


def test_a_peak_that_only_an_estimate_puts_over_the_gpu_is_no_reason_to_refuse(forecast: Forecast):
    long = forecast(8, 80, f"{R}.n=8", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200000")

    assert long.missing == []
    assert long.not_sure[0].startswith("GPU memory: whether an update fits into 80.0 GiB: its peak is forecast as ")


def test_a_reward_model_has_a_gpu_of_its_own(forecast: Forecast, qwen3_8b: Path):
    words = ("reward.reward_model.enable=true", f"reward.reward_model.model_path={qwen3_8b}")
    server = ("reward.reward_model.rollout.name=vllm", "reward.reward_model.rollout.gpu_memory_utilization=0.1")
    memory = forecast(8, 80, *words, *server, "trainer.n_gpus_per_node=7", "custom_reward_function.path=/f.py")

    assert [text.partition("; ")[0] for text in memory.missing] == [
        "reward_model: expected at least 16.3 GiB for an engine's weights and the KV cache of 4096 tokens, got 8.0 GiB "
        "of the GPU's 80.0 GiB"
    ]


def test_a_plan_shows_the_memory_of_each_gpu_and_a_run_on_cpus_has_none(gpus: Gpus, tmp_path: Path):
    words = ["--outputs", str(tmp_path), f"actor_rollout_ref.model.path={TINY_MODEL}", f"{R}.name=vllm"]

    def planned() -> dict:
        shown = CliRunner().invoke(app, [*words, "--dry-run", "--json"], env={"COLUMNS": "200"})
        return json.loads(shown.stdout)["gpu_memory"]

    assert planned() is None
    gpus(2, 80)
    memory = planned()
    assert (memory["total"], memory["engine"]["share"], memory["reward_model"]) == (80 * GIB, 0.5, None)
    shown = " ".join(CliRunner().invoke(app, [*words, "--dry-run"], env={"COLUMNS": "200"}).stdout.split())
    assert "GPU memory each rank of the learner of 80.0 GiB: " in shown
    assert "rollout engine: 40.0 GiB while it generates" in shown


def test_the_doctor_compares_the_models_training_with_the_gpus(gpus: Gpus, qwen3_8b: Path, tmp_path: Path):
    def told(count: int, size: int) -> tuple[bool, str, str]:
        gpus(count, size)
        settings = UpSettings(outputs=tmp_path, model_path=qwen3_8b)
        [finding] = [finding for finding in examine(settings).findings if finding.name == "GPU memory"]
        return finding.ok, finding.found, finding.remedy

    assert told(8, 80) == (
        True,
        "weights, gradients and moments of the policy take 15.3 GiB of each GPU's 80.0 GiB",
        "",
    )
    assert told(1, 80) == (
        False,
        "weights, gradients and moments of the policy take 122.1 GiB of each GPU's 80.0 GiB",
        "set actor.fsdp_config.param_offload and optimizer_offload, train an adapter (model.lora_rank), or use more "
        "GPUs",
    )
