"""The console on a large run: first answer and paint, each kind of click, searches and what cancels them, memory.

    .venv/bin/python -m benchmarks.console write        # once, 1,000 steps: outputs/bench-console, 2.1 GB
    .venv/bin/python -m benchmarks.console measure
    .venv/bin/python -m benchmarks.console write --outputs outputs/bench-long --steps 50 --chars 8000   # rows of 8 KB
    .venv/bin/python -m benchmarks.console measure --outputs outputs/bench-long --clicks 5
    .venv/bin/python -m benchmarks.console values       # what trackway.save_token_values writes for a step
    .venv/bin/python -m benchmarks.console beside       # steps of the demo, alone and with its page open in Chromium

`write` uses the trainer's writer: 8 rollouts for each prompt, two turns with a tool call, texts of some hundred bytes;
one rollout in a hundred fails, one call in fifty, and one in fifty was sent again.
`measure` clicks in Chromium and asks the searches over HTTP: over 102,400 trajectories (25 steps) and over the run.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import httpx
import psutil
import pyarrow.parquet as pq

from trackway.run_config import compose
from trackway.system import free_port
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import write_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trainer import MetricsRow, RunInfo, RunState
from trackway.wire.trajectory import (
    Incident,
    Reward,
    StopReason,
    Tags,
    Timings,
    ToolCallRecord,
    Trajectory,
    Turn,
    WeightSpan,
)

RUN = "large"
ROLLOUTS = 8
WRITERS = 2
"""Processes."""
NEEDLE = "zyzzyva"
"""A word that one trajectory of each tenth step has."""


def write(outputs: Path, steps: int, prompts: int, chars: int) -> None:
    """Write the run, or go on with it, in two processes; `chars` of text a trajectory, no fewer than some hundred."""
    folder = RunFolder(outputs / RUN)
    urls = ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="w")
    if not folder.exists:
        folder.create(compose([f"trainer.experiment_name={RUN}"]), urls, total_steps=steps)
        folder.move(RunState.RUNNING)
    left = range(len(folder.rows()) + 1, steps + 1)
    draw = random.Random(left.start)
    started = time.monotonic()
    make = partial(_first_step, prompts, chars)
    with ProcessPoolExecutor(WRITERS, get_context("spawn"), initializer=make) as pool:
        for step, score in zip(left, pool.map(partial(_write_step, folder.path), left), strict=True):
            data = {f"own/metric_{i}": draw.random() for i in range(150)}
            data |= {"critic/score/mean": score, "timing_s/step": 60.0, "timing_s/gen": 40.0}
            folder.append_row(MetricsRow(step=step, timestamp=step, data=data))
    folder.update(step=steps)
    folder.move(RunState.FINISHED)
    size = sum(file.stat().st_size for file in (folder.path / "trajectories").iterdir())
    count = steps * prompts * ROLLOUTS
    took = f"{len(left)} files written in {time.monotonic() - started:.0f} s"
    print(f"{count} trajectories in {steps} files, {size / 1e6:.0f} MB, {took}")


_rollouts: list[Trajectory] = []
"""Of the first step, in a process that writes; the others change what depends on the step."""


def _first_step(prompts: int, chars: int) -> None:
    draw = random.Random(0)
    _rollouts[:] = [_rollout(draw, 1, prompt, n, chars) for prompt in range(prompts) for n in range(ROLLOUTS)]
    for index, rollout in enumerate(_rollouts):
        if index % 50 == 1:
            rollout.turns[0].calls[0].error = ErrorCode.TOOL_TIMEOUT
        if index % 50 == 2:
            rollout.incidents, rollout.incident_services = [Incident.RETRIED], {Incident.RETRIED: ["tools"]}


def _write_step(folder: Path, step: int) -> float:
    """Write a step, and return its mean score; the prompts and most texts are those of the first one."""
    draw = random.Random(step)
    needle = draw.randrange(len(_rollouts)) if step % 10 == 0 else -1
    for index, rollout in enumerate(_rollouts):
        rollout.tags.step = step
        rollout.id = rollout.session_id = f"{RUN}/{step}/{rollout.tags.sample_index}/{rollout.tags.rollout_n}"
        score = float(draw.random() < 0.2 + 0.6 * min(1, step / 100))
        rollout.reward = Reward(score=score, components={"correct": score})
        if index % 100 == 0:
            message = f"rollout replica {draw.randrange(8)} gave no answer after {draw.random():.1f} s"
            rollout.error = ErrorBody(code=ErrorCode.UNAVAILABLE, message=message, retryable=True)
            rollout.reward, rollout.stop_reason = None, StopReason.ERROR
        rollout.turns[1].messages[0].content = f"#### {draw.randrange(1000)}{f' {NEEDLE}' if index == needle else ''}"
    write_trajectories(folder / f"trajectories/step_{step}.parquet", _rollouts)
    return statistics.mean(rollout.reward.score for rollout in _rollouts if rollout.reward)


WORDS = ("so", "we", "add", "take", "both", "numbers", "carry", "one", "check")
WORD_CHARS = 4.7
"""Mean length of a word and its space."""


def _rollout(draw: random.Random, step: int, prompt: int, n: int, chars: int = 0) -> Trajectory:
    a, b = (random.Random(prompt * 2 + part).randrange(1000) for part in range(2))
    score = float(draw.random() < 0.2 + 0.6 * min(1, step / 100))
    answer = a + b if score else a - b
    words = " ".join(draw.choices(WORDS, k=max(30, round(chars / WORD_CHARS))))
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


HUNDRED_THOUSAND = 25
"""Steps of 4,096 trajectories."""
RARE_REGEX, COMMON_REGEX = r"\bzyzz[a-z]+\b", r"carry \w+ one"


def measure(outputs: Path, clicks: int) -> None:
    """Print the figures."""
    started = time.monotonic()
    with _console(outputs) as (url, server):
        print(f"first answer after {time.monotonic() - started:.2f} s, load {psutil.getloadavg()[0]:.1f}")
        print(f"memory at the start {_peak_mb(server.pid):.0f} MB")
        steps = _first_answer(url)["runs"][0]["step"]
        for path, asked in {"failures": {}, "prompt": {"sample": "1"}}.items():
            _print(f"{path} of the whole run, to the end", [_seconds(lambda p=path, a=asked: _to_the_end(url, p, a))])
        _pages(url, clicks, steps)
        print(f"memory at most so far {_peak_mb(server.pid):.0f} MB")
        _searches(url, steps)
        print(f"memory at most {_peak_mb(server.pid):.0f} MB, load {psutil.getloadavg()[0]:.1f}")


def _first_answer(url: str) -> dict:
    deadline = time.monotonic() + 60
    while True:
        try:
            return httpx.get(f"{url}api/runs").raise_for_status().json()
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the console did not start"
            time.sleep(0.02)


def _peak_mb(pid: int) -> float:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1000


def _pages(url: str, clicks: int, steps: int) -> None:
    """Seconds to the first paint of pages that are opened afresh, and of each kind of click."""
    from tests.console.browser import Browser

    draw, taken = random.Random(1), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(Path(folder)) as browser:
        browser.size(1280)

        def fresh(name: str, view: str) -> None:
            started = time.monotonic()
            browser.open(f"{url}?{draw.random()}#/{view}")
            taken[f"{name}, opened until its content is there"].append(time.monotonic() - started)
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            taken[f"first paint of {name}"].append(browser.wait(paint) / 1000)

        def click(name: str, selector: str, shown: str = "") -> None:
            started = time.monotonic()
            browser.settled(lambda: browser.click(selector))
            if shown:
                browser.wait(f"!!document.querySelector({json.dumps(shown)})")
            taken[name].append(time.monotonic() - started)

        def choose(name: str, label: str, value: str) -> None:
            field = f"document.querySelector('select[aria-label=\"{label}\"]')"
            script = f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('change'))"
            taken[name].append(browser.settled(lambda: browser.evaluate(script)))

        def enter(name: str) -> None:
            taken[name].append(browser.settled(lambda: browser.press("Enter")))

        for _ in range(clicks):
            step, cell = draw.randint(2, steps), draw.randrange(512)
            fresh("the list of runs", "")
            fresh("a step", f"step?run={RUN}&step={step}")
            fresh("a prompt in all steps", f"prompt?run={RUN}&sample={cell}")
            fresh("failures of all steps", f"failures?run={RUN}")
            browser.open(f"{url}#/")
            click("a run", "a.open")
            click("a step", f".steps a[aria-label^='step {step},']")
            click("its lowest rewards", ".histogram button:first-child")
            choose("its prompts without variance", "Which prompts", "flat")
            browser.open(f"{url}#/step?run={RUN}&step={step}")
            browser.write("[aria-label='Change since a step']", str(step - 1))
            enter("what got worse since a step")
            click("the step before, key ←", ".pager a:first-child")
            browser.open(f"{url}#/step?run={RUN}&step={step}")
            click("a trajectory", f".group:nth-child({cell + 1}) .cell", ".title a[title='key t']")
            click("the next one, key →", ".pager a:last-child")
            click("its tokens", ".title a[title='key t']", ".token")
            click("another tint", ".segments a:last-child", ".token")
            browser.open(f"{url}#/trajectory?run={RUN}&step={step}&sample={cell}&rollout=3")
            click("compare its group", ".title a[href*='compare']", ".compare")
            browser.open(f"{url}#/trajectory?run={RUN}&step={step}&sample={cell}&rollout=3")
            click("its prompt in all steps", ".title a[href*='prompt']", ".by-step-row")
            click("failures", "#tools a[href*='failures']", "table.causes")
            click("search", "#tools a[href*='search']")
            browser.write("input[name=text]", "carry")
            click("its hits of a common word", "form.search .primary", "table.hits tbody tr:nth-child(50)")
        for name, seconds in taken.items():
            _print(name, seconds)
        away = {address for address in browser.requests if not address.startswith((url, "data:", "blob:"))}
        print(f"{len(browser.requests)} requests, to elsewhere: {away or 'none'}")
        print(f"problems of the page: {browser.problems or 'none'}")


def _searches(url: str, steps: int) -> None:
    """Seconds of searches."""
    last = {"first_step": steps - HUNDRED_THOUSAND + 1}
    for name, text, regex in (
        ("a rare word", NEEDLE, False),
        ("a word that none has", "absent-word", False),
        ("a rare expression", RARE_REGEX, True),
    ):
        asked = {"text": text} | ({"regex": True} if regex else {})
        _print(f"{name}, 102,400 trajectories", [_search(url, asked | last)[1] for _ in range(3)])
        first, whole = zip(*[_search(url, asked) for _ in range(2)], strict=True)
        _print(f"{name}, all: the first hits", list(first))
        _print(f"{name}, all: to the end", list(whole))
    for name, asked in {"word": {"text": "carry"}, "expression": {"text": COMMON_REGEX, "regex": True}}.items():
        _print(f"a common {name}, 50 hits", [_search(url, asked, 50)[1] for _ in range(3)])


def _search(url: str, asked: dict, most: int | None = None) -> tuple[float, float]:
    """Seconds until the first hits, and until `most` of them or the end of the run."""
    started, cursor, found, first = time.monotonic(), None, 0, None
    while True:
        page = _ask(url, "search", **asked, limit=50, **({"cursor": cursor} if cursor else {}))
        found, cursor = found + len(page["hits"]), page["cursor"]
        if first is None and found:
            first = time.monotonic() - started
        if cursor is None or (most is not None and found >= most):
            ended = time.monotonic() - started
            return ended if first is None else first, ended


def _to_the_end(url: str, path: str, asked: dict) -> None:
    """Asks as the page does, until no file is left."""
    while _ask(url, path, **asked)["files_left"]:
        pass


def _ask(url: str, path: str, **parameters: object) -> dict:
    reply = httpx.get(f"{url}api/{path}", params={"run": RUN, **parameters}, timeout=60)  # pyright: ignore[reportArgumentType]
    return reply.raise_for_status().json()


def _seconds(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def _print(name: str, taken: list[float]) -> None:
    ordered = sorted(taken)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    print(f"{name:58} median {statistics.median(taken):.2f} s, p95 {p95:.2f} s, n {len(taken)}", flush=True)


def values(prompts: int, tokens: int) -> None:
    """Print the bytes and seconds of the learner's values of a step with so many response tokens a rollout."""
    import torch

    from trackway.learner.batch import TokenValues
    from trackway.learner.filtering import FilteredBatch, TrainStatus
    from trackway.trainer.run_state.trajectories import write_token_values

    draw = random.Random(0)
    rollouts = [_rollout(draw, 1, prompt, n) for prompt in range(prompts) for n in range(ROLLOUTS)]
    batch = FilteredBatch(rollouts, [TrainStatus.USED] * len(rollouts))
    torch.manual_seed(0)
    count = len(rollouts) * tokens
    made = TokenValues(
        lengths=[tokens] * len(rollouts),
        logprobs=-torch.empty(count).exponential_(3.0),
        entropies=torch.empty(count).exponential_(2.0),
        advantages=torch.randn(len(rollouts)).repeat_interleave(tokens),
        clipped=torch.rand(count) < 0.02,
        kept=torch.rand(count) < 0.99,
    )
    with tempfile.TemporaryDirectory() as folder:
        taken, written = [], 0
        for _ in range(5):
            started = time.monotonic()
            written = write_token_values(Path(folder, "step_1.parquet"), 1, batch, made)
            taken.append(time.monotonic() - started)
    print(f"{len(rollouts)} rollouts of {tokens} tokens: {written / 1e6:.1f} MB, {written / count:.1f} bytes a token")
    _print("seconds of a step", taken)


SEARCH_S = 2.0
"""Seconds between two searches beside a training."""
RUNS = ("alone", "open")
SAVED = "training/token_values_bytes"
SERVICE_PAGES = {"System": "system", "Try": "try"}


def beside(rounds: int) -> None:
    """Print what a training step takes alone, and with the run's page open in Chromium and searches on the same cores.

    Before that, the seconds of the pages over running services.
    """
    from benchmarks.tracing_run import STEPS, TRACED, Cpu, deployed, train

    from tests.console.browser import Browser

    steps: dict[str, list[float]] = {name: [] for name in RUNS}
    cpu: dict[str, list[float]] = {name: [] for name in RUNS}
    own: list[float] = []
    saved: list[tuple[float, float, float]] = []
    with (
        deployed("torch") as deployment,
        _console(deployment.outputs) as (url, server),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        Browser(Path(profile)) as browser,
        ThreadPoolExecutor(1) as visitor,
    ):
        for page, view in SERVICE_PAGES.items():
            fresh = [f"{url}?{view}{number}#/{view}" for number in range(5)]
            _print(page, [_seconds(lambda address=address: browser.open(address)) for address in fresh])
        for number in range(rounds):
            for name in RUNS if number % 2 else reversed(RUNS):
                run, page = f"{name}{number}", f"{url}#/run?run={name}{number}"

                def visit(page: str = page) -> None:
                    if browser.evaluate("location.href") != page:
                        browser.open(page)

                def show(info: RunInfo, name: str = name, visit: Callable[[], None] = visit) -> None:
                    if name == "open" and info.step:
                        visitor.submit(visit).result()  # the browser has an event loop of its own

                browser.call("Page.navigate", url="about:blank")
                with _searching(url, run) if name == "open" else nullcontext():
                    before, used = Cpu.now(deployment), _cpu_s(server)
                    steps[name] += train(
                        deployment, run, number, TRACED["sampled"], show, ["trackway.save_token_values=true"]
                    )
                    used = (_cpu_s(server) - used) / STEPS
                    cpu[name].append(Cpu.now(deployment).since(before).others - used)
                if name == "open":
                    own.append(used)
                saved.append(_saved(deployment.outputs / run))
    for name in RUNS:
        print(
            f"{name:6} {statistics.median(steps[name]):.2f} s a step (mean {statistics.mean(steps[name]):.2f}), "
            f"CPU of all programs but MLflow and the console {statistics.mean(cpu[name]):.2f} s, Chromium's included"
        )
    pairs = [there / alone for there, alone in zip(steps["open"], steps["alone"], strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    print(f"open against alone {middle:.3f}x (middle half {low:.3f} to {high:.3f}), n {len(pairs)}")
    print(f"CPU of the console {statistics.mean(own):.3f} s a step")
    seconds, size, tokens = (statistics.mean(column) for column in zip(*saved, strict=True))
    print(f"token values: {seconds:.4f} s a step, {size / 1000:.1f} kB of {tokens:.0f} tokens a step")


def _saved(folder: Path) -> tuple[float, float, float]:
    """Of a run's token values, the seconds, the bytes and the tokens of a step, as means."""
    rows = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.mean(row["timing_s/save_token_values"] for row in rows if SAVED in row)
    size = statistics.mean(row[SAVED] for row in rows if SAVED in row)
    files = [pq.read_table(file, columns=["kept"])["kept"] for file in (folder / "token_values").iterdir()]
    return seconds, size, statistics.mean(sum(len(kept or ()) for kept in file.to_pylist()) for file in files)


def _cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


@contextmanager
def _console(outputs: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A console of the folder: its address and its process, until the block ends."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-m", "trackway.deploy.cli", "console", "--outputs", str(outputs), "--port", str(port)]
    server = subprocess.Popen(command)
    try:
        _first_answer(url)
        yield url, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(30)


@contextmanager
def _searching(url: str, run: str) -> Iterator[None]:
    """Searches the run for a word that no rollout has, every SEARCH_S, until the block ends."""
    closed = threading.Event()

    def search() -> None:
        with httpx.Client(base_url=f"{url}api/", timeout=60) as http:
            while not closed.wait(SEARCH_S):
                http.get("search", params={"run": run, "text": "absent-word"})  # 404 until the run has its folder

    thread = threading.Thread(target=search)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "measure", "beside", "values"))
    parser.add_argument("--outputs", type=Path, default=Path("outputs/bench-console"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--chars", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--clicks", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    if options.what == "write":
        write(options.outputs, options.steps, options.prompts, options.chars)
    elif options.what == "measure":
        measure(options.outputs, options.clicks)
    elif options.what == "values":
        values(options.prompts, options.tokens)
    else:
        beside(options.rounds)
