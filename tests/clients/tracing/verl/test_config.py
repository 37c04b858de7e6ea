"""`RolloutTraceConfig`: what `init` accepts, what it refuses before anything starts, and what happens at the end."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.tracing.otlp_sink import Sink, running_sink
from trackway.tracing import RolloutTraceConfig
from trackway.tracing.export.backends import experiment_by_name
from trackway.tracing.span_handle import active_tracing
from trackway.wire.trajectory import TraceBackend


@pytest.fixture
def receiver() -> Iterator[Sink]:
    with running_sink() as sink:
        yield sink


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield
    RolloutTraceConfig.reset()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("trackio", "unknown trace backend trackio: expected mlflow, weave, otlp, or None for no traces"),
        (["mlflow", "dummy"], "unknown trace backend dummy: expected mlflow, weave, otlp"),
        ("otlp", "trace backend otlp needs a receiver: set OTEL_EXPORTER_OTLP_ENDPOINT"),
        (
            "weave",
            "trace backend weave needs W&B's API key: set WANDB_API_KEY; trace backend weave: expected project_name as "
            "entity/project, got 'p'; use that form, or set WANDB_ENTITY",
        ),
    ],
)
def test_a_backend_that_cannot_work_is_one_clear_line_before_anything_starts(
    backend: str | list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutTraceConfig.init("p", "e", backend)
    assert (RolloutTraceConfig.get_client(), RolloutTraceConfig.get_backend(), active_tracing()) == (None, None, None)


def test_the_backend_dummy_traces_nothing_as_in_verl() -> None:
    RolloutTraceConfig.init("p", "e", "dummy")

    assert (RolloutTraceConfig.get_client(), RolloutTraceConfig.get_backend(), active_tracing()) == (None, None, None)


def test_weave_asks_for_its_key_when_its_project_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="trace backend weave needs W&B's API key: set WANDB_API_KEY"):
        RolloutTraceConfig.init("entity/p", "e", "weave")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_ENTITY", "team")
    RolloutTraceConfig.init("p", "e", "weave")
    assert RolloutTraceConfig.get_instance().target.weave_project == "team/p"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("postgresql://host/db", "run `mlflow server --backend-store-uri postgresql://host/db` and give its address"),
        ("sqlite://", "expected sqlite:///file.db, got 'sqlite://'"),
        ("file.db", "got the file .*file.db; write sqlite:////.*file.db"),
        ("old", "mlflow migrate-filestore --source .*old --target sqlite:////.*old.db"),
    ],
)
def test_an_mlflow_uri_that_takes_no_spans_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str, message: str
) -> None:
    (tmp_path / "file.db").touch()
    (tmp_path / "old" / "0").mkdir(parents=True)
    (tmp_path / "old" / "0" / "meta.yaml").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ValueError, match=message):
        RolloutTraceConfig.init("p", "e", "mlflow")
    assert RolloutTraceConfig.get_client() is None


def test_a_local_database_without_mlflow_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"mlflow is not installed in .*: pip install 'trackway\[mlflow\]', or set"):
        RolloutTraceConfig.init("p", "e", "mlflow")


def test_the_number_of_samples_is_kept_and_a_negative_one_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 or more, or None for all, got -1"):
        RolloutTraceConfig.init("p", "e", None, max_samples_per_step_per_worker=-1)
    RolloutTraceConfig.init("p", "e", None, True, 3)
    config = RolloutTraceConfig.get_instance()
    assert (config.max_samples_per_step_per_worker, RolloutTraceConfig.enable_token2text()) == (3, True)


def test_the_first_init_counts_until_reset(receiver: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    RolloutTraceConfig.init("first", "e", "otlp")
    first = RolloutTraceConfig.get_client()
    RolloutTraceConfig.init("second", "f", "no such backend")
    assert (RolloutTraceConfig.get_instance().project_name, active_tracing()) == ("first", first)
    RolloutTraceConfig.reset()
    assert active_tracing() is None
    RolloutTraceConfig.init("second", "f", "otlp")
    assert RolloutTraceConfig.get_client() is not first


def test_several_backends_travel_with_each_trace(receiver: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", receiver.url)
    RolloutTraceConfig.init("gsm8k ä", "e", "otlp, mlflow", token2text=True)
    target = RolloutTraceConfig.get_instance().target
    assert RolloutTraceConfig.get_backend() == "otlp,mlflow"
    assert target.backends == (TraceBackend.OTLP, TraceBackend.MLFLOW)
    assert (target.mlflow_experiment_id, target.token2text) == (experiment_by_name("gsm8k ä"), True)
    assert (target.mlflow_experiment_id or "").isascii()


SCRIPT = """
import os
from trackway.tracing import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

@rollout_trace_op
def rollout():
    pass

RolloutTraceConfig.init("p", "e", "otlp")
with rollout_trace_attr(step=1, name="parent"):
    rollout()
if os.fork() == 0:
    assert RolloutTraceConfig.get_client() is None
    with rollout_trace_attr(step=1, name="silent child"):
        rollout()
    RolloutTraceConfig.init("p", "e", "otlp")
    with rollout_trace_attr(step=1, name="child"):
        rollout()
else:
    os.wait()
"""


def test_what_waits_is_sent_when_the_process_ends_and_a_forked_child_traces_after_its_own_init(
    receiver: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(receiver.spans) == ["invoke_agent child", "invoke_agent parent", "rollout", "rollout"]
