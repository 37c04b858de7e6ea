"""Features that never ran are experimental in their settings and guides, and in the log when they are used."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from html import unescape
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, get_args

import pytest
from benchmarks.sim_engine import SIM
from generators.settings import settings_of

from trackway.agent.sessions.external import remove_command
from trackway.agent.settings import ContainerSettings
from trackway.deploy.commands.traces import Backend, BackendOption, open_store
from trackway.rollout.classifiers import open_classifier
from trackway.rollout.engines import open_engine
from trackway.rollout.settings import RolloutSettings
from trackway.run_config import compose, explain
from trackway.system.process import Experimental, warn_experimental
from trackway.traces.weave_store import WeaveStore
from trackway.tracing import TracingSettings
from trackway.tracing.export.otlp import endpoint
from trackway.trainer.loop.from_config import experimental
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import TraceBackend

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


class Met(NamedTuple):
    """Where users meet a feature."""

    keys: list[str]
    page: str
    settings: Mapping[type, str] = MappingProxyType({})


PLACES = {
    Experimental.GPU: Met(["trackway.device"], "guides/engines.md", {RolloutSettings: "device"}),
    Experimental.SEVERAL_GPUS: Met(
        [f"{ROLLOUT}.tensor_model_parallel_size"], "guides/engines.md", {RolloutSettings: "tensor_parallel_size"}
    ),
    Experimental.SLEEP: Met(
        [f"{ROLLOUT}.free_cache_engine"], "guides/gpu-sharing.md", {RolloutSettings: "enable_sleep"}
    ),
    Experimental.IPC: Met(
        ["trackway.weights_transport"], "guides/gpu-sharing.md", {RolloutSettings: "weights_transport"}
    ),
    Experimental.NCCL: Met(["trackway.learner_ranks"], "guides/gpu-memory.md"),
    Experimental.OFFLOAD: Met(
        [f"{ACTOR}.fsdp_config.{name}" for name in ("param_offload", "optimizer_offload", "offload_policy")],
        "guides/gpu-memory.md",
    ),
    Experimental.WANDB: Met(
        [f"{ROLLOUT}.trace.backend", "trainer.logger"], "guides/weave.md", {TracingSettings: "weave_url"}
    ),
    Experimental.DOCKER: Met([], "guides/sessions.md", {ContainerSettings: "engine"}),
}


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The features that were logged, by a process that had not used any."""
    warn_experimental.cache_clear()
    yield lambda: [message.removeprefix("experimental: ") for message in caplog.messages]
    warn_experimental.cache_clear()


def test_each_feature_is_met_somewhere() -> None:
    assert set(PLACES) == set(Experimental)


@pytest.mark.parametrize("feature", Experimental)
def test_settings_and_guide_say_what_never_ran(feature: Experimental) -> None:
    met = PLACES[feature]
    texts = {key: explain(key)[0].meaning for key in met.keys}
    for cls, name in met.settings.items():
        texts |= {setting.name: setting.meaning for setting in settings_of(cls) if setting.name == name}
    assert len(texts) == len(met.keys) + len(met.settings)
    assert {
        name: text
        for name, text in texts.items()
        if f"Experimental: {feature}." not in " ".join(unescape(text).split())
    } == {}
    page = Path(__file__).parents[2] / "docs" / met.page
    assert f"**Experimental**: {feature}" in " ".join(page.read_text().split())


def test_a_feature_is_logged_once(warned: Callable[[], list[str]]) -> None:
    for _ in range(2):
        warn_experimental(Experimental.NCCL)
    assert warned() == [Experimental.NCCL]


@pytest.mark.parametrize("opens", [open_engine, open_classifier])
@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({"engine": "torch", "device": "cpu", "enable_sleep": True}, []),
        ({"engine": SIM, "enable_sleep": True}, []),
        ({"engine": "torch", "device": "cuda", "enable_sleep": True}, [Experimental.GPU, Experimental.SLEEP]),
        ({"engine": "sglang", "device": "cpu"}, []),
        ({"engine": "vllm", "tensor_parallel_size": 2}, [Experimental.GPU, Experimental.SEVERAL_GPUS]),
        (
            {"engine": "vllm", "weights_transport": "ipc", "weights_url": "weights"},
            [Experimental.GPU, Experimental.IPC],
        ),
    ],
)
def test_a_replica_logs_what_it_uses(
    warned: Callable[[], list[str]],
    opens: Callable[[RolloutSettings], object],
    changes: dict[str, object],
    features: list[Experimental],
) -> None:
    with suppress(TrackwayError):  # there is no model
        opens(RolloutSettings.model_validate(changes))
    assert warned() == features


@pytest.mark.parametrize(
    ("device", "keys", "features"),
    [
        ("cpu", ["trackway.learner_ranks=2"], []),
        ("cuda", [], [Experimental.GPU]),
        ("cuda", ["trackway.learner_ranks=2"], [Experimental.GPU, Experimental.NCCL]),
        ("cuda:1", [f"{ACTOR}.fsdp_config.param_offload=true"], [Experimental.GPU, Experimental.OFFLOAD]),
        ("cuda", ["trackway.weights_transport=ipc"], [Experimental.GPU, Experimental.IPC]),
    ],
)
def test_a_run_logs_what_it_uses(device: str, keys: list[str], features: list[Experimental]) -> None:
    assert experimental(compose(keys), device) == features


def test_spans_to_the_hosted_weave_log_it_and_to_another_server_do_not(warned: Callable[[], list[str]]) -> None:
    endpoint(TraceBackend.WEAVE, TracingSettings(weave_url="http://127.0.0.1:1"))
    assert warned() == []
    endpoint(TraceBackend.WEAVE, TracingSettings(weave_url="https://trace.wandb.ai/"))
    assert warned() == [Experimental.WANDB]


def test_a_container_by_docker_is_logged(
    warned: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    remove_command(ContainerSettings(image="mine"), "name")
    assert warned() == [Experimental.DOCKER]


def test_reading_the_hosted_weave_is_logged_and_in_the_help(
    warned: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WF_TRACE_SERVER_URL", raising=False)
    monkeypatch.setattr(WeaveStore, "open", lambda project: None)
    open_store(Backend.WEAVE, tmp_path, "team/project", None)
    assert warned() == [Experimental.WANDB]
    assert f"experimental: {Experimental.WANDB}." in get_args(BackendOption)[1].help
