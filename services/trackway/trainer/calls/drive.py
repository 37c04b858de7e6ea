"""The process of a run that is driven by calls: executes the requests of its log and writes their results.

The requests of a model are executed strictly by `seq_id`; a gap waits. Models take turns in the order in which their
requests came. The adapter and AdamW's state are on disk after each request that changes weights. A new process loads
them, and executes the later requests of the log again: the gradient since the last step comes from there. A result that
exists is kept.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import JsonValue
from tokenizers import Tokenizer

from trackway.clients.weights import WeightStore
from trackway.learner.config import LearnerConfig
from trackway.learner.measuring import Clock
from trackway.learner.policy import Policy
from trackway.system import StorageError
from trackway.system.process import warn_experimental
from trackway.system.waits import Waits
from trackway.tracing import Tracing, extracted, install
from trackway.tracing.spans import call_span
from trackway.trainer.calls.log import UNNAMED, RequestLog, TrainingCall
from trackway.trainer.calls.losses import step_metrics, write_step
from trackway.trainer.calls.models import (
    AdamArguments,
    AdapterHeader,
    LoraArguments,
    SavedAdapter,
    TrainedModel,
    arguments_of,
    read_adapter,
    write_adapter,
)
from trackway.trainer.calls.protobuf import decode, encode
from trackway.trainer.calls.results import Result, Results, model_folder, weights_file
from trackway.trainer.delivery import ConsoleSink, FileSink, Sink, Tracking, open_tracking
from trackway.trainer.loop.build_traces import mlflow_feedback, run_target
from trackway.trainer.loop.from_config import experimental, learner_config, update_mode
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.settings import taken_over
from trackway.trainer.traces.run import TraceFeedback, links_of
from trackway.wire.errors import ERRORS, ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow, RunState
from trackway.wire.trajectory import TraceTarget
from trackway.wire.weights import policy_url

LOOK_AGAIN_S = 1.0
"""Longest pause between looks at the log."""
TRACKING_DEADLINE_S = 60.0
"""Longest wait at the end for the last metrics to reach MLflow."""
TRACES_DEADLINE_S = 10.0
"""Longest wait at the end for the last spans."""
STATE = "state.safetensors"
UNEMBED = (
    "train_unembed: the head gets no adapter here, so it is not trained; set train_unembed=False to say so, or train "
    "the whole model with a run"
)
"""Warning of create_model, since engines take no adapter of the head."""

logger = logging.getLogger("trackway.trainer")


@dataclass
class _Line:
    """The requests of a model."""

    next_seq: int = 0
    model: TrainedModel | None = None
    missing: str = "was not created"
    """Why there is no model."""
    waiting: dict[int, tuple[TrainingCall, bytes]] = field(default_factory=dict)
    links: list[str] = field(default_factory=list[str])
    """The samples of the data since the last step."""


class CallDriver:
    """Executes the requests of a run's log. Not thread-safe."""

    def __init__(
        self,
        folder: RunFolder,
        config: LearnerConfig,
        policy: Policy,
        sinks: Sequence[Sink],
        target: TraceTarget | None = None,
        links: TraceFeedback | None = None,
    ) -> None:
        """Load the models of an earlier process. Raises CHECKPOINT_CORRUPT for a damaged file.

        `target` is the destination of the requests' spans, and `links` gets the traces of each step.
        """
        self._folder, self._config, self._policy, self._sinks = folder, config, policy, sinks
        self._log, self._results = RequestLog(folder.calls), Results(folder.calls)
        self._lines: dict[str, _Line] = {}
        self._offset, self._target, self._links = 0, target, links
        self._clock, self._step_ended = Clock(), time.monotonic()
        tokenizer = policy.folder / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(tokenizer)) if tokenizer.is_file() else None
        self.step = max((row.step for row in folder.rows()), default=0)
        """Steps of all models."""
        for file in sorted(folder.calls.glob(f"models/*/{STATE}")):
            self._restore(file)

    def _restore(self, file: Path) -> None:
        saved = read_adapter(file)
        if saved is None:
            return
        header = saved.header
        line = self._lines[header.model_id] = _Line(header.seq_id + 1)
        if header.is_unloaded:
            line.missing = "was unloaded"
        else:
            line.model = TrainedModel(header, self._config, self._policy)
            line.model.load(saved, optimizer=True)
        if header.row is not None and header.row.step > self.step:
            self._add_row(header.row)
        id = f"{header.model_id}:{header.seq_id}"
        if self._results.read(id) is None:
            self._results.write(id, Result("json", header.result.encode()))

    def advance(self, is_stopped: Callable[[], bool]) -> None:
        """Execute the requests that the log has, until a stop. Raises StorageError."""
        for end, call, body in self._log.read(self._offset):
            self._offset = end
            line = self._lines.setdefault(call.model_id, _Line())
            if call.seq_id >= line.next_seq:
                line.waiting[call.seq_id] = call, body
            while line.next_seq in line.waiting:
                if is_stopped():
                    return
                self._execute(line, *line.waiting.pop(line.next_seq))
                line.next_seq += 1

    def _execute(self, line: _Line, call: TrainingCall, body: bytes) -> None:
        known = self._results.read(call.id)
        if known is not None and call.op in ("save_weights", "save_weights_for_sampler"):
            return
        links = [*dict.fromkeys(call.links.values())]
        if call.op == "forward_backward":
            line.links += [link for link in links if link not in line.links]
        elif call.op == "optim_step":
            links, line.links = line.links, []
        try:
            with (
                extracted({"traceparent": call.traceparent if known is None else ""}, self._target),
                call_span(call.op, links) as span,
            ):
                span.inputs({"id": call.id, **call.arguments})
                result = self._result(line, call, body)
                if result.kind == "json":
                    span.outputs(json.loads(result.body))
        except StorageError:
            raise
        except TrackwayError as error:
            logger.warning("request %s (%s) failed: %s", call.id, call.op, error)
            is_of_user = ERRORS[error.code].status < 500 or error.code is ErrorCode.NOT_FINITE
            result = Result.of_error(error.message, "user" if is_of_user else "server")
        except Exception as error:
            logger.exception("request %s (%s) failed", call.id, call.op)
            message = f"{call.op}: {type(error).__name__}: {error}; see {self._folder.log}"
            result = Result.of_error(message, "server")
        if known is None:
            self._results.write(call.id, result)

    def _result(self, line: _Line, call: TrainingCall, body: bytes) -> Result:
        if call.op == "create_model":
            return self._create(line, call)
        if line.model is None:
            message = f"expected a model in training, got {call.model_id}, which {line.missing}; create another one"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        match call.op:
            case "forward_backward":
                with self._clock("update_actor"):
                    output = line.model.forward_backward(decode(body), call.links, call.traceparent)
                return Result("protobuf", encode(output.logprobs, {"loss:sum": output.loss}))
            case "optim_step":
                return self._optim_step(line.model, call)
            case "load_weights":
                self._load(line.model, call.arguments.get("path"), call.arguments.get("optimizer"))
                return self._changed(line.model, call, {"type": "load_weights", "path": call.arguments["path"]})
            case "save_weights":
                return self._save(line.model, call)
            case "save_weights_for_sampler":
                return self._publish(line.model, call)
            case "unload_model":
                return self._unload(line, call)

    def _create(self, line: _Line, call: TrainingCall) -> Result:
        lora = arguments_of(LoraArguments, call.arguments.get("lora_config", {}), "lora_config")
        header = AdapterHeader(model_id=call.model_id, seq_id=call.seq_id, lora=lora)
        model = TrainedModel(header, self._config, self._policy)
        if "checkpoint" in call.arguments:
            self._load(model, call.arguments["checkpoint"], call.arguments.get("optimizer"))
        reply: dict[str, JsonValue] = {"type": "create_model", "model_id": call.model_id}
        if lora.train_unembed:
            logger.warning("%s: %s", call.model_id, UNEMBED)
            reply["warning"] = UNEMBED
        result = self._changed(model, call, reply)
        line.model = model
        if self._folder.info().threads is None:  # another number would round differently
            self._folder.update(threads=model.learner.threads)
        return result

    def _load(self, model: TrainedModel, path: JsonValue, optimizer: JsonValue) -> None:
        saved = read_adapter(weights_file(self._folder.path.parent, str(path)))
        if saved is None:
            message = f"expected saved weights, got {path}, which were not saved; save them with save_state first"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        model.load(saved, optimizer=bool(optimizer))

    def _optim_step(self, model: TrainedModel, call: TrainingCall) -> Result:
        trained = model.data
        with self._clock("update_actor"):
            options = arguments_of(AdamArguments, call.arguments.get("adam_params", {}), "adam_params")
            metrics = model.optim_step(options)
        seconds, self._step_ended = time.monotonic() - self._step_ended, time.monotonic()
        data = {
            "actor/loss_sum": metrics["loss_sum"],
            "actor/grad_norm": metrics["grad_norm"],
            "actor/lr": metrics["lr"],
            **step_metrics(trained),
            "perf/total_num_tokens": metrics["tokens"],
            "perf/throughput": metrics["tokens"] / seconds,
            "training/model": float(call.model_id.rpartition(":")[2]),
            "training/global_step": float(self.step + 1),
            "timing_s/step": seconds,
            **self._clock.take(),
        }
        row = MetricsRow(step=self.step + 1, timestamp=time.time_ns() // 1_000_000, data=data)
        used = write_step(self._folder.path, row.step, trained, self._tokenizer and self._tokenizer.decode)
        if self._links is not None:
            self._links.submit(links_of([*{trajectory.trace_id: trajectory for trajectory in used}.values()]))
        model.header.steps += 1
        result = self._changed(model, call, {"type": "optim_step", "metrics": dict(metrics)}, row)
        self._add_row(row)
        return result

    def _changed(
        self, model: TrainedModel, call: TrainingCall, reply: dict[str, JsonValue], row: MetricsRow | None = None
    ) -> Result:
        """The result of a request that has changed the model, which is on disk then."""
        changes = {"seq_id": call.seq_id, "result": json.dumps(reply), "row": row}
        model.header = model.header.model_copy(update=changes)
        model.write(self._state(call.model_id), model.header)
        return Result("json", model.header.result.encode())

    def _save(self, model: TrainedModel, call: TrainingCall) -> Result:
        name = str(call.arguments.get("path"))
        path = f"tinker://{call.model_id}/weights/{name}"
        file = weights_file(self._folder.path.parent, path)
        saved = read_adapter(file)
        if saved is not None and saved.header.seq_id != call.seq_id and not call.arguments.get("overwrite"):
            message = f"expected a new name for the weights, got {name!a}, which exists; set overwrite, or rename"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        model.write(file, model.header.model_copy(update={"seq_id": call.seq_id}))
        return _json({"type": "save_weights", "path": path})

    def _publish(self, model: TrainedModel, call: TrainingCall) -> Result:
        """Publish the adapter as a policy of the rollout service: the model's own, or one that a snapshot has alone."""
        place, name = call.arguments.get("sampling_session_seq_id"), call.arguments.get("path")
        line = f"{self._folder.name}.{call.model_id.rpartition(':')[2]}"
        reply: dict[str, JsonValue] = {"type": "save_weights_for_sampler"}
        is_snapshot = call.arguments.get("kind", "snapshot") == "snapshot"
        if name is not None:
            reply["path"] = f"tinker://{call.model_id}/sampler_weights/{name}"
        kind = "" if name is not None else UNNAMED
        policy = f"{line}.{kind}{call.seq_id}" if is_snapshot else line
        store = WeightStore(policy_url(self._folder.services().weights_url, policy))
        published = store.latest() if is_snapshot else None
        model.learner.activate()
        with self._clock("update_weights"):
            version = self._version(store, model) if published is None else published.version
        return _json({**reply, "sampling_session_seq_id": place, "policy": policy, "version": version})

    def _version(self, store: WeightStore, model: TrainedModel) -> int:
        config = self._folder.config()
        publisher = Publisher(
            store,
            model.learner,
            self._folder.name,
            self._folder.info().uid,
            self._folder.path / "export",
            config.trackway.keep_weights,
            update_mode(config),
        )
        try:
            return publisher.publish()
        finally:
            publisher.close()

    def remove_unnamed(self) -> None:
        """Remove the policies that only samplers of this session use: snapshots without a path, and the models' own."""
        store, own = WeightStore(self._folder.services().weights_url), re.escape(self._folder.name)
        for policy in store.policies():
            if re.fullmatch(rf"{own}\.\d+(\.{UNNAMED}\d+)?", policy):
                store.remove_policy(policy)

    def _unload(self, line: _Line, call: TrainingCall) -> Result:
        assert line.model is not None
        reply = json.dumps({"type": "unload_model", "model_id": call.model_id})
        changes = {"seq_id": call.seq_id, "result": reply, "row": None, "is_unloaded": True}
        write_adapter(self._state(call.model_id), SavedAdapter(line.model.header.model_copy(update=changes), {}))
        self._policy.attach(None)
        line.model, line.missing = None, "was unloaded"
        return Result("json", reply.encode())

    def _state(self, model_id: str) -> Path:
        return model_folder(self._folder.calls, model_id) / STATE

    def _add_row(self, row: MetricsRow) -> None:
        for sink in self._sinks:
            sink.log(row)
        self.step = row.step
        self._folder.update(step=row.step, metrics=self._folder.info().metrics | row.data)


def _json(reply: dict[str, JsonValue]) -> Result:
    return Result("json", json.dumps({name: value for name, value in reply.items() if value is not None}).encode())


async def serve_calls(
    folder: RunFolder, stop: asyncio.Event, woken: asyncio.Event, waits: Waits
) -> tuple[RunState, int]:
    """Execute the run's requests until a stop, or until the run may finish. Returns its final state and step."""
    config, settings = folder.config(), taken_over()
    tracing = Tracing("trainer", settings) if settings.default_backends else None
    install(tracing)
    with waits("the run", "MLflow's id of the run, and the other loggers"):
        tracking = await asyncio.to_thread(open_tracking, folder, config, settings.mlflow_uri)
    status = "FAILED"
    try:
        with waits("the run", "its model to be loaded"):
            driver = await asyncio.to_thread(_driver, folder, tracking)
        if not stop.is_set():
            folder.move(RunState.RUNNING)
        state = await _until_finished(folder, driver, stop, woken)
        status = "FINISHED" if state is RunState.FINISHED else "KILLED"
    finally:
        with waits("the run", "its last metrics to be delivered", TRACKING_DEADLINE_S):
            summaries = await asyncio.to_thread(tracking.close, status, TRACKING_DEADLINE_S)
        if tracing is not None:
            with waits("the run", "its last spans to be delivered", TRACES_DEADLINE_S):
                await asyncio.to_thread(tracing.shutdown, TRACES_DEADLINE_S)
        try:
            folder.update(tracking=summaries, **tracking.ids)
        except StorageError as error:
            logger.warning("the final counts of metrics cannot be written: %s", error)
    return state, driver.step


async def _until_finished(folder: RunFolder, driver: CallDriver, stop: asyncio.Event, woken: asyncio.Event) -> RunState:
    while not stop.is_set():
        may_finish = folder.may_finish  # read before the log: what it has then is executed
        woken.clear()
        await asyncio.to_thread(driver.advance, stop.is_set)
        if may_finish and not stop.is_set():
            try:
                await asyncio.to_thread(driver.remove_unnamed)
            except (OSError, TrackwayError) as error:
                logger.warning("the weights for samplers of the session are not removed: %s", error)
            return RunState.FINISHED
        waiting = [asyncio.ensure_future(event.wait()) for event in (stop, woken)]
        await asyncio.wait(waiting, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
    return RunState.STOPPED


def _driver(folder: RunFolder, tracking: Tracking) -> CallDriver:
    config = folder.config()
    settings = learner_config(config, total_steps=1)
    settings = replace(settings, threads=folder.info().threads or settings.threads)
    for feature in experimental(config, settings.device):
        warn_experimental(feature)
    try:
        policy = Policy(settings.policy_settings()._replace(lora=None))
    except (OSError, ValueError) as error:
        message = f"no learner for the model {config.actor_rollout_ref.model.path!r}: {error}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error
    tracking.catch_up(folder.rows())
    sinks: list[Sink] = [FileSink(folder), *tracking.backends]
    if "console" in config.trainer.logger:
        sinks.append(ConsoleSink())
    target = run_target(config, tracking.run)
    return CallDriver(folder, settings, policy, sinks, target, mlflow_feedback(target, taken_over(), tracking))
