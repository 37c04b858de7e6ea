"""The console on a large run: seconds until its first answer, of each kind of click and of a text search, and memory.

    .venv/bin/python -m benchmarks.console write --steps 100 --prompts 512     # once; outputs/bench-console
    .venv/bin/python -m benchmarks.console measure

`write` uses the trainer's writer: 8 rollouts for each prompt, two turns with a tool call, texts of some hundred bytes.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from trackway.system import free_port
from trackway.trainer.config import compose
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectory_dump import write_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.trainer import MetricsRow, RunState
from trackway.wire.trajectory import Reward, StopReason, Tags, Timings, ToolCallRecord, Trajectory, Turn, WeightSpan

OUTPUTS = Path("outputs/bench-console")
RUN = "large"
ROLLOUTS = 8
NEEDLE = "zyzzyva"
"""A word that one trajectory of each tenth step has."""


def write(steps: int, prompts: int) -> None:
    """Write the run."""
    folder = RunFolder(OUTPUTS / RUN)
    urls = ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="w")
    folder.create(compose([f"trainer.experiment_name={RUN}"]), urls, total_steps=steps)
    folder.move(RunState.RUNNING)
    draw = random.Random(0)
    started = time.monotonic()
    for step in range(1, steps + 1):
        rollouts = [_rollout(draw, step, prompt, n) for prompt in range(prompts) for n in range(ROLLOUTS)]
        if step % 10 == 0:
            rollouts[draw.randrange(len(rollouts))].prompt_messages[0].content += f" {NEEDLE}"
        write_trajectories(folder.path / f"trajectories/step_{step}.parquet", rollouts)
        scores = [rollout.reward.score for rollout in rollouts if rollout.reward]
        data = {f"own/metric_{i}": draw.random() for i in range(150)}
        data |= {"critic/score/mean": statistics.mean(scores), "timing_s/step": 60.0, "timing_s/gen": 40.0}
        folder.append_row(MetricsRow(step=step, timestamp=step, data=data))
    folder.update(step=steps)
    folder.move(RunState.FINISHED)
    size = sum(file.stat().st_size for file in (folder.path / "trajectories").iterdir())
    count = steps * prompts * ROLLOUTS
    print(f"{count} trajectories in {steps} files, {size / 1e6:.0f} MB, {time.monotonic() - started:.0f} s")


def _rollout(draw: random.Random, step: int, prompt: int, n: int) -> Trajectory:
    a, b = draw.randrange(1000), draw.randrange(1000)
    score = float(draw.random() < 0.2 + 0.6 * step / 100)
    answer = a + b if score else a - b
    words = " ".join(draw.choices(("so", "we", "add", "take", "both", "numbers", "carry", "one", "check"), k=30))
    call = ToolCall(id="c0", function=FunctionCall(name="calculator", arguments=json.dumps({"expression": f"{a}+{b}"})))
    tags = Tags(experiment_name=RUN, step=step, sample_index=prompt, rollout_n=n)
    logprobs = [-draw.expovariate(3) for _ in range(40)]
    return Trajectory(
        id=f"{RUN}/{step}/{prompt}/{n}",
        session_id=f"{RUN}/{step}/{prompt}/{n}",
        tags=tags,
        agent_name="tool_agent",
        data_source="own",
        prompt_ids=[draw.randrange(500) for _ in range(30)],
        response_ids=[draw.randrange(500) for _ in range(40)],
        response_mask=[1] * 30 + [0] * 4 + [1] * 6,
        response_logprobs=[*logprobs[:30], *[0.0] * 4, *logprobs[34:]],
        weight_versions=[WeightSpan(version=step, start=0, end=30), WeightSpan(version=step, start=34, end=40)],
        prompt_messages=[Message(role="user", content=f"Ann has {a} shells and finds {b}. How many has she?")],
        turns=[
            Turn(
                index=0,
                messages=[
                    Message(role="assistant", content=words, tool_calls=[call]),
                    Message(role="tool", content=str(answer), tool_call_id="c0", name="calculator"),
                ],
                response_start=0,
                response_end=30,
                finish_reason="stop",
                calls_executed=1,
                calls=[ToolCallRecord(tool="calculator", tool_call_id="c0", seconds=0.01)],
                generate_s=1.5,
                tools_s=0.01,
            ),
            Turn(
                index=1,
                messages=[Message(role="assistant", content=f"#### {answer}")],
                response_start=34,
                response_end=40,
                finish_reason="stop",
                generate_s=0.5,
            ),
        ],
        reward=Reward(score=score, components={"correct": score}),
        num_turns=4,
        stop_reason=StopReason.ANSWERED,
        timings=Timings(generate_sequences=2.0, tool_calls=0.01, compute_score=0.01, total=2.0 + draw.random()),
    )


def measure(clicks: int) -> None:
    """Print the figures."""
    from tests.console.browser import Browser

    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-m", "trackway.deploy.cli", "console", "--outputs", str(OUTPUTS), "--port", str(port)]
    started = time.monotonic()
    server = subprocess.Popen(command)
    try:
        _first_answer(url)
        print(f"first answer after {time.monotonic() - started:.2f} s, load {psutil.getloadavg()[0]:.1f}")
        memory = psutil.Process(server.pid)
        print(f"memory at the start {memory.memory_info().rss / 1e6:.0f} MB")
        draw = random.Random(1)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(Path(folder)) as browser:
            browser.size(1280)
            _print("open the list of runs", _seconds(browser, clicks, lambda: f"{url}?{draw.random()}#/"))
            browser.open(f"{url}#/")
            step = lambda: draw.randint(1, 100)  # noqa: E731
            for name, view in {
                "run": lambda: f"run?run={RUN}&metrics=own/metric_{draw.randrange(150)}",
                "step": lambda: f"step?run={RUN}&step={step()}",
                "trajectory": lambda: f"trajectory?run={RUN}&step={step()}&sample={draw.randrange(512)}&rollout=3",
                "tokens": lambda: f"tokens?run={RUN}&step={step()}&sample={draw.randrange(512)}&rollout=3",
                "prompt": lambda: f"prompt?run={RUN}&sample={draw.randrange(512)}",
                "failures": lambda: f"failures?run={RUN}&_={draw.random()}",
            }.items():
                _print(name, _seconds(browser, clicks, lambda view=view: f"{url}#/{view()}"))
        _print("search for a rare word, all steps", [_search(url, NEEDLE, 10) for _ in range(3)])
        _print("search for a common word, one page", [_search(url, "carry", 50) for _ in range(3)])
        print(f"memory at the end {memory.memory_info().rss / 1e6:.0f} MB")
    finally:
        server.terminate()
        server.wait(30)


def _first_answer(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"{url}api/runs").raise_for_status()
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the console did not start"
            time.sleep(0.02)


def _seconds(browser: object, clicks: int, address: Callable[[], str]) -> list[float]:
    taken = []
    for _ in range(clicks):
        started = time.monotonic()
        browser.open(address())  # pyright: ignore[reportAttributeAccessIssue]
        taken.append(time.monotonic() - started)
    return taken


def _search(url: str, text: str, hits: int) -> float:
    """Seconds until that many hits, or the end."""
    started, cursor, found = time.monotonic(), None, 0
    while True:
        parameters = {"run": RUN, "text": text, "limit": hits} | ({"cursor": cursor} if cursor else {})
        page = httpx.get(f"{url}api/search", params=parameters, timeout=60).json()
        found, cursor = found + len(page["hits"]), page["cursor"]
        if cursor is None or found >= hits:
            assert found == hits, found
            return time.monotonic() - started


def _print(name: str, taken: list[float]) -> None:
    ordered = sorted(taken)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    print(f"{name:36} median {statistics.median(taken):.2f} s, p95 {p95:.2f} s, n {len(taken)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "measure"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--clicks", type=int, default=20)
    options = parser.parse_args()
    if options.what == "write":
        write(options.steps, options.prompts)
    else:
        measure(options.clicks)
