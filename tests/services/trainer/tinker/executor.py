"""A process that answers the requests of a session at once, with made-up numbers, in place of a run's."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from trackway.trainer.calls.log import RequestLog, TrainingCall
from trackway.trainer.calls.protobuf import schema
from trackway.trainer.calls.results import Result, Results
from trackway.wire.trainer import RunInfo, RunState

LOGPROB = -0.5


class AnsweringRuns:
    """Runs whose processes are threads. A model's requests are executed strictly by their sequence ids."""

    def __init__(self, outputs: Path) -> None:
        self._outputs = outputs
        self._lock = threading.Lock()
        self.started: dict[str, Mapping[str, JsonValue]] = {}
        self.executed: list[str] = []
        self.ended: list[str] = []
        self.frozen = False
        """Execute nothing, as a process that is busy."""
        self.policy = "base"
        """Policy that published weights have."""
        self.told = RunInfo(run="run", state=RunState.RUNNING)

    async def start_session(self, name: str, values: Mapping[str, JsonValue]) -> RunInfo:
        self.started[name] = values
        return self.told

    def wake(self, name: str) -> None:
        threading.Thread(target=self._execute, args=(name,), daemon=True).start()

    async def end_session(self, name: str) -> None:
        self.ended.append(name)

    def state(self, name: str) -> RunInfo | None:
        return self.told if name in self.started else None

    def _execute(self, name: str) -> None:
        if self.frozen:
            return
        folder = self._outputs / name / "calls"
        results = Results(folder)
        with self._lock:
            calls = {call.id: (call, body) for _, call, body in RequestLog(folder).read()}
            for id, (call, body) in sorted(calls.items(), key=lambda item: item[1][0].seq_id):
                before = f"{call.model_id}:{call.seq_id - 1}"
                if id not in self.executed and (call.seq_id == 0 or before in self.executed):
                    results.write(id, _answer(call, body, self.policy))
                    self.executed.append(id)


def _answer(call: TrainingCall, body: bytes, policy: str) -> Result:
    if call.op == "forward_backward":
        return Result("protobuf", _output(body))
    name = call.arguments.get("path")
    answers: dict[str, dict[str, JsonValue]] = {
        "create_model": {"model_id": call.model_id},
        "optim_step": {"metrics": {"grad_norm": 1.0}},
        "save_weights": {"path": f"tinker://{call.model_id}/weights/{name}"},
        "save_weights_for_sampler": {
            **({} if name is None else {"path": f"tinker://{call.model_id}/sampler_weights/{name}"}),
            "policy": policy,
            "version": 0,
        },
        "load_weights": {"path": name, "model_id": call.model_id},
        "unload_model": {"model_id": call.model_id},
    }
    return Result(
        "json",
        json.dumps({"type": call.op, **answers[call.op]} if call.op != "optim_step" else answers[call.op]).encode(),
    )


def _output(body: bytes) -> bytes:
    import numpy as np

    request = schema().ForwardBackwardRequest()
    request.ParseFromString(body)
    lengths = [len(datum.loss_fn_inputs["target_tokens"].dense) // 8 for datum in request.data]
    output = schema().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": 1.5})
    record = output.loss_fn_outputs.add(num_datums=len(lengths))
    field = record.fields["logprobs"]
    field.dtype = schema().DTYPE_FLOAT32
    field.data = np.full(sum(lengths), LOGPROB, np.float32).tobytes()
    field.offsets = np.cumsum([0, *(4 * length for length in lengths)]).astype(np.int64).tobytes()
    return output.SerializeToString()
