"""Training steps through the five real services on Ray: traced not at all, as the demo does, all."""

import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.progress import track

from trackway.deploy import train
from trackway.deploy.settings import Deployment, UpSettings, bundled
from trackway.deploy.up import bring_up, take_down
from trackway.trainer.config import compose
from trackway.trainer.data import make_tiny
from trackway.wire.trainer import RunInfo

STEPS = 8
"""Of each run; the first one warms the services up and is not counted."""
TRACED = {"off": 0, "sampled": 2, "all": 12, "away": 12}
"""Of a step's 12 prompts, each with 8 rollouts; the demo traces 2. `away`: all, and MLflow stands still."""


def measure(rounds: int) -> None:
    """Start the services, let the modes take turns, print the medians of their steps and the ratios within a round."""
    steps: dict[str, list[list[float]]] = {mode: [] for mode in TRACED}
    cpu: dict[str, list[float]] = {mode: [] for mode in TRACED}
    with tempfile.TemporaryDirectory() as folder:
        settings = UpSettings(outputs=Path(folder), port=0, dashboard_port=0, ray_port=0, mlflow_port=0)
        deployment = bring_up(settings, lambda name, state: print(f"{name}: {state}", flush=True))
        try:
            make_tiny(settings.outputs / "data", 2000, 16, seed=0)
            for number in track(range(rounds), description="rounds"):
                modes = list(TRACED)[number % 4 :] + list(TRACED)[: number % 4]
                for mode in modes:
                    before = _cpu(deployment)
                    steps[mode].append(_run(deployment, mode, number))
                    cpu[mode].append((_cpu(deployment) - before) / STEPS)
        finally:
            take_down(deployment)
    for mode, runs in steps.items():
        pairs = [
            own / off
            for mine, others in zip(runs, steps["off"], strict=True)
            for own, off in zip(mine, others, strict=True)
        ]
        print(
            f"{mode:8} {statistics.median(step for run in runs for step in run):5.2f} s a step, "
            f"{statistics.median(pairs):.3f}x of off (middle half {_quartiles(pairs)})   "
            f"MLflow's CPU {statistics.median(cpu[mode]):4.2f} s a step"
        )


def _quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.3f} to {high:.3f}"


def _run(deployment: Deployment, mode: str, number: int) -> list[float]:
    """Seconds of each step of one run; the same seed in every mode, so the same rollouts."""
    name, data = f"{mode}{number}", deployment.outputs / "data"
    config = compose(
        [
            f"data.train_files={data / 'train.parquet'}",
            "data.val_files=[]",
            f"actor_rollout_ref.model.path={bundled('examples/tiny/checkpoint')}",
            f"trainer.experiment_name={name}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.val_before_train=false",
            "trainer.save_freq=-1",
            f"trackway.seed={number}",
            f"trackway.trace_prompts_per_step={TRACED[mode]}",
        ],
        config_name="tiny_demo",
    )
    train.start_run(deployment, config, name)
    with contextlib.ExitStack() as stack:
        still: list[bool] = []

        def away(info: RunInfo) -> None:
            if mode == "away" and info.step >= 1 and not still:
                still.append(True)
                stack.enter_context(_standing_still(deployment))
            if info.step == STEPS:
                stack.close()

        info = train.follow(deployment, name, away)
    rows = [json.loads(line) for line in (Path(info.folder) / "metrics.jsonl").read_text().splitlines()]
    return [row["data"]["timing_s/step"] for row in rows if row["step"] > 1]


@contextlib.contextmanager
def _standing_still(deployment: Deployment) -> Iterator[None]:
    family = _mlflow(deployment)
    for one in family:
        one.suspend()
    try:
        yield
    finally:
        for one in family:
            one.resume()


def _mlflow(deployment: Deployment) -> list[psutil.Process]:
    """MLflow's processes."""
    found = [process for record in deployment.processes if record.name == "mlflow" and (process := record.find())]
    return [one for process in found for one in [process, *process.children(recursive=True)]]


def _cpu(deployment: Deployment) -> float:
    """CPU seconds of MLflow so far."""
    return sum(sum(one.cpu_times()[:2]) for one in _mlflow(deployment))
