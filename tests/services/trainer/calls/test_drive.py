"""A run that is driven by calls: order, errors that leave the model as it was, and nothing lost with a process."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.services.trainer.calls.requests import request_of
from tests.services.trainer.calls.sessions import LORA, LR, Session, body, train
from tests.waiting import until
from trackway.clients.weights import WeightStore
from trackway.tracing import Tracing, TracingSettings, activated
from trackway.tracing import attributes as names
from trackway.trainer.calls.drive import CallDriver
from trackway.trainer.calls.models import TrainedModel
from trackway.trainer.calls.protobuf import schema
from trackway.trainer.calls.results import Results
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import RunState
from trackway.wire.weights import policy_url

pytestmark = pytest.mark.slow
STEPS = range(3)


def error_of(session: Session, seq_id: int, n: int = 0) -> str:
    result = session.result(seq_id, n)
    assert result.kind == "error"
    answer = json.loads(result.body)
    assert answer["category"] == "user"
    return answer["error"]


def test_requests_of_a_model_are_executed_by_their_seq_id(tmp_path: Path, tiny_model: Path) -> None:
    straight, mixed = Session(tmp_path / "a", tiny_model), Session(tmp_path / "b", tiny_model)
    train(straight, STEPS)
    straight.run()
    driver = mixed.driver()
    mixed.call(2, "forward_backward", body=body(1))
    mixed.call(3, "optim_step", LR)
    mixed.call(0, "create_model", {"base_model": "m", "lora_config": LORA})
    driver.advance(lambda: False)
    assert mixed.results.read(f"{mixed.model_id()}:2") is None  # 1 is missing

    train(mixed, STEPS)
    driver.advance(lambda: False)

    assert mixed.state() == straight.state()
    assert [mixed.result(seq) for seq in (1, 2, 4, 5)] == [straight.result(seq) for seq in (1, 2, 4, 5)]


def test_models_of_other_ranks_on_one_base_train_as_each_does_alone(tmp_path: Path, tiny_model: Path) -> None:
    kinds = [LORA, {**LORA, "rank": 2, "train_mlp": False}, {**LORA, "rank": 3, "train_attn": False}]
    together = Session(tmp_path / "together", tiny_model)
    for n, lora in enumerate(kinds):
        together.call(0, "create_model", {"lora_config": lora}, n=n)
    for step in STEPS:
        for op in (1, 2, 3):
            for n in range(len(kinds)):
                given: dict[str, Any] = {"arguments": LR} if op == 3 else {"body": body(2 * step + op - 1 + n)}
                together.call(3 * step + op, "optim_step" if op == 3 else "forward_backward", n=n, **given)
    together.run()

    for n, lora in enumerate(kinds):
        alone = Session(tmp_path / f"alone-{n}", tiny_model)
        train(alone, STEPS, n, lora)
        alone.run()
        assert together.state(n) == alone.state(n)
        assert together.result(8, n) == alone.result(8, n)
    assert together.folder.info().step == 9


def test_each_step_has_a_row_and_a_result(tmp_path: Path, tiny_model: Path) -> None:
    session = Session(tmp_path, tiny_model)
    train(session, STEPS)
    session.run()

    rows = session.folder.rows()
    assert [row.step for row in rows] == [1, 2, 3]
    assert rows[0].data["actor/lr"] == 0.01
    assert rows[0].data["perf/total_num_tokens"] == 36  # two requests of 5, 6 and 7 tokens
    assert rows[0].data["training/trajectories"] == 6 and "critic/advantages/mean" not in rows[0].data
    seconds = [rows[0].data[f"timing_s/{activity}"] for activity in ("step", "update_actor")]
    assert seconds[0] > seconds[1] > 0 and rows[0].data["perf/throughput"] == 36 / seconds[0]
    outputs = [schema().ForwardBackwardOutput.FromString(session.result(seq).body) for seq in (1, 2)]
    assert rows[0].data["actor/loss_sum"] == sum(output.metrics["loss:sum"] for output in outputs) > 0
    metrics = json.loads(session.result(3).body)["metrics"]
    assert metrics["grad_norm"] == rows[0].data["actor/grad_norm"] > 0
    assert (session.folder.info().step, session.folder.info().metrics["training/global_step"]) == (3, 3.0)


class Killed(BaseException):
    """The process has gone."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("victim", [(Results, "write"), (TrainedModel, "write"), (CallDriver, "_add_row")])
def test_whatever_write_a_process_died_at_the_weights_and_results_are_as_without(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, victim: tuple[type, str], after: bool
) -> None:
    calm, killed = Session(tmp_path / "a", tiny_model), Session(tmp_path / "b", tiny_model)
    for session in (calm, killed):
        train(session, STEPS)
        train(session, STEPS, 1, {**LORA, "rank": 2})
    calm.run()
    write = getattr(*victim)
    left = [0]

    def dying(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise Killed
        write(*arguments)
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(*victim, dying)
    deaths = 0
    while True:
        left[0] = 2 + deaths % 3  # each process comes further than the last
        try:
            killed.run()
            break
        except Killed:
            deaths += 1

    assert deaths >= 2
    assert [killed.state(n) for n in (0, 1)] == [calm.state(n) for n in (0, 1)]
    for n in (0, 1):
        outcomes = [[session.result(seq, n).body for seq in (1, 2, 3, 4, 5, 6, 7, 8, 9)] for session in (calm, killed)]
        assert outcomes[0] == outcomes[1]
    rows = killed.folder.rows()
    assert [row.step for row in rows] == [*range(1, 7)]
    assert [row.data["actor/loss_sum"] for row in rows] == [row.data["actor/loss_sum"] for row in calm.folder.rows()]


def test_a_step_and_its_computations_link_to_the_samples_that_they_used(tmp_path: Path, tiny_model: Path) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("trainer", TracingSettings(mlflow_uri=None, weave_api_key=None), exporter)
    session = Session(tmp_path, tiny_model)
    root, samples = f"00-{1:032x}-{2:016x}-01", {f"q:{n}": f"00-{3:032x}-{4 + n // 2:016x}-01" for n in range(6)}
    create = {"lora_config": LORA}
    session.call(0, "create_model", create, traceparent=root)
    session.call(
        1, "forward_backward", body=body(1), traceparent=root, links={id: samples[id] for id in ("q:0", "q:1", "q:2")}
    )
    session.call(
        2, "forward_backward", body=body(2), traceparent=root, links={id: samples[id] for id in ("q:2", "q:4")}
    )
    session.call(3, "optim_step", LR, traceparent=root)
    session.call(4, "load_weights", {"path": "tinker://x:train:0/weights/y"}, traceparent=root)
    session.call(5, "optim_step", LR)
    with activated(tracing):
        driver = session.driver()
        driver.advance(lambda: False)
        session.results.remove(f"{session.model_id()}:2")  # a process that died before it wrote this
        session.driver().advance(lambda: False)
    tracing.flush(5)

    spans = {span.name: span for span in exporter.get_finished_spans() if span.name != "forward_backward"}
    parts = [span for span in exporter.get_finished_spans() if span.name == "forward_backward"]

    def links(span: ReadableSpan) -> list[int]:
        return [link.context.span_id for link in span.links]

    assert [*spans] == ["create_model", "optim_step", "load_weights"]
    assert [links(part) for part in parts] == [[4, 5], [5, 6]] and links(spans["optim_step"]) == [4, 5, 6]
    for span in (*spans.values(), *parts):
        assert span.context is not None and span.parent is not None
        assert (span.context.trace_id, span.parent.span_id) == (1, 2)
    outputs = json.loads(str((spans["optim_step"].attributes or {})[names.OUTPUTS]))
    assert outputs["metrics"]["grad_norm"] > 0 and not spans["load_weights"].status.is_ok


def test_data_of_weight_0_add_nothing_and_a_restored_model_computes_the_same(tmp_path: Path, tiny_model: Path) -> None:
    session, zero = Session(tmp_path, tiny_model), {"target_tokens": [5, 6], "weights": [0.0, 0.0]}
    session.call(0, "create_model", {"lora_config": LORA})
    session.call(1, "save_weights", {"path": "first"})
    session.call(2, "forward_backward", body=request_of([([4, 5], zero)], "cross_entropy"))
    session.call(3, "forward_backward", body=body(2))
    session.call(4, "optim_step", LR)
    session.call(5, "forward_backward", body=body(2, forward_only=True))
    checkpoint = {"lora_config": LORA, "checkpoint": "tinker://session:train:0/weights/first"}
    session.call(0, "create_model", checkpoint, n=1)
    session.call(1, "forward_backward", body=body(2, forward_only=True), n=1)
    session.run()

    nothing = schema().ForwardBackwardOutput.FromString(session.result(2).body)
    assert nothing.metrics["loss:sum"] == 0
    assert session.result(1, n=1) == session.result(3) != session.result(5)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_log_without_the_requests_before_the_state_leads_to_the_same_weights(
    tmp_path: Path, tiny_model: Path, is_lost: bool
) -> None:
    calm, compacted = Session(tmp_path / "a", tiny_model), Session(tmp_path / "b", tiny_model)
    train(calm, STEPS)
    calm.run()
    train(compacted, STEPS[:2])
    driver = compacted.run()
    compacted.call(7, "forward_backward", body=body(4))
    driver.advance(lambda: False)
    compacted.log.compact(lambda call: call.seq_id in (0, 6, 7))
    compacted.call(8, "forward_backward", body=body(5))
    compacted.call(9, "optim_step", LR)
    driver = compacted.driver() if is_lost else driver
    driver.advance(lambda: False)

    assert [call.seq_id for _, call, _ in compacted.log.read()] == [0, 6, 7, 8, 9]
    assert compacted.state() == calm.state()
    assert [compacted.result(seq) for seq in (7, 8)] == [calm.result(seq) for seq in (7, 8)]


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        (body(1, "stable_reinforce"), "loss_fn: expected one of"),
        (request_of([([1, 2], {"target_tokens": [2, 64]})], "cross_entropy"), "token ids below 64, got 64"),
        (request_of([([1] * 5000, {"target_tokens": [2] * 5000})], "cross_entropy"), "tokens in a datum, got 5000"),
        (
            request_of([([1], {"target_tokens": [2], "weights": [1e38]})] * 40, "cross_entropy"),
            "expected finite logprobs and a finite cross_entropy loss",
        ),
    ],
)
def test_a_request_that_fails_leaves_the_gradient_and_the_process_as_they_were(
    tmp_path: Path, tiny_model: Path, request_body: bytes, message: str
) -> None:
    calm, troubled = Session(tmp_path / "a", tiny_model), Session(tmp_path / "b", tiny_model)
    for session, second in ((calm, body(8, forward_only=True)), (troubled, request_body)):
        session.call(0, "create_model", {"lora_config": LORA})
        session.call(1, "forward_backward", body=body(1))
        session.call(2, "forward_backward", body=second)
        session.call(3, "optim_step", LR)
        session.run()

    assert message in error_of(troubled, 2)
    assert troubled.state() == calm.state()
    assert troubled.result(3).kind == "json"


def test_a_step_to_weights_that_are_not_finite_is_left_out(tmp_path: Path, tiny_model: Path) -> None:
    calm, troubled = Session(tmp_path / "a", tiny_model), Session(tmp_path / "b", tiny_model)
    train(calm, [0])
    train(troubled, [0])
    troubled.call(4, "forward_backward", body=body(9))
    troubled.call(5, "optim_step", {"adam_params": {"learning_rate": 1e39}})
    troubled.call(6, "optim_step", {"adam_params": {"learning_rate": -1}})
    calm.run()
    troubled.run()

    assert "expected a finite gradient and finite weights" in error_of(troubled, 5)
    assert "adam_params.learning_rate: expected another value" in error_of(troubled, 6)
    assert troubled.state() == calm.state()


def test_saved_weights_continue_in_another_session_with_and_without_the_optimizer(
    tmp_path: Path, tiny_model: Path
) -> None:
    first = Session(tmp_path, tiny_model, "first")
    train(first, [0])
    first.call(4, "save_weights", {"path": "one"})
    first.call(5, "save_weights", {"path": "one"})
    first.call(6, "save_weights", {"path": "../../x", "overwrite": True})
    first.run()
    assert json.loads(first.result(4).body) == {"type": "save_weights", "path": "tinker://first:train:0/weights/one"}
    assert "expected a new name for the weights, got 'one', which exists" in error_of(first, 5)
    assert "expected tinker://<model_id>/weights/<name>" in error_of(first, 6)

    path = "tinker://first:train:0/weights/one"
    second = Session(tmp_path, tiny_model, "second")
    for n, optimizer in ((0, True), (1, False)):
        arguments = {"lora_config": {**LORA, "seed": 9}, "checkpoint": path, "optimizer": optimizer}
        second.call(0, "create_model", arguments, n=n)
        second.call(1, "forward_backward", body=body(5), n=n)
        second.call(2, "load_weights", {"path": path, "optimizer": optimizer}, n=n)
        second.call(3, "forward_backward", body=body(2), n=n)
        second.call(4, "forward_backward", body=body(3), n=n)
        second.call(5, "optim_step", LR, n=n)
    second.call(0, "create_model", {"lora_config": {**LORA, "rank": 2}, "checkpoint": path}, n=2)
    second.call(1, "optim_step", LR, n=2)
    second.call(0, "create_model", {"lora_config": LORA, "checkpoint": "tinker://x:train:0/weights/none"}, n=3)
    second.run()
    train(first, [0])
    for place, seed in enumerate((2, 3)):
        first.call(7 + place, "forward_backward", body=body(seed))
    first.call(9, "optim_step", LR)
    first.run()

    assert second.state(0) == first.state(0)
    assert second.state(1) != first.state(0)
    assert "expected weights saved with rank" in error_of(second, 0, n=2)
    assert "which was not created" in error_of(second, 1, n=2)
    assert "which were not saved" in error_of(second, 0, n=3)


def test_weights_for_samplers_are_policies_of_the_weight_store(tmp_path: Path, tiny_model: Path) -> None:
    session = Session(tmp_path, tiny_model)
    train(session, [0, 1])
    session.call(7, "save_weights_for_sampler", {"path": "a"})
    session.call(8, "save_weights_for_sampler", {"sampling_session_seq_id": 4, "kind": "snapshot"})
    session.call(9, "save_weights_for_sampler", {"sampling_session_seq_id": 5, "kind": "inflight"})
    session.call(10, "save_weights_for_sampler", {"sampling_session_seq_id": 6, "kind": "inflight"})
    driver = session.run()

    answers = [json.loads(session.result(seq).body) for seq in (7, 8, 9, 10)]
    assert [(answer["policy"], answer["version"]) for answer in answers] == [
        ("session.0.7", 1),
        ("session.0.s8", 1),
        ("session.0", 1),
        ("session.0", 2),
    ]
    assert answers[0]["path"] == "tinker://session:train:0/sampler_weights/a"
    store = WeightStore(policy_url(str(tmp_path / "weights"), "session.0.7"))
    manifest = store.manifest(1)
    assert {file.name for file in manifest.files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert manifest.proof is not None and manifest.proof.probes
    other = Session(tmp_path, tiny_model, "session.0.9x")
    train(other, [0])
    other.call(4, "save_weights_for_sampler", {"kind": "inflight"})
    other.run()

    driver.remove_unnamed()

    assert WeightStore(str(tmp_path / "weights")).policies() == ["session.0.7", "session.0.9x.0"]


def test_an_unloaded_model_stays_unloaded_in_the_next_process(tmp_path: Path, tiny_model: Path) -> None:
    session = Session(tmp_path, tiny_model)
    train(session, [0])
    session.call(4, "unload_model")
    session.run()
    session.call(5, "optim_step", LR)
    session.run()

    assert json.loads(session.result(4).body) == {"type": "unload_model", "model_id": "session:train:0"}
    assert "got session:train:0, which was unloaded" in error_of(session, 5)


def test_a_model_that_asks_for_the_head_is_warned(tmp_path: Path, tiny_model: Path) -> None:
    session = Session(tmp_path, tiny_model)
    session.call(0, "create_model", {"lora_config": {"rank": 2}})
    session.call(0, "create_model", {"lora_config": {"rank": 2, "train_mlp": False, "train_attn": False}}, n=1)
    session.run()

    assert "train_unembed: the head gets no adapter here" in json.loads(session.result(0).body)["warning"]
    assert "expected train_mlp or train_attn, got neither" in error_of(session, 0, n=1)


def test_a_killed_process_loses_no_acknowledged_request(tmp_path: Path, tiny_model: Path) -> None:
    calm, killed = Session(tmp_path / "a", tiny_model), Session(tmp_path / "b", tiny_model)
    train(calm, range(6))
    calm.run()
    train(killed, range(2))
    process = subprocess.Popen([sys.executable, "-m", "trackway.trainer.worker", str(killed.folder.path)])
    try:
        train(killed, range(4))  # requests that come while it runs
        until(partial(killed.results.read, f"{killed.model_id()}:4"))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    killed.folder.move(RunState.RESTARTING)  # as its supervisor does
    train(killed, range(6))
    killed.folder.let_finish()
    ended = subprocess.run([sys.executable, "-m", "trackway.trainer.worker", str(killed.folder.path)], timeout=200)

    assert ended.returncode == 0
    assert killed.state() == calm.state()
    assert [killed.result(seq).body for seq in range(1, 19)] == [calm.result(seq).body for seq in range(1, 19)]
    info = RunFolder(killed.folder.path).info()
    assert (info.state, info.step, [row.step for row in killed.folder.rows()]) == (RunState.FINISHED, 6, [*range(1, 7)])
