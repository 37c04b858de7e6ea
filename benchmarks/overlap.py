"""Generation beside training: the scheduler of the trainer over real services, a simulated engine and slow tools.

    .venv/bin/python benchmarks/overlap.py halves   generation and training of equal length: seconds a step
    .venv/bin/python benchmarks/overlap.py tools    four turns with slow tools: trajectories a second
    .venv/bin/python benchmarks/overlap.py simulated --steps 300    the tools in simulated time, without services

With `--replicas 1 2 4` the services run under Ray Serve, and each part is repeated with so many rollout replicas of
`--slots` sequences each; without it, agent, tools, reward and one rollout service are a process each.

The learner is simulated too: it takes `--train-s` seconds in which it needs no core, as one on a GPU does. Agent, tools
and reward are the real services. Each part runs the synchronous loop first, then the asynchronous with each
`--staleness-threshold` and `--over-sample-rate`, which may be 0.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import yaml
from rollout import services
from sim_engine import use_sim
from transformers import AutoTokenizer

from tests.services.trainer.loop.simulated_loop import SimulatedLoop
from trackway.clients import AgentClient, CallPolicy, run
from trackway.deploy.bundled import CPU_CONFIG, TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import scale
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.run_config import compose
from trackway.system import free_port
from trackway.trainer.data.dataset import Position, Prompts
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.trainer.loop.from_config import pacing
from trackway.trainer.loop.group_source import GroupSource
from trackway.trainer.loop.rollout_client import GroupTemplate, RetryPolicy, Rollouts
from trackway.trainer.loop.scheduler import GroupScheduler, Pacing
from trackway.wire.agent import Limits, Sample
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import StopReason, Tags, Trajectory

BATCH, GROUP = 8, 8
WARM_STEPS = 2
SIMULATED_GENERATION_S = 0.4
"""Seconds of a trajectory's four turns in the part `simulated`."""
THOUGHT = "Tom had 12 pens and lost 5 of them. "
SLOW_TOOL = '''
import asyncio
import math
import random

from trackway.tools import function_tool

_draw = random.Random(0)


@function_tool
async def lookup(question: str) -> str:
    """Look something up, in a second or so and at times in half a minute."""
    await asyncio.sleep(min({cap}, {median} * math.exp({sigma} * _draw.gauss(0.0, 1.0))))
    return "seven"
'''
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"question": "how many"}}\n</tool_call><|im_end|>'
ANSWER = "#### 7<|im_end|>"


@dataclass(frozen=True)
class Pace:
    """What one loop did in its steady state."""

    step_s: float
    trajectories_per_s: float
    waited_s: float
    """Of a step: the learner waited for rollouts."""

    def show(self, name: str) -> None:
        print(
            f"{name:32} {self.step_s:6.2f} s a step, of which {self.waited_s:5.2f} s the learner waits; "
            f"{self.trajectories_per_s:6.2f} trajectories a second",
            flush=True,
        )


def rows() -> list[Sample]:
    """Prompts of the tiny task, each of which may call any tool of the server instead of the calculator alone."""
    made = make_tiny_rows("train", BATCH * 64, seed=0)
    return [row.model_copy(update={"extra_info": row.extra_info | {"tool_selection": None}}) for row in made]


async def train(agent_url: str, paced: Pacing, steps: int, train_s: float, run_name: str, calls: int) -> Pace:
    """The loop of a run with a learner that only takes time; each trajectory executes so many tool calls."""
    params, limits = SamplingParams(max_tokens=512, seed=1), Limits(max_response_length=2048, max_assistant_turns=8)
    template = GroupTemplate(run_name, run_name, GROUP, params, limits, "tool_agent")
    policy = CallPolicy(max_in_flight=1024, total_s=900.0, read_s=900.0)
    rollouts = Rollouts(AgentClient(agent_url, policy=policy), template, RetryPolicy(max_inflight=1024))
    prompts = Prompts(rows(), BATCH, 0, shuffle=False)
    scheduler, position = GroupScheduler(prompts, rollouts, paced), Position()
    began = waited = 0.0
    for step in range(steps):
        if step == WARM_STEPS:
            began, waited = time.perf_counter(), 0.0
        scheduler.submit(step, position, 0, lambda number, size: frozenset(), steps_left=1_000)
        asked = time.perf_counter()
        trajectories = await scheduler.take(step, position)
        waited += time.perf_counter() - asked
        failed = sum(trajectory.error is not None for trajectory in trajectories)
        if failed:
            raise SystemExit(f"expected no failed trajectory, got {failed}: {trajectories[0].error}")
        executed = sum(turn.calls_executed for trajectory in trajectories for turn in trajectory.turns)
        if executed != calls * len(trajectories):
            raise SystemExit(f"expected {calls} executed tool calls in each trajectory, got {executed} in a batch")
        await asyncio.sleep(train_s)
        scheduler.used({"used": len(trajectories)})
        _, position = prompts.take(position)
    measured = steps - WARM_STEPS
    step_s = (time.perf_counter() - began) / measured
    await scheduler.close()
    return Pace(step_s, BATCH * GROUP / step_s, waited / measured)


def script(turns: list[str], step_s: float) -> dict[str, object]:
    """Settings of the simulated engine that says these turns."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokens = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
    return {"script": tokens, "step_s": step_s, "step_slope_s": 0.0, "prefill_tokens_per_s": 100_000}


@contextlib.contextmanager
def agent(sim: dict[str, object], slots: int, tool: str = "") -> Iterator[str]:
    """The URL of an agent service with one rollout service behind it."""
    names = ["rollout", "tools", "reward", "agent"]
    settings = {f"{name}_url": f"http://127.0.0.1:{free_port()}" for name in names}
    settings |= {
        "engine": use_sim(),
        "engine_options": json.dumps(sim),
        "model_path": str(TINY_MODEL),
        "max_num_seqs": str(slots),
    }
    with tempfile.TemporaryDirectory() as folder:
        if tool:
            settings["function_tool_path"] = str(written(tool, folder))
        with services(names, settings):
            yield settings["agent_url"]


@contextlib.contextmanager
def deployed(sim: dict[str, object], slots: int, tool: str = "") -> Iterator[Deployment]:
    """A deployment whose rollout replicas have so many slots each; the learner's part is this process."""
    serve_config = yaml.safe_load(CPU_CONFIG.read_text())
    applications = {application["name"]: application for application in serve_config["applications"]}
    del applications["trainer"]
    applications["rollout"]["args"] = {"engine": use_sim(), "engine_options": sim, "max_num_seqs": slots}
    applications["rollout"]["deployments"][0]["ray_actor_options"] = {"num_cpus": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        if tool:
            applications["tools"]["args"] |= {"function_tool_path": str(written(tool, folder))}
        config = Path(folder) / "overlap.yaml"
        config.write_text(yaml.safe_dump(serve_config | {"applications": list(applications.values())}))
        outputs, away = Path(folder) / "outputs", "http://127.0.0.1:9"
        settings = UpSettings(config=config, outputs=outputs, mlflow_uri=away, port=0, dashboard_port=0, ray_port=0)
        deployment = bring_up(settings, lambda name, state: print(f"{name}: {state}", flush=True))
        try:
            yield deployment
        finally:
            take_down(deployment)


def written(tool: str, folder: str) -> Path:
    """The tool's file."""
    path = Path(folder) / "lookup.py"
    path.write_text(tool)
    return path


def each_setup(sim: dict[str, object], slots: int, replicas: Sequence[int], tool: str = "") -> Iterator[str]:
    """The agent's URL, for each number of rollout replicas in turn; once without Ray when there is none."""
    if not replicas:
        with agent(sim, BATCH * GROUP * 4, tool) as url:
            yield url
        return
    with deployed(sim, slots, tool) as deployment:
        for count in replicas:
            scale(deployment, "rollout", count)
            print(f"{count} rollout replicas of {slots} slots", flush=True)
            yield f"{deployment.base_url}/agent"


def paced_by(depth: float, rate: float) -> Pacing:
    """The pacing of a run with these two keys."""
    batch = (f"data.train_batch_size={BATCH}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}")
    ahead = (f"async_training.staleness_threshold={depth}", f"trackway.over_sample_rate={rate}")
    return pacing(compose([*batch, *ahead]))


def compare(agent_url: str, args: argparse.Namespace, calls: int = 0) -> list[Pace]:
    """The synchronous loop, then the asynchronous one with each depth and rate."""
    paces: list[Pace] = []
    asynchronous = itertools.product(args.over_sample_rate, args.staleness_threshold)
    for rate, depth in [(0.0, 0.0), *asynchronous]:
        paced = paced_by(depth, rate)
        name = f"threshold {depth:g}, rate {rate:g}" if depth or rate else "synchronous"
        run_name = f"overlap_{depth:g}_{rate:g}"
        paces.append(run(train(agent_url, paced, args.steps, args.train_s, run_name, calls)))
        paces[-1].show(name)
    return paces


def measure_halves(args: argparse.Namespace) -> None:
    """One turn, generated in about `--train-s` where each rollout has a slot."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    turns = [THOUGHT * 3 + ANSWER]
    tokens = len(tokenizer.encode(turns[0], add_special_tokens=False))
    for url in each_setup(script(turns, args.train_s / tokens), args.slots, args.replicas):
        taking_turns, *overlapped = compare(url, args)
        longer = max(args.train_s, taking_turns.step_s - args.train_s)
        print(
            f"generation {taking_turns.step_s - args.train_s:.2f} s, training {args.train_s:.2f} s: a step is "
            f"{taking_turns.step_s / longer:.2f}x the longer in turns, "
            f"{', '.join(f'{pace.step_s / longer:.2f}x' for pace in overlapped)} with overlap"
        )


def measure_tools(args: argparse.Namespace) -> None:
    """Three tool calls and an answer, with latencies of a log-normal distribution."""
    turns = [f"{THOUGHT} {number}. {CALL}" for number in ("One", "Two", "Three")] + [f"{THOUGHT}{ANSWER}"]
    tool = SLOW_TOOL.format(median=args.tool_median_s, sigma=args.tool_sigma, cap=args.tool_cap_s)
    for url in each_setup(script(turns, 0.005), args.slots, args.replicas, tool):
        taking_turns, *overlapped = compare(url, args, calls=3)
        ratios = (pace.trajectories_per_s / taking_turns.trajectories_per_s for pace in overlapped)
        print(f"{', '.join(f'{ratio:.2f}x' for ratio in ratios)} the trajectories a second", flush=True)


class SimulatedTools(GroupSource):
    """Groups as slow as the slowest of `GROUP` trajectories of three tool calls. One trajectory stands for a group."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self._args, self._random = args, random.Random(0)

    @property
    def n(self) -> int:
        """Trajectories of a group."""
        return 1

    async def group(self, sample: Sample, step: int, min_weight_version: int, trace: bool) -> list[Trajectory]:
        calls = [[self._call_s() for _ in range(3)] for _ in range(GROUP)]
        await asyncio.sleep(max(map(sum, calls)) + SIMULATED_GENERATION_S)
        tags = Tags(experiment_name="e", step=step, sample_index=sample.index, rollout_n=0)
        names = {"id": f"{step}/{sample.index}", "session_id": "s", "agent_name": "a", "data_source": "d"}
        return [Trajectory.model_validate({**names, "tags": tags, "stop_reason": StopReason.ANSWERED})]

    def _call_s(self) -> float:
        drawn = math.exp(self._args.tool_sigma * self._random.gauss(0.0, 1.0))
        return min(self._args.tool_cap_s, self._args.tool_median_s * drawn)


async def simulate(paced: Pacing, args: argparse.Namespace) -> tuple[float, float, int]:
    """Seconds of a step, and the mean and the most versions that a group is behind."""
    prompts = Prompts(make_tiny_rows("train", BATCH * args.steps * 2, seed=0), BATCH, 0, shuffle=False)
    scheduler, position, began, behind = GroupScheduler(prompts, SimulatedTools(args), paced), Position(), 0.0, []
    for step in range(args.steps):
        began = asyncio.get_running_loop().time() if step == WARM_STEPS else began
        scheduler.submit(step, position, step, lambda number, size: frozenset(), args.steps - step)
        behind += [step + 1 - group.tags.step for group in await scheduler.take(step, position)]
        await asyncio.sleep(args.train_s)
        scheduler.used({"used": BATCH})
        _, position = prompts.take(position)
    step_s = (asyncio.get_running_loop().time() - began) / (args.steps - WARM_STEPS)
    return step_s, sum(behind) / len(behind), max(behind)


def measure_simulated(args: argparse.Namespace) -> None:
    """The schedule alone, without services and CPU."""
    in_turns_s = 0.0
    for rate, depth in [(0.0, 0.0), *itertools.product(args.over_sample_rate, args.staleness_threshold)]:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            step_s, mean, most = runner.run(simulate(paced_by(depth, rate), args))
        in_turns_s = in_turns_s or step_s
        ratio = f"{step_s:.1f} s a step, {in_turns_s / step_s:.2f}x"
        print(f"threshold {depth:g}, rate {rate:g}: {ratio}; {mean:.2f} versions behind, at most {most}", flush=True)


def main() -> None:
    """One part, as the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["halves", "tools", "simulated"])
    parser.add_argument("--staleness-threshold", type=float, nargs="+", default=[1.0])
    parser.add_argument("--over-sample-rate", type=float, nargs="+", default=[0.0])
    parser.add_argument("--steps", type=int, default=10, help=f"of which the first {WARM_STEPS} are not measured")
    parser.add_argument("--train-s", type=float, default=2.0, help="seconds of an update")
    parser.add_argument("--tool-median-s", type=float, default=1.0)
    parser.add_argument("--tool-sigma", type=float, default=1.2)
    parser.add_argument("--tool-cap-s", type=float, default=30.0)
    parser.add_argument("--replicas", type=int, nargs="+", default=[], help="rollout replicas under Ray Serve")
    parser.add_argument("--slots", type=int, default=BATCH * GROUP, help="sequences that a replica generates at once")
    args = parser.parse_args()
    {"halves": measure_halves, "tools": measure_tools, "simulated": measure_simulated}[args.part](args)


if __name__ == "__main__":
    main()
