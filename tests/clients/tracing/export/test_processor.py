"""From an ended span to a backend: straight, over the disk while the backend is away, counted where it is lost."""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.clients.tracing.otlp_sink import Sink, running_sink
from tests.waiting import until
from trackway.system import free_port
from trackway.tracing import Tracing, TracingSettings, trajectory_span, turn_span
from trackway.tracing.span_handle import activated
from trackway.wire.trajectory import Tags, TraceBackend, TraceTarget

pytestmark = pytest.mark.slow

EVERYWHERE = TraceTarget(backends=tuple(TraceBackend), mlflow_experiment_id="7", weave_project="team/gsm8k")

TAGS = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=0)


@pytest.fixture
def sink():
    with running_sink() as sink:
        yield sink


def settings(url: str, spool: Path | None = None, **changes: object) -> TracingSettings:
    """Tracing into an MLflow at the URL; schedules and time limits short enough for tests."""
    own: dict[str, object] = {"mlflow_uri": url, "spool_dir": spool, "schedule_delay_s": 0.02, "export_timeout_s": 0.5}
    return TracingSettings.model_validate(own | changes)


def trajectory(tracing: Tracing, rollout_n: int = 0, turns: int = 1, target: TraceTarget | None = None) -> None:
    tags = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=rollout_n)
    with activated(tracing), trajectory_span(tags, "t", "agent", [], True, target):
        for index in range(turns):
            with turn_span(index):
                pass


def test_one_trace_goes_to_each_of_its_backends_under_that_backends_headers() -> None:
    with running_sink() as mlflow, running_sink() as weave, running_sink() as collector:
        changes = {
            "weave_url": weave.url,
            "weave_api_key": "k" * 40,
            "otlp_endpoint": f"{collector.url}/v1/traces",
            "otlp_headers": {"x-team": "rl"},
        }
        tracing = Tracing("agent", settings(mlflow.url, **changes))
        trajectory(tracing, target=EVERYWHERE.model_copy(update={"mlflow_run_id": "r1"}))
        assert tracing.shutdown(5)
    names = [("x-mlflow-experiment-id", "7"), ("x-mlflow-run-id", "r1"), ("project_id", "team/gsm8k")]
    got = [{name: sink.arrived[0].headers.get(name) for name, _ in names} for sink in (mlflow, weave, collector)]
    every = dict(names)
    assert got == [every | {"project_id": None}, {**dict.fromkeys(every), "project_id": "team/gsm8k"}, every]
    assert weave.arrived[0].headers["wandb-api-key"] == "k" * 40
    assert collector.arrived[0].headers["x-team"] == "rl"
    assert [sink.arrived[0].path for sink in (mlflow, weave, collector)] == [
        "/v1/traces",
        "/otel/v1/traces",
        "/v1/traces",
    ]
    assert sorted(mlflow.spans) == sorted(weave.spans) == ["trajectory", "turn 0"]
    assert sorted(collector.spans) == ["invoke_agent agent", "turn 0"]


def test_weaves_agents_view_gets_the_genai_conventions_at_its_own_address(sink: Sink) -> None:
    changes = {"mlflow_uri": None, "weave_url": sink.url, "weave_api_key": "k" * 40, "weave_view": "agents"}
    tracing = Tracing("agent", settings("", **changes))
    trajectory(tracing, target=TraceTarget(backends=(TraceBackend.WEAVE,), weave_project="team/gsm8k"))
    assert tracing.shutdown(5)
    [request] = sink.arrived
    headers = {name: request.headers[name] for name in ("wandb-api-key", "project_id", "content-type")}
    assert headers == {
        "wandb-api-key": "k" * 40,
        "project_id": "team/gsm8k",
        "content-type": "application/x-protobuf",
    }
    assert (request.path, sorted(request.spans)) == ("/agents/otel/v1/traces", ["invoke_agent agent", "turn 0"])


def test_what_is_meant_for_backends_behind_a_collector_is_sent_to_it_once_and_not_past_it(sink: Sink) -> None:
    with running_sink() as mlflow, running_sink() as weave:
        changes = {
            "weave_url": weave.url,
            "weave_api_key": "k" * 40,
            "otlp_endpoint": f"{sink.url}/collected",
            "otlp_headers": {"x-team": "rl"},
            "collected": ["mlflow", "weave"],
        }
        tracing = Tracing("agent", settings(mlflow.url, **changes))
        trajectory(tracing, target=EVERYWHERE)
        assert tracing.shutdown(5)
    assert (mlflow.asked, weave.asked, sink.spans) == (0, 0, ["turn 0", "trajectory"])
    [request] = sink.arrived
    headers = {name: request.headers[name] for name in ("x-mlflow-experiment-id", "project_id", "x-team")}
    assert (request.path, headers) == (
        "/collected",
        {"x-mlflow-experiment-id": "7", "project_id": "team/gsm8k", "x-team": "rl"},
    )


def test_traces_of_two_runs_in_one_process_go_to_their_own_experiments(sink: Sink) -> None:
    tracing = Tracing("rollout", settings(sink.url))
    for experiment in ("7", "8", None):
        trajectory(tracing, target=TraceTarget(mlflow_experiment_id=experiment))
    assert tracing.shutdown(5)
    assert sorted(request.headers["x-mlflow-experiment-id"] for request in sink.arrived) == ["0", "7", "8"]


def test_a_backend_that_is_away_costs_nothing_and_gets_everything_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    tracing = Tracing("agent", settings(f"http://127.0.0.1:{port}", tmp_path))
    for number in range(50):
        trajectory(tracing, number)
    until(lambda: tracing.stats().backends["mlflow"].spool_bytes > 0)
    assert not tracing.flush(0.05)
    with running_sink(port) as sink:
        assert tracing.flush(20)
        stats = tracing.stats()
    assert (len(sink.spans), stats.ended, stats.lost) == (100, 100, 0)
    assert stats.backends["mlflow"].spool_bytes == 0
    tracing.shutdown(5)


def test_what_waited_on_disk_is_sent_in_its_order(tmp_path: Path) -> None:
    port = free_port()
    tracing = Tracing("agent", settings(f"http://127.0.0.1:{port}", tmp_path))
    numbered(tracing, range(6))
    with running_sink(port) as sink:
        assert tracing.shutdown(20)
    assert [name for name in sink.spans if name != "trajectory"] == [f"turn {number}" for number in range(6)]


def test_a_batch_that_a_backend_cannot_digest_does_not_keep_the_others_from_it(sink: Sink, tmp_path: Path) -> None:
    sink.status = 503
    tracing = Tracing("agent", settings(sink.url, tmp_path))
    numbered(tracing, range(4))
    sink.poison, sink.status = "turn 0", 200
    until(lambda: len(sink.spans) == 6)
    until(lambda: tracing.stats().backends["mlflow"].waiting == 2)
    sink.poison = ""
    assert tracing.shutdown(20)


def numbered(tracing: Tracing, numbers: range) -> None:
    """A trajectory with a turn of each number, each in a batch of its own."""
    for number in numbers:
        with activated(tracing), trajectory_span(TAGS, "t", "agent", [], True), turn_span(number):
            pass
        tracing.flush(0.1)
        until(lambda: tracing.stats().queued == 0)


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_an_answer_that_may_change_is_waited_for(sink: Sink, status: int, tmp_path: Path) -> None:
    sink.status = status
    tracing = Tracing("agent", settings(sink.url, tmp_path))
    trajectory(tracing)
    until(lambda: sink.asked >= 2)
    sink.status = 200
    assert tracing.shutdown(20)
    assert sorted(sink.spans) == ["trajectory", "turn 0"]


def test_a_refused_batch_is_counted_and_not_sent_again(sink: Sink) -> None:
    sink.status = 404
    tracing = Tracing("agent", settings(sink.url))
    trajectory(tracing)
    assert tracing.flush(5)
    assert (sink.asked, tracing.stats().backends["mlflow"].refused, tracing.stats().lost) == (1, 2, 2)
    tracing.shutdown(5)


def test_a_doubtful_refusal_is_tried_a_few_times_before_it_counts(sink: Sink, tmp_path: Path) -> None:
    sink.status = 422
    tracing = Tracing("agent", settings(sink.url, tmp_path))
    trajectory(tracing)
    assert tracing.flush(20)
    assert (sink.asked, tracing.stats().backends["mlflow"].refused) == (3, 2)
    tracing.shutdown(5)


@pytest.mark.extended
def test_each_batch_has_its_own_doubts(sink: Sink, tmp_path: Path) -> None:
    sink.status = 500
    tracing = Tracing("agent", settings(sink.url, tmp_path))
    numbered(tracing, range(2))
    until(lambda: sink.asked >= 1)
    sink.status, before = 422, sink.asked
    assert tracing.flush(40)
    assert tracing.stats().backends["mlflow"].refused == 4 and sink.asked - before >= 6
    tracing.shutdown(5)


def test_a_file_on_disk_that_cannot_be_read_is_counted_as_lost(sink: Sink, tmp_path: Path) -> None:
    left = tmp_path / "mlflow" / "agent-1-abc"
    left.mkdir(parents=True)
    (left / "00000001-7.otlp").write_bytes(b"torn")
    tracing = Tracing("agent", settings(sink.url, tmp_path))
    until(lambda: tracing.stats().backends["mlflow"].dropped == 7)
    assert tracing.shutdown(5) and sink.asked == 0


def test_a_request_never_carries_more_roots_than_mlflow_links(sink: Sink) -> None:
    tracing = Tracing("agent", settings(sink.url, schedule_delay_s=30.0))
    for number in range(230):
        trajectory(tracing, number)
    assert tracing.shutdown(10)
    roots = [request.spans.count("trajectory") for request in sink.arrived]
    assert sum(roots) == 230 and max(roots) == 100
    assert len(sink.spans) == 460


def test_spans_that_a_backend_refuses_within_a_200_are_counted(sink: Sink) -> None:
    sink.refuse_spans = 1
    tracing = Tracing("agent", settings(sink.url))
    trajectory(tracing)
    assert tracing.shutdown(5)
    its = tracing.stats().backends["mlflow"]
    assert (its.exported, its.refused) == (1, 1)


def test_a_hanging_backend_holds_up_neither_its_callers_nor_the_other_backend(tmp_path: Path) -> None:
    with running_sink() as slow, running_sink() as quick:
        slow.open.clear()
        changes: dict[str, object] = {"otlp_endpoint": f"{quick.url}/v1/traces", "export_timeout_s": 30.0}
        tracing = Tracing("agent", settings(slow.url, tmp_path, **changes))
        target = TraceTarget(backends=(TraceBackend.MLFLOW, TraceBackend.OTLP))
        for number in range(20):
            trajectory(tracing, number, target=target)
        until(lambda: len(quick.spans) == 40)
        assert slow.spans == [] and tracing.stats().backends["mlflow"].waiting == 40
        slow.open.set()
        assert tracing.shutdown(10)
        assert len(slow.spans) == 40


KILLED = """
import sys
from trackway.tracing import Tracing, TracingSettings, trajectory_span, turn_span
from trackway.tracing.span_handle import activated
from trackway.wire.trajectory import Tags

tracing = Tracing("agent", TracingSettings(mlflow_uri=sys.argv[1], spool_dir=sys.argv[2], schedule_delay_s=0.02))
for number in range(4):
    tags = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=number)
    with activated(tracing), trajectory_span(tags, "t", "agent", [], True), turn_span(0):
        pass
    tracing.flush(0.1)
print("recorded", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_loses_no_batch_neither_the_one_being_sent_nor_those_behind_it(tmp_path: Path) -> None:
    with running_sink() as slow:
        slow.open.clear()
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, slow.url, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None and process.stdout.readline() == "recorded\n"
            until(lambda: slow.asked == 1)
            process.kill()
        stored = [int(path.stem.rpartition("-")[2]) for path in tmp_path.rglob("*.otlp")]

    assert sum(stored) == 8
    with running_sink() as sink:
        following = Tracing("agent", settings(sink.url, tmp_path))
        until(lambda: len(sink.spans) == 8)
        assert following.shutdown(5)
    assert sorted(sink.spans) == ["trajectory"] * 4 + ["turn 0"] * 4


def test_a_span_waits_from_its_end_until_its_backend_has_it(sink: Sink) -> None:
    tracing = Tracing("agent", settings(sink.url, schedule_delay_s=60.0))
    trajectory(tracing)

    before = tracing.stats()
    assert tracing.flush(5)
    after = tracing.stats()
    tracing.shutdown(5)

    assert (before.ended, before.queued, before.backends["mlflow"].waiting) == (2, 2, 0)
    assert (after.ended, after.queued, after.backends["mlflow"].exported) == (2, 0, 2)


def test_beside_a_full_disk_a_backend_that_keeps_up_gets_every_span(sink: Sink, tmp_path: Path) -> None:
    tracing = Tracing("agent", settings(sink.url, tmp_path, max_spool_bytes=1))
    for number in range(3):
        trajectory(tracing, number)
        assert tracing.flush(5)
    assert tracing.shutdown(5)
    assert (len(sink.spans), tracing.stats().lost) == (6, 0)


def test_what_the_disk_has_no_room_for_is_dropped_and_counted(tmp_path: Path) -> None:
    port = free_port()
    tracing = Tracing("agent", settings(f"http://127.0.0.1:{port}", tmp_path, max_spool_bytes=2000))
    for number in range(40):
        trajectory(tracing, number)
        tracing.flush(0.01)
    until(lambda: tracing.stats().backends["mlflow"].dropped > 0)
    with running_sink(port) as sink:
        assert tracing.shutdown(20)
        its = tracing.stats().backends["mlflow"]
    assert its.exported == len(sink.spans) > 0
    assert its.exported + its.dropped == tracing.stats().ended == 80


def test_a_full_queue_drops_spans_and_counts_them(sink: Sink) -> None:
    tracing = Tracing("agent", settings(sink.url, max_queue_size=10, schedule_delay_s=60.0))
    trajectory(tracing, turns=30)
    assert tracing.shutdown(5)
    stats = tracing.stats()
    assert (stats.ended, stats.dropped, stats.backends["mlflow"].exported, len(sink.spans)) == (31, 21, 10, 10)


def test_a_backend_this_process_has_no_key_for_loses_its_spans_visibly(sink: Sink, caplog) -> None:
    tracing = Tracing("agent", settings(sink.url))
    trajectory(tracing, target=TraceTarget(backends=(TraceBackend.WEAVE,)))
    tracing.shutdown(5)
    assert (tracing.stats().dropped, tracing.stats().lost, sink.asked) == (2, 2, 0)
    assert "set WANDB_API_KEY" in caplog.text


def test_what_a_dead_process_left_on_disk_is_sent_by_the_next_one(tmp_path: Path) -> None:
    port = free_port()
    gone = Tracing("agent", settings(f"http://127.0.0.1:{port}", tmp_path))
    trajectory(gone)
    assert not gone.shutdown(0.3)
    assert len(list(tmp_path.rglob("*.otlp"))) == 1
    with running_sink(port) as sink:
        following = Tracing("agent", settings(sink.url, tmp_path))
        until(lambda: len(sink.spans) == 2)
        assert following.shutdown(5)
    assert list(tmp_path.rglob("*.otlp")) == [] and list((tmp_path / "mlflow").iterdir()) == []


def test_a_living_process_keeps_its_own_files(tmp_path: Path) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    first = Tracing("agent", settings(away, tmp_path))
    trajectory(first)
    until(lambda: first.stats().backends["mlflow"].spool_bytes > 0)
    second = Tracing("agent", settings(away, tmp_path))
    assert second.stats().backends["mlflow"].waiting == 0
    assert first.stats().backends["mlflow"].waiting == 2
    for tracing in (second, first):
        tracing.shutdown(0.1)


def test_shutting_down_keeps_its_deadline_whatever_the_backend_does(sink: Sink) -> None:
    sink.open.clear()
    tracing = Tracing("agent", settings(sink.url, export_timeout_s=30.0))
    trajectory(tracing)
    began = time.monotonic()
    assert not tracing.shutdown(0.3)
    assert time.monotonic() - began < 20.0  # the request alone would take 30
    assert tracing.stats().backends["mlflow"].dropped == 2  # of the request whose answer is not awaited


def test_many_threads_lose_no_span(sink: Sink) -> None:
    tracing = Tracing("agent", settings(sink.url))
    threads = [
        threading.Thread(target=lambda: [trajectory(tracing, number, turns=3) for number in range(50)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracing.shutdown(20)
    distinct = {span_id for request in sink.arrived for span_id in request.ids}
    assert len(distinct) == 8 * 50 * 4 == tracing.stats().ended


def test_ids_stay_unique_when_the_trainer_seeds_python_before_each(sink: Sink, tmp_path: Path) -> None:
    tracing = Tracing("agent", settings(sink.url))
    seen: list[tuple[str | None, str | None]] = []
    tags = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=0)
    for _ in range(200):
        random.seed(42)
        with activated(tracing), trajectory_span(tags, "t", "agent", [], True) as root:
            seen.append((root.trace_id, root.span_id))
    tracing.shutdown(5)
    assert len({trace for trace, _ in seen}) == len({span for _, span in seen}) == 200


def test_no_key_lies_in_the_files_on_disk(tmp_path: Path) -> None:
    changes = {"weave_api_key": "secret" * 7, "weave_url": f"http://127.0.0.1:{free_port()}"}
    tracing = Tracing("agent", settings("http://127.0.0.1:9", tmp_path, **changes))
    trajectory(tracing, target=EVERYWHERE)
    tracing.shutdown(1)
    [stored] = (tmp_path / "weave").rglob("*.otlp")
    head = stored.read_bytes().split(b"\n")[0]
    assert json.loads(head) == {"project_id": "team/gsm8k"}
    assert b"secret" not in stored.read_bytes()
