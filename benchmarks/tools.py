"""What an execute call costs on the server, however it gets there: microseconds of CPU of all its processes, latency.

    .venv/bin/python benchmarks/tools.py                          a bare route, plain uvicorn, Ray Serve both ways
    .venv/bin/python benchmarks/tools.py --targets bare,on,direct --connections 32 --rounds 5

The targets take turns within each round; a figure is the median of the rounds, and the ratio is to the bare FastAPI
route of the same run: on a busy machine read the ratios. Every request has its own Idempotency-Key and deadline, and a
sampled traceparent where tracing is on; spans go to a local OTLP receiver, whose own work is not counted.
The load comes from a process of its own (tools_load.py), by loopback, and is bounded in number and time.

Another tool server in the same run: start it, and name it with its URL, process id and body:

    --also verl-tool http://127.0.0.1:5500/get_observation 4711 '{"trajectory_ids": ["t"], "actions": ["x"],
        "extra_fields": [{}], "finish": [true]}'

benchmarks/README.md says how verl-tool and NeMo-Gym are started. The children of the process are counted with it.

All contenders must have the niceness of this command: Ray's workers are started with it, and another process is
refused. `--checkout DIR` measures the tool server of another checkout.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml
from checkout import HELP, run_in
from tools_caller import caller_cpu
from tools_load import MAX_REQUESTS

from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.system import free_port

HERE = Path(__file__).parent
ECHO = {"arguments": {"text": "hello"}, "tool_call_id": "call_1"}
CALCULATE = {"arguments": {"expression": "12-5"}, "tool_call_id": "call_1"}
WARM_S = 1.0
NAMES = ("bare", "off", "on", "on-one-shot", "proxy", "direct", "direct-one-shot", "direct-2")


@dataclass
class Target:
    """Where requests go, and the processes that work on them."""

    urls: list[str]
    body: dict[str, object]
    processes: list[psutil.Process]
    traced: bool = False

    def cpu(self) -> float:
        """Seconds so far, children included."""
        family = [child for process in self.processes for child in (process, *process.children(recursive=True))]
        return sum(sum(process.cpu_times()[:2]) for process in {process.pid: process for process in family}.values())

    def load(self, connections: int, seconds: float) -> dict[str, float]:
        """What the load generator says."""
        wanted = {"urls": self.urls, "body": json.dumps(self.body), "traced": self.traced}
        wanted |= {"connections": connections, "seconds": seconds}
        command = [sys.executable, str(HERE / "tools_load.py"), json.dumps(wanted)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        if found["bad"] or not found["good"]:
            raise SystemExit(f"{self.urls[0]}: {found}")
        return found


@contextlib.contextmanager
def uvicorn(app: str, environment: dict[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """URL and process id of an app in a process of its own."""
    port = free_port()
    command = ["-m", "uvicorn", app, "--port", str(port), "--no-access-log", "--ws", "none", "--log-level", "warning"]
    command += ["--factory"] if app.endswith("create_app") else []
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **(environment or {})}, stdout=log, stderr=log
        )
        try:
            wait_for_answer(f"http://127.0.0.1:{port}/", Path(log.name))
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(20)


def wait_for_answer(url: str, log: Path, deadline_s: float = 60.0) -> None:
    """Until something answers there, whatever it says."""
    end = time.monotonic() + deadline_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url, trust_env=False)
            return
        if time.monotonic() > end:
            raise SystemExit(f"{url} did not start: {log.read_text()[-1500:]}")
        time.sleep(0.2)


def post(url: str, body: dict[str, object]) -> dict[str, str]:
    """The answer's JSON."""
    return httpx.post(url, json=body, trust_env=False, timeout=30).raise_for_status().json()


def instance_url(base_url: str) -> str:
    """The execute route of a new instance of the trivial tool."""
    return f"{base_url}/instances/{post(f'{base_url}/instances', {'tool': 'echo'})['instance_id']}/execute"


def alone(found: dict[str, Target], wanted: list[str], stack: contextlib.ExitStack, sink: str) -> None:
    """The targets in one uvicorn process each."""
    if "bare" in wanted:
        url, pid = stack.enter_context(uvicorn("tools_parts:bare"))
        found["bare"] = Target([f"{url}/execute"], ECHO, [psutil.Process(pid)])
    server, extra = "trackway.tools.app:create_app", {"TRACKWAY_EXTRA_TOOLS": '["tools_parts:EchoTool"]'}
    if "off" in wanted:
        url, pid = stack.enter_context(uvicorn(server, extra))
        found["off"] = Target([instance_url(url)], ECHO, [psutil.Process(pid)])
    if {"on", "on-one-shot"} & set(wanted):
        url, pid = stack.enter_context(uvicorn(server, {**extra, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": sink}))
        found["on"] = Target([instance_url(url)], ECHO, [psutil.Process(pid)], traced=True)
        found["on-one-shot"] = Target(
            [f"{url}/tools/calculator/execute"], CALCULATE, [psutil.Process(pid)], traced=True
        )


@contextlib.contextmanager
def served(sink: str) -> Iterator[Deployment]:
    """The tools application of `CPU_CONFIG` on a Ray of its own."""
    shipped = yaml.safe_load(CPU_CONFIG.read_text())
    [tools] = [app for app in shipped["applications"] if app["name"] == "tools"]
    tracing = {"backends": ["otlp"], "otlp_endpoint": sink}
    tools["args"] = {"extra_tools": ["tools_parts:EchoTool"], "tracing": tracing, "drain_s": 0}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tools.yaml"
        config.write_text(yaml.safe_dump({**shipped, "applications": [tools]}))
        settings = UpSettings(
            config=config, outputs=Path(folder), mlflow_uri="http://127.0.0.1:9", port=0, dashboard_port=0, ray_port=0
        )
        deployment = bring_up(settings, lambda name, state: None)
        try:
            yield deployment
        finally:
            take_down(deployment)


def on_serve(deployment: Deployment, replicas: int) -> dict[str, Target]:
    """Through the proxy, and at the replicas' own ports."""
    running = serve_api.scale(deployment, "tools", replicas)
    ray = psutil.Process(deployment.processes[0].pid).children(recursive=True)
    proxies = [process for process in ray if "ProxyActor" in " ".join(process.cmdline())]
    everything = [*proxies, *(psutil.Process(replica.health.pid) for replica in running)]
    urls = [replica.url for replica in running if replica.url]
    instances = [instance_url(url) for url in urls]
    if replicas > 1:
        return {"direct-2": Target(instances, ECHO, everything, traced=True)}
    through = instances[0].replace(urls[0], f"{deployment.base_url}/tools")
    return {
        "proxy": Target([through], ECHO, everything, traced=True),
        "direct": Target(instances, ECHO, everything, traced=True),
        "direct-one-shot": Target([f"{urls[0]}/tools/calculator/execute"], CALCULATE, everything, traced=True),
    }


def measure(targets: dict[str, Target], connections: list[int], rounds: int, seconds: float) -> None:
    """The targets in turn, and a line for each."""
    check_niceness(targets)
    seen: dict[tuple[str, int], list[tuple[float, float, float, float]]] = defaultdict(list)
    for many in connections:
        for _ in range(rounds):
            for name, target in targets.items():
                target.load(many, WARM_S)
                before = target.cpu()
                found = target.load(many, seconds)
                spent = (target.cpu() - before) / found["good"] * 1e6
                seen[name, many].append((spent, found["p50_ms"], found["p99_ms"], found["good"] / seconds))
        print(f"{many} connections: CPU us a call (of bare), p50 ms, p99 ms, calls/s; median of {rounds}", flush=True)
        floor = statistics.median(figures[0] for figures in seen["bare", many]) if "bare" in targets else float("nan")
        for name in targets:
            cpu, p50, p99, rate = (statistics.median(column) for column in zip(*seen[name, many], strict=True))
            print(f"  {name:16} {cpu:7.0f} ({cpu / floor:5.2f}x) {p50:8.2f} {p99:9.2f} {rate:7.0f}", flush=True)


def check_niceness(targets: dict[str, Target]) -> None:
    """Exit when a process has another niceness than this one: its figures would mean something else."""
    own = psutil.Process().nice()
    for name, target in targets.items():
        wrong = [process for process in target.processes if process.nice() != own]
        if wrong:
            found = ", ".join(f"{process.nice()} of process {process.pid}" for process in wrong)
            raise SystemExit(f"{name}: expected niceness {own} as of this command, got {found}; start it at {own}")


def main() -> None:
    """As asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--connections", default="1,32,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help=f"of one load; at most {MAX_REQUESTS} requests")
    parser.add_argument("--also", nargs=4, action="append", default=[], metavar=("NAME", "URL", "PID", "BODY"))
    parser.add_argument("--checkout", type=Path, help=HELP)
    args = parser.parse_args()
    run_in(args.checkout, parser)
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]  # replicas import the trivial tool
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    wanted, connections = args.targets.split(","), [int(count) for count in args.connections.split(",")]
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(uvicorn("tools_parts:sink"))
        sink = f"{url}/v1/traces"
        targets = {
            name: Target([url], json.loads(body), [psutil.Process(int(pid))]) for name, url, pid, body in args.also
        }
        alone(targets, wanted, stack, sink)
        if {"proxy", "direct", "direct-one-shot"} & set(wanted):
            deployment = stack.enter_context(served(sink))
            targets |= on_serve(deployment, 1)
            targets = {name: target for name, target in targets.items() if name in wanted or name not in NAMES}
            measure(targets, connections, args.rounds, args.seconds)
            print(caller_cpu(f"{deployment.base_url}/tools"))
            targets = {"bare": targets["bare"]} if "bare" in targets else {}
            targets |= on_serve(deployment, 2) if "direct-2" in wanted else {}
        measure(targets, connections, args.rounds, args.seconds)


if __name__ == "__main__":
    main()
