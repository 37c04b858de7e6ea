"""The services around an engine, measured with an engine that costs next to nothing, `sim_engine.py`.

    .venv/bin/python benchmarks/rollout.py trajectories   2,000 at once through four services: rate, latency, memory
    .venv/bin/python benchmarks/rollout.py overhead       CPU of one generate call over HTTP, against the engine alone
    .venv/bin/python benchmarks/rollout.py replicas       1, 2 and 4 replicas behind Ray Serve; affinity; prefix cache

All services have the niceness of this command. `--checkout DIR` measures those of another checkout.

The simulated engine's speed is chosen so that it is the limit, not the cores: what is measured is that nothing else is.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import httpx
import psutil
from checkout import HELP, run_in
from rollout_replicas import measure_replicas
from sim_engine import SimEngine, use_sim
from transformers import AutoTokenizer

from trackway.clients import AgentClient, CallPolicy, Deadline, RolloutClient, run
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.settings import RolloutSettings
from trackway.system import free_port
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.agent import GroupRequest
from trackway.wire.rollout import GenerateRequest, SamplingParams
from trackway.wire.trajectory import Trajectory

MODEL = TINY_MODEL
GROUP = 8
SLOTS, QUEUE, STEP_S = 128, 128, 0.05
THOUGHT = "Tom had 12 pens and lost 5 of them. " * 4
TURNS = [
    f'{THOUGHT}<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "12-5"}}}}\n</tool_call><|im_end|>',
    f"{THOUGHT}#### 7<|im_end|>",
]
CALLS, IN_FLIGHT = 3000, 64
PROMPT_TOKENS, RESPONSE_TOKENS = 300, 128


@contextlib.contextmanager
def services(names: list[str], settings: Mapping[str, str]) -> Iterator[dict[str, psutil.Process]]:
    """One uvicorn process per service, each ready; their addresses are in `settings`."""
    started: dict[str, psutil.Process] = {}
    environment = {**os.environ, **{f"TRACKWAY_{name.upper()}": value for name, value in settings.items()}}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                command = ["-m", "uvicorn", "--factory", f"trackway.{name}.app:create_app", "--ws", "none"]
                command += ["--port", settings[f"{name}_url"].rsplit(":")[-1], "--no-access-log"]
                log = (Path(folder) / name).open("wb")
                process = subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)
                started[name] = psutil.Process(process.pid)
            for name in names:
                wait_until_ready(settings[f"{name}_url"], Path(folder) / name)
            yield started
        finally:
            for process in started.values():
                process.terminate()
            psutil.wait_procs(list(started.values()), timeout=20)


def wait_until_ready(url: str, log: Path, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        if time.monotonic() > end:
            raise SystemExit(f"{url} did not start: {log.read_text()[-1500:]}")
        time.sleep(0.2)


class Memory:
    """Resident megabytes of each process: when it began, at the most, and now."""

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        self._processes = processes
        self.first = self.now()
        self.peak = dict(self.first)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now(self) -> dict[str, float]:
        return {name: process.memory_info().rss / 2**20 for name, process in self._processes.items()}

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            self.peak = {name: max(now, self.peak[name]) for name, now in self.now().items()}


def measure_trajectories(count: int, rounds: int) -> None:
    """All at once, each of two turns with a tool call between them; the same again, to see whether memory grows."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    script = [tokenizer.encode(turn, add_special_tokens=False) for turn in TURNS]
    sim = {"script": script, "step_s": STEP_S, "step_slope_s": 0.0, "prefill_tokens_per_s": 10_000}
    tokens = sum(map(len, script))
    names = ["rollout", "tools", "reward", "agent"]
    settings = {f"{name}_url": f"http://127.0.0.1:{free_port()}" for name in names}
    settings |= {"engine": use_sim(), "engine_options": json.dumps(sim), "model_path": str(MODEL)}
    settings |= {"max_num_seqs": str(SLOTS), "max_queue": str(QUEUE), "max_concurrent_trajectories": str(count)}
    print(f"{count} trajectories of {tokens} tokens; the engine can do {SLOTS / tokens / STEP_S:.1f} a second")
    with services(names, settings) as processes:
        memory = Memory(processes)
        for number in range(rounds):
            before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
            started = time.perf_counter()
            made = run(roll_out(settings["agent_url"], count, number))
            seconds = time.perf_counter() - started
            cpu = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
            report(made, seconds, cpu)
            time.sleep(5.0)
            shown = [
                f"{name} {memory.first[name]:.0f} -> {memory.peak[name]:.0f} -> {now:.0f}"
                for name, now in memory.now().items()
            ]
            print(f"  MB at the start, at the peak, 5 s after: {', '.join(shown)}")
        refused = metric(settings["rollout_url"], "trackway_requests_total", 'status="429"')
        print(f"  429 answers of the rollout service in all rounds: {refused:.0f}")
        memory.end()


async def roll_out(agent_url: str, count: int, step: int) -> list[Trajectory]:
    """Every group at once, as a training step asks for them."""
    client = AgentClient(agent_url, policy=CallPolicy(max_in_flight=count, total_s=900.0, read_s=900.0))

    async def group(sample) -> list[Trajectory]:
        params = SamplingParams(max_tokens=128, seed=1)
        sample = sample.model_copy(update={"agent_name": "tool_agent"})
        request = GroupRequest(
            run="load", experiment_name="load", step=step, sample=sample, n=GROUP, sampling_params=params
        )
        return [trajectory async for trajectory in client.group(request, Deadline.after(900.0))]

    rows = make_tiny_rows("train", count // GROUP, seed=step)
    return [trajectory for group in await asyncio.gather(*map(group, rows)) for trajectory in group]


def report(made: list[Trajectory], seconds: float, cpu: Mapping[str, float]) -> None:
    """One line of what came and how soon, one of what it cost."""
    totals = sorted(trajectory.timings.total for trajectory in made)
    ended = Counter(
        trajectory.error.code.value if trajectory.error else trajectory.stop_reason.value for trajectory in made
    )
    p50, p99 = statistics.median(totals), totals[int(len(totals) * 0.99)]
    print(
        f"{len(made)} in {seconds:.1f} s: {len(made) / seconds:.1f} a second, p50 {p50:.1f} s, p99 {p99:.1f} s, "
        f"{dict(ended)}"
    )
    each = ", ".join(f"{name} {1000 * spent / len(made):.1f}" for name, spent in cpu.items())
    print(f"  CPU ms a trajectory: {each}; {sum(cpu.values()) / seconds:.2f} cores")


def metric(url: str, name: str, *labels: str) -> float:
    """The sum of a metric's lines that have these labels."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith(f"{name}{{") and all(label in line for label in labels)
    )


def measure_overhead() -> None:
    """The same generate calls on the engine alone, and over HTTP with a client in a process of its own."""
    sim = {"step_s": 0.0001, "step_slope_s": 0.0, "prefill_tokens_per_s": 1e7}
    settings = RolloutSettings(engine=use_sim(), engine_options=sim, max_num_seqs=256, model_path=MODEL)
    alone = run(call_engine(settings))
    url = f"http://127.0.0.1:{free_port()}"
    given = {"rollout_url": url, "engine": use_sim(), "engine_options": json.dumps(sim), "max_num_seqs": "256"}
    with services(["rollout"], {**given, "model_path": str(MODEL)}) as processes:
        server = processes["rollout"]
        run(call_service(url, 200))
        before, own = sum(server.cpu_times()[:2]), time.process_time()
        run(call_service(url, CALLS))
        over_http = (sum(server.cpu_times()[:2]) - before) / CALLS * 1000
        client = (time.process_time() - own) / CALLS * 1000
    print(f"{PROMPT_TOKENS} prompt and {RESPONSE_TOKENS} response tokens, {IN_FLIGHT} calls in flight, CPU ms a call:")
    http = over_http - alone
    print(f"  engine alone {alone:.2f}, service {over_http:.2f}, of which HTTP {http:.2f}; client {client:.2f}")


def requests(count: int) -> Iterator[GenerateRequest]:
    params = SamplingParams(max_tokens=RESPONSE_TOKENS, ignore_eos=True)
    for number in range(count):
        prompt = [3 + (number * 7 + place) % 400 for place in range(PROMPT_TOKENS)]
        yield GenerateRequest(token_ids=prompt, sampling_params=params.model_copy(update={"seed": number}))


async def call_engine(settings: RolloutSettings) -> float:
    """CPU milliseconds of a call."""
    engine, slots = SimEngine(settings), asyncio.Semaphore(IN_FLIGHT)
    await engine.start()

    async def one(request: GenerateRequest) -> None:
        async with slots:
            await engine.generate(request.token_ids, request.sampling_params, "bench")

    asked, started = list(requests(CALLS)), time.process_time()
    await asyncio.gather(*map(one, asked))
    spent = time.process_time() - started
    await engine.stop()
    return spent / CALLS * 1000


async def call_service(url: str, count: int) -> None:
    client = RolloutClient(url, policy=CallPolicy(max_in_flight=IN_FLIGHT))
    await asyncio.gather(*map(client.generate, requests(count)))


def main() -> None:
    """One part, as the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["trajectories", "overhead", "replicas"])
    parser.add_argument("--count", type=int, default=2000, help="trajectories at once")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--checkout", type=Path, help=HELP)
    args = parser.parse_args()
    run_in(args.checkout, parser)
    if args.part == "trajectories":
        measure_trajectories(args.count, args.rounds)
    elif args.part == "overhead":
        measure_overhead()
    else:
        measure_replicas()


if __name__ == "__main__":
    main()
