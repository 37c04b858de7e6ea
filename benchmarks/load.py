"""Many trajectories at once through five services on Ray Serve, with a simulated engine, traces and killed replicas.

    .venv/bin/python benchmarks/load.py --count 3000 --in-flight 1000 --kills
    .venv/bin/python benchmarks/load.py --count 100000 --in-flight 20000 --kills --rounds 3     twenty minutes

Groups of eight are asked for as a run asks for them, with its retries. Each trajectory has `--turns` turns with a tool
call between two of them. In every round a rollout and an agent replica are killed (`--kills`) once a third has ended.
Spans go to an OTLP receiver in this process, which counts the traces that are a whole tree. `--checkout DIR` measures
another one.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import psutil
import yaml
from checkout import HELP, run_in
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from sim_engine import use_sim
from transformers import AutoTokenizer

from trackway.clients import AgentClient, CallPolicy, run
from trackway.deploy.bundled import CPU_CONFIG, TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import service_statuses
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.trainer.loop.rollout_client import GroupTemplate, RetryPolicy, Rollouts
from trackway.wire.agent import Limits
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import TraceBackend, TraceTarget, Trajectory

GROUP = 8
MOST_TOKENS = 2**14
"""Limit of a trajectory's response. None reaches it."""
SETTLE_S = 10.0
"""Pause between two rounds, in which queues of spans empty."""
TURNS = [
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12-5"}}\n</tool_call><|im_end|>',
    "#### 7<|im_end|>",
]


class Spans:
    """Spans by trace, as an OTLP receiver got them."""

    def __init__(self) -> None:
        self._parents: dict[bytes, dict[bytes, bytes]] = defaultdict(dict)
        self._lock = threading.Lock()

    def add(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._parents[span.trace_id][span.span_id] = span.parent_span_id

    def whole(self, trace: str) -> bool:
        """Whether the trace has one root, and every other span's parent."""
        parents = self._parents.get(bytes.fromhex(trace), {})
        return [parent in parents for parent in parents.values()].count(False) == 1

    def clear(self) -> None:
        self._parents.clear()


@contextmanager
def receiver(spans: Spans) -> Iterator[str]:
    """The URL of an OTLP receiver that fills `spans`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            spans.add(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()


def serve_config(args: argparse.Namespace, traces_url: str) -> dict[str, object]:
    """`CPU_CONFIG` with the engine simulated, several replicas of rollout and agent, and room for what is in flight."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    turns = TURNS[:1] * (args.turns - 1) + TURNS[1:]
    script = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
    sim = {"script": script, "step_s": args.step_ms / 1000, "step_slope_s": 0.0, "prefill_tokens_per_s": 1e6}
    room = {"max_concurrent_trajectories": args.in_flight}
    engine = {"engine": use_sim(), "engine_options": sim, "max_num_seqs": args.slots, "max_queue": args.in_flight}
    own = {"rollout": engine, "agent": room}
    tracing = {"otlp_endpoint": traces_url, "backends": ["otlp"]}
    config = yaml.safe_load(CPU_CONFIG.read_text())
    for application in config["applications"]:
        name = application["name"]
        application["args"] = {**own.get(name, application["args"]), "tracing": tracing}
        [deployment] = application["deployments"]
        deployment["ray_actor_options"]["num_cpus"] = 0.05
        deployment["max_ongoing_requests"] = max(1000, args.in_flight)
        if name in own:
            deployment["num_replicas"] = args.replicas
    return config


def replicas(deployment: Deployment) -> dict[str, list[int]]:
    """Process ids by service."""
    return {
        status.service: [replica.health.pid for replica in status.replicas] for status in service_statuses(deployment)
    }


def kill_one(deployment: Deployment, service: str, usage: "Usage") -> None:
    pids = replicas(deployment)[service]
    print(f"  kills {service} replica with pid {pids[0]} of {pids}", flush=True)
    usage.note()
    os.kill(pids[0], signal.SIGKILL)


class Usage:
    """CPU seconds of the services' processes; of a killed one those that were noted last."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._seconds: dict[tuple[str, int], float] = {}
        self.note()
        self._before = dict(self._seconds)

    def note(self) -> None:
        """Read the processes that live."""
        for name, pids in replicas(self._deployment).items():
            for pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._seconds[name, pid] = sum(psutil.Process(pid).cpu_times()[:2])

    def spent(self) -> dict[str, float]:
        """CPU seconds by service since the beginning; those of a new process with its start."""
        self.note()
        total: defaultdict[str, float] = defaultdict(float)
        for (name, pid), seconds in self._seconds.items():
            total[name] += seconds - self._before.get((name, pid), 0.0)
        return dict(total)


def memory(deployment: Deployment) -> dict[str, list[float]]:
    """Resident megabytes of each replica."""
    return {
        name: [round(psutil.Process(pid).memory_info().rss / 2**20) for pid in pids]
        for name, pids in replicas(deployment).items()
    }


async def roll_out(deployment: Deployment, args: argparse.Namespace, step: int, usage: Usage) -> list[Trajectory]:
    """One round, as the trainer collects a batch; some groups are traced."""
    policy = CallPolicy(max_in_flight=args.in_flight, total_s=args.timeout_s, read_s=args.timeout_s)
    client = AgentClient(deployment.url("agent"), policy=policy, direct=True)
    template = GroupTemplate(
        run="load",
        experiment_name="load",
        n=GROUP,
        sampling_params=SamplingParams(max_tokens=128, seed=1),
        limits=Limits(max_response_length=MOST_TOKENS),
        default_agent="tool_agent",
        trace_target=TraceTarget(backends=(TraceBackend("otlp"),)),
    )
    retries = RetryPolicy(attempts=40, timeout_s=args.timeout_s, max_inflight=max(1, args.in_flight // GROUP))
    rollouts = Rollouts(client, template, retries)
    samples = make_tiny_rows("train", args.count // GROUP, seed=step)
    every = round(1 / args.traced) if args.traced else 0
    ended: list[Trajectory] = []

    async def group(position: int) -> None:
        traced = bool(every) and position % every == 0
        ended.extend(await rollouts.group(samples[position], step, 0, traced))

    async def kill() -> None:
        while len(ended) < args.count // 3:
            await asyncio.sleep(0.1)
        for service in ("rollout", "agent"):
            await asyncio.to_thread(kill_one, deployment, service, usage)

    async with asyncio.TaskGroup() as tasks:
        for position in range(len(samples)):
            tasks.create_task(group(position))
        if args.kills:
            tasks.create_task(kill())
    return ended


def measure(deployment: Deployment, args: argparse.Namespace, spans: Spans) -> list[dict[str, object]]:
    """Every round's numbers, each printed as it ends."""
    rounds: list[dict[str, object]] = []
    for step in range(1, args.rounds + 1):
        usage, started, own = Usage(deployment), time.perf_counter(), time.process_time()
        ended = run(roll_out(deployment, args, step, usage))
        seconds = time.perf_counter() - started
        cpu, own = usage.spent(), time.process_time() - own
        time.sleep(SETTLE_S)
        wait_for_replicas(deployment, args.replicas)
        rounds.append(numbers(ended, seconds, cpu | {"client": own}, spans) | {"memory_mb": memory(deployment)})
        print(json.dumps(rounds[-1]) if args.json else shown(rounds[-1]), flush=True)
        spans.clear()
    return rounds


def wait_for_replicas(deployment: Deployment, count: int, deadline_s: float = 60.0) -> None:
    """Return when those that were killed are replaced."""
    end = time.monotonic() + deadline_s
    while min(len(replicas(deployment)[name]) for name in ("rollout", "agent")) < count:
        if time.monotonic() > end:
            raise SystemExit(f"expected {count} replicas within {deadline_s:.0f} s, got {replicas(deployment)}")
        time.sleep(0.5)


def numbers(ended: Sequence[Trajectory], seconds: float, cpu: dict[str, float], spans: Spans) -> dict[str, object]:
    totals = sorted(trajectory.timings.total for trajectory in ended)
    outcomes = Counter(
        trajectory.error.code.value if trajectory.error else trajectory.stop_reason.value for trajectory in ended
    )
    traced = [trajectory.trace_id for trajectory in ended if trajectory.trace_id]
    return {
        "trajectories": len(ended),
        "distinct": len({trajectory.id for trajectory in ended}),
        "outcomes": dict(outcomes),
        "seconds": round(seconds, 1),
        "per_second": round(len(ended) / seconds, 1),
        "p50_s": round(statistics.median(totals), 2),
        "p99_s": round(totals[int(len(totals) * 0.99)], 2),
        "cpu_ms_each": {name: round(1000 * spent / len(ended), 2) for name, spent in cpu.items()},
        "traced": len(traced),
        "whole_traces": sum(map(spans.whole, traced)),
    }


def shown(row: dict[str, object]) -> str:
    return "  ".join(f"{name} {value}" for name, value in row.items())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000, help="trajectories of a round, in groups of eight")
    parser.add_argument("--in-flight", type=int, default=1000, help="trajectories at once")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2, help="of a trajectory, with a tool call between two of them")
    parser.add_argument("--traced", type=float, default=0.1, help="share of the groups whose spans are recorded")
    parser.add_argument("--kills", action="store_true", help="kill a rollout and an agent replica in each round")
    parser.add_argument("--replicas", type=int, default=2, help="of rollout and of agent")
    parser.add_argument("--slots", type=int, default=512, help="sequences that an engine decodes at once")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of one decode step")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="longest time for a group, retries included")
    parser.add_argument("--json", action="store_true", help="one JSON object per round")
    parser.add_argument("--checkout", type=Path, help=HELP)
    args = parser.parse_args()
    run_in(args.checkout, parser)
    return args


def main() -> None:
    """Start the services, measure, and take them down."""
    args, spans = arguments(), Spans()
    with tempfile.TemporaryDirectory() as folder, receiver(spans) as traces_url:
        config = Path(folder) / "load.yaml"
        config.write_text(yaml.safe_dump(serve_config(args, traces_url)))
        where = {"port": 0, "dashboard_port": 0, "ray_port": 0, "mlflow_uri": "http://127.0.0.1:9"}
        settings = UpSettings(config=config, outputs=Path(folder), **where)
        deployment = bring_up(settings, lambda name, state: print(f"{name}: {state}", file=sys.stderr, flush=True))
        try:
            measure(deployment, args, spans)
        finally:
            take_down(deployment)


if __name__ == "__main__":
    main()
