"""Runs that are driven by calls: their folders, their requests, and what is left of them on disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.services.trainer.calls.requests import request_of
from trackway.learner.policy import Policy
from trackway.run_config import resolve
from trackway.trainer.calls.drive import STATE, CallDriver
from trackway.trainer.calls.log import Op, RequestLog, TrainingCall
from trackway.trainer.calls.results import Result, Results, model_folder
from trackway.trainer.delivery import FileSink
from trackway.trainer.loop.from_config import learner_config
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.supervisor.manager import SESSION
from trackway.trainer.traces.run import TraceFeedback

LORA = {"rank": 4, "seed": 3, "train_unembed": False}
LR = {"adam_params": {"learning_rate": 0.01}}


class Session:
    """A session's folder, with the service's side of its log."""

    def __init__(self, outputs: Path, model: Path, name: str = "session") -> None:
        self.folder = RunFolder(outputs / name)
        keys = {**SESSION, "actor_rollout_ref.model.path": str(model), "trainer.experiment_name": name}
        keys |= {"trackway.device": "cpu", "trackway.threads": 1}
        address = "http://127.0.0.1:9"
        services = ServiceUrls(agent_url=address, tools_url=address, weights_url=str(outputs / "weights"))
        self.folder.create(resolve(keys), services)
        self.folder.calls.mkdir()
        self.log, self.results = RequestLog(self.folder.calls), Results(self.folder.calls)

    def model_id(self, number: int = 0) -> str:
        return f"{self.folder.name}:train:{number}"

    def call(
        self,
        seq_id: int,
        op: Op,
        arguments: Mapping[str, Any] | None = None,
        body: bytes = b"",
        n: int = 0,
        **trace: Any,
    ) -> str:
        """Acknowledge a request of a model. Returns its id."""
        model_id = self.model_id(n)
        id = f"{model_id}:{seq_id}"
        call = TrainingCall(id=id, model_id=model_id, seq_id=seq_id, op=op, arguments=dict(arguments or {}), **trace)
        self.log.append(call, body)
        return id

    def driver(self, links: TraceFeedback | None = None) -> CallDriver:
        """A new process's driver."""
        settings = learner_config(self.folder.config(), total_steps=1)
        policy, sinks = Policy(settings.policy_settings()), [FileSink(self.folder)]
        return CallDriver(self.folder, settings, policy, sinks, links=links)

    def run(self) -> CallDriver:
        """Execute all requests in a new process's driver."""
        driver = self.driver()
        driver.advance(lambda: False)
        return driver

    def result(self, seq_id: int, n: int = 0) -> Result:
        result = self.results.read(f"{self.model_id(n)}:{seq_id}")
        assert result is not None
        return result

    def state(self, n: int = 0) -> bytes:
        """The file of a model's weights and moments, byte by byte, without its header."""
        tensors = load_file(model_folder(self.folder.calls, self.model_id(n)) / STATE)
        return b"".join(name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors))


def body(seed: int, loss_fn: str = "cross_entropy", forward_only: bool = False) -> bytes:
    """A request of three data."""
    data = [([3 + (seed * 7 + row + place) % 60 for place in range(5 + row)]) for row in range(3)]
    inputs = [{"target_tokens": [*tokens[1:], 5], "weights": [1.0] * len(tokens)} for tokens in data]
    return request_of(list(zip(data, inputs, strict=True)), loss_fn, forward_only=forward_only)


def train(session: Session, steps: Sequence[int], n: int = 0, lora: Mapping[str, Any] = LORA) -> None:
    """Acknowledge a new model and steps of two requests each."""
    session.call(0, "create_model", {"base_model": "m", "lora_config": dict(lora)}, n=n)
    for step in steps:
        session.call(3 * step + 1, "forward_backward", body=body(2 * step + n), n=n)
        session.call(3 * step + 2, "forward_backward", body=body(2 * step + 1 + n), n=n)
        session.call(3 * step + 3, "optim_step", LR, n=n)
