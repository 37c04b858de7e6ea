"""What MLflow's server computes for a trajectory: its spans from four services, its link to the run, its feedback."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from tracing_contenders import ANSWER, QUESTION

from trackway.system import free_port
from trackway.tracing import (
    Tracing,
    TracingSettings,
    chat_span,
    reward_span,
    set_outcome,
    tool_span,
    trajectory_span,
    turn_span,
)
from trackway.tracing.context import extracted, inject
from trackway.tracing.local_mlflow import client as local_mlflow
from trackway.tracing.span_handle import activated
from trackway.trainer.delivery.feedback_queue import Assessment, FeedbackQueue
from trackway.trainer.delivery.jobs import Later
from trackway.trainer.delivery.mlflow_api import MlflowApi
from trackway.trainer.delivery.mlflow_run import MlflowFeedback
from trackway.wire.chat import Message
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Tags, TraceBackend, TraceTarget

SERVICES = ("agent", "rollout", "tools", "reward")
DEADLINE_S = 300.0


class Services:
    """Four services, each with a tracing of its own as in a process of its own."""

    def __init__(self, uri: str, target: TraceTarget) -> None:
        self._target = target
        self._by_name = {name: Tracing(name, TracingSettings(mlflow_uri=uri)) for name in SERVICES}

    def trajectory(self, step: int, sample: int, rollout: int) -> Assessment:
        """The spans of a rollout of two turns with a tool call; what the trainer knows of it later."""
        tags = Tags(experiment_name="benchmark", step=step, sample_index=sample, rollout_n=rollout)
        identity, messages = f"benchmark/{step}/{sample}/{rollout}", [Message(role="user", content=QUESTION)]
        headers: dict[str, str] = {}

        @contextlib.contextmanager
        def at(service: str) -> Iterator[None]:
            inject(headers)
            with activated(self._by_name[service]), extracted(headers):
                yield

        with (
            activated(self._by_name["agent"]),
            trajectory_span(tags, identity, "tool_agent", messages, True, self._target) as root,
        ):
            for turn in range(2):
                with turn_span(turn):
                    with at("rollout"), chat_span("model", SamplingParams()) as chat:
                        chat.usage(120, 160)
                        chat.outputs({"messages": [{"role": "assistant", "content": ANSWER[:300]}]})
                    if turn == 0:
                        with at("tools"), tool_span("calculator", {"expression": "48/2"}, "call_0") as tool:
                            tool.outputs({"text": "24", "reward": 0.0})
            with at("reward"), reward_span("gsm8k") as reward:
                reward.score(1.0)
            set_outcome(root)
            root.outputs({"reward": 1.0, "messages": [{"role": "assistant", "content": ANSWER}]})
        values = {"reward": 1.0, "advantage": 0.5, "fate": "used"}
        return Assessment(root.trace_id or "", root.span_id or "", values, link=True)

    def flush(self) -> None:
        """Wait until MLflow has every span."""
        for tracing in self._by_name.values():
            if not tracing.flush(DEADLINE_S) or tracing.stats().lost:
                raise SystemExit(f"spans are missing: {tracing.stats()}")


@contextlib.contextmanager
def local_server(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The server of a local database, as `trackway up` starts it."""
    port = free_port()
    (folder / "mlflow.db.server").mkdir()
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(local_mlflow.server_command(folder / "mlflow.db", port), stdout=log, stderr=log)
    uri, end = f"http://127.0.0.1:{port}", time.monotonic() + DEADLINE_S
    try:
        while not (folder / "mlflow.db.server" / "address.json").exists():
            if time.monotonic() > end or server.poll() is not None:
                raise SystemExit((folder / "log").read_text()[-2000:])
            time.sleep(0.2)
        [child] = psutil.Process(server.pid).children()
        yield uri, child
    finally:
        server.terminate()
        server.wait(60)


def measure(steps: int, samples: int, rollouts: int) -> None:
    """Print the server's CPU for each trajectory of a run of so many steps."""
    with tempfile.TemporaryDirectory() as name, local_server(Path(name)) as (uri, server):
        api = MlflowApi(uri)
        experiment = api.experiment("benchmark")
        run = api.create_run(experiment, "benchmark", "uid", int(time.time() * 1000))
        services = Services(
            uri, TraceTarget(backends=(TraceBackend.MLFLOW,), mlflow_experiment_id=experiment, mlflow_run_id=run)
        )
        queue = FeedbackQueue(Path(name, "feedback"))
        services.trajectory(0, 0, 0)
        services.flush()
        before = cpu_s(server)
        for step in range(1, steps + 1):
            made = []
            for sample in range(samples):
                made += [services.trajectory(step, sample, rollout) for rollout in range(rollouts)]
                time.sleep(1.0 / samples)
            queue.push(made)
        services.flush()
        spans = cpu_s(server) - before
        feedback, before = MlflowFeedback(api, 60.0), cpu_s(server)
        end, lost = time.monotonic() + DEADLINE_S, 0
        while queue.waiting and time.monotonic() < end:
            try:
                sent = queue.send(lambda assessments: feedback.send(assessments, run))
            except Later:
                time.sleep(0.1)
            else:
                lost += sent.lost if sent else 0
        values = cpu_s(server) - before
        if queue.waiting or lost:
            raise SystemExit(f"feedback is missing: {queue.waiting} values wait, {lost} are lost")
        count = steps * samples * rollouts
        print(
            f"{count} trajectories: {1000 * (spans + values) / count:5.1f} ms server CPU each, "
            f"{1000 * spans / count:.1f} for spans, {1000 * values / count:.1f} for link and feedback"
        )


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children."""
    return sum(sum(member.cpu_times()[:2]) for member in [process, *process.children(recursive=True)])
