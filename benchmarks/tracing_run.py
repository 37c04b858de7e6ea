"""A step's rollouts through the five real services on Ray: traced not at all, the demo's sample of them, or all."""

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.progress import track

from trackway.clients import AgentClient, run
from trackway.deploy.settings import Deployment, UpSettings
from trackway.deploy.up import bring_up, take_down
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.agent import GroupRequest, Limits, Sample
from trackway.wire.rollout import SamplingParams
from trackway.wire.tracing import TraceTarget

PROMPTS, ROLLOUTS = 12, 8
Results = dict[str, list[tuple[float, float, float]]]
"""By mode: wall seconds, CPU seconds of the services, and of MLflow, of each step."""
TRACED = {"off": 0, "sampled": 2, "all": PROMPTS, "away": PROMPTS}
"""Prompts of a step whose rollouts are traced; the demo traces 2 of 12. `away`: all, while MLflow stands still."""


def measure(rounds: int) -> None:
    """Start the services, let the three take turns, print medians and the ratios within each round."""
    results: Results = {mode: [] for mode in TRACED}
    with tempfile.TemporaryDirectory() as folder:
        settings = UpSettings(outputs=Path(folder), port=0, dashboard_port=0, ray_port=0, mlflow_port=0)
        deployment = bring_up(settings, lambda name, state: print(f"{name}: {state}", flush=True))
        try:
            run(_take_turns(deployment, rounds, results))
        finally:
            take_down(deployment)
    for mode, rows in results.items():
        wall, cpu, mlflow = (statistics.median(row[place] for row in rows) for place in range(3))
        against = [row[0] / off[0] for row, off in zip(rows, results["off"], strict=True)]
        costs = [row[1] / off[1] for row, off in zip(rows, results["off"], strict=True)]
        print(
            f"{mode:8} {PROMPTS * ROLLOUTS / wall:6.1f} trajectories/s   wall {statistics.median(against):.3f}x   "
            f"services' CPU {cpu:5.2f} s a step, {statistics.median(costs):.3f}x   MLflow's CPU {mlflow:5.2f} s a step"
        )


async def _take_turns(
    deployment: Deployment, rounds: int, results: dict[str, list[tuple[float, float, float]]]
) -> None:
    agents = AgentClient(f"{deployment.base_url}/agent")
    samples = make_tiny_rows("train", PROMPTS, seed=0)
    modes = list(TRACED)
    for number in track(range(rounds + 2), description="rounds"):
        first = number % len(modes)
        for mode in modes[first:] + modes[:first]:
            measured = await _step(deployment, agents, samples, number, mode)
            if number >= 2:  # the first ones warm caches
                results[mode].append(measured)


async def _step(
    deployment: Deployment, agents: AgentClient, samples: list[Sample], number: int, mode: str
) -> tuple[float, float, float]:
    """Wall seconds until the last trajectory, CPU seconds of the services and of MLflow until all is stored."""
    services, mlflow = _cpu(deployment, "ray"), _cpu(deployment, "mlflow")
    with _standing_still(deployment) if mode == "away" else contextlib.nullcontext():
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for place, sample in enumerate(samples):
                tasks.create_task(_group(agents, sample, number, place < TRACED[mode]))
        wall = time.perf_counter() - began
    # What is traced in this turn must be paid in this turn, not in the next one.
    await asyncio.sleep(1.5)
    while (busy := _cpu(deployment, "mlflow")) - mlflow > 0.02:
        await asyncio.sleep(0.5)
        if _cpu(deployment, "mlflow") - busy < 0.05:
            break
    return wall, _cpu(deployment, "ray") - services, _cpu(deployment, "mlflow") - mlflow


async def _group(agents: AgentClient, sample: Sample, step: int, trace: bool) -> None:
    request = GroupRequest(
        run=f"benchmark{step}",
        experiment_name="benchmark",
        step=step,
        sample=sample.model_copy(update={"agent_name": "tool_agent"}),
        n=ROLLOUTS,
        sampling_params=SamplingParams(temperature=1.0, max_tokens=64, seed=step),
        limits=Limits(max_prompt_length=96, max_response_length=64, max_assistant_turns=2),
        trace=trace,
        trace_target=TraceTarget(token2text=True),
    )
    trajectories = [one async for one in agents.group(request)]
    failed = [one.error.message for one in trajectories if one.error]
    if failed or len(trajectories) != ROLLOUTS:
        raise SystemExit(f"{len(failed)} of {len(trajectories)} rollouts failed: {failed[:1]}")


@contextlib.contextmanager
def _standing_still(deployment: Deployment) -> Iterator[None]:
    family = _family(deployment, "mlflow")
    for one in family:
        one.suspend()
    try:
        yield
    finally:
        for one in family:
            one.resume()


def _family(deployment: Deployment, name: str) -> list[psutil.Process]:
    """A started process and everything below it."""
    found = [process for record in deployment.processes if record.name == name and (process := record.find())]
    return [one for process in found for one in [process, *process.children(recursive=True)]]


def _cpu(deployment: Deployment, name: str) -> float:
    """CPU seconds of a started process and everything below it."""
    total = 0.0
    for one in _family(deployment, name):
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total
