"""Training steps through the five real services on Ray: traced not at all, as the demo does, all.

The tokens come from the embedded engine, which shares the cores with everything else, or from the simulated one, which
takes its time but none of theirs, as an engine on a GPU does.
"""

import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.progress import track
from sim_engine import use_sim
from transformers import AutoTokenizer

from trackway.deploy.bundled import CPU_CONFIG, TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.trainer.data import make_tiny
from trackway.wire.trainer import RunInfo

SAID = (
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12-5"}}\n</tool_call><|im_end|>',
    "#### 7<|im_end|>",
)
"""The two turns of every simulated trajectory: 12 tokens."""
TOKEN_S = 0.4
"""So that these 12 take as long as 240 at 20 ms."""
STEPS = 8
"""Of each run; the first one warms the services up and is not counted."""
TRACED = {"off": 0, "sampled": 2, "all": 12, "away": 12}
"""Of a step's 12 prompts, each with 8 rollouts; the demo traces 2. `away`: all, and MLflow stands still."""


def measure(rounds: int, chosen: Sequence[str], engine: str) -> None:
    """Start the services, let the modes take turns, print the medians of their steps and the ratios within a round."""
    steps: dict[str, list[list[float]]] = {mode: [] for mode in chosen}
    cpu: dict[str, list[Cpu]] = {mode: [] for mode in chosen}
    with deployed(engine) as deployment:
        for number in track(range(rounds), description="rounds"):
            turn = number % len(chosen)
            for mode in [*chosen[turn:], *chosen[:turn]]:
                before = Cpu.now(deployment)
                steps[mode].append(_run(deployment, mode, number))
                cpu[mode].append(Cpu.now(deployment).since(before))
    for mode, runs in steps.items():
        pairs = [
            own / off
            for mine, others in zip(runs, steps[chosen[0]], strict=True)
            for own, off in zip(mine, others, strict=True)
        ]
        others = statistics.median(own.others / off.others for own, off in zip(cpu[mode], cpu[chosen[0]], strict=True))
        print(
            f"{mode:8} {statistics.median(step for run in runs for step in run):5.2f} s a step, "
            f"{statistics.median(pairs):.3f}x of {chosen[0]} (middle half {_quartiles(pairs)}, "
            f"all steps together {_total(runs) / _total(steps[chosen[0]]):.3f}x)   "
            f"CPU without MLflow's {others:.3f}x, "
            f"MLflow's {statistics.median(cost.mlflow for cost in cpu[mode]):4.2f} s a step"
        )


@contextlib.contextmanager
def deployed(engine: str) -> Iterator[Deployment]:
    """The five services and MLflow, with a dataset in the outputs folder, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "serve.yaml")
        config.write_text(yaml.safe_dump(_serve_config(engine)))
        settings = UpSettings(outputs=Path(folder), config=config, port=0, dashboard_port=0, ray_port=0, mlflow_port=0)
        deployment = bring_up(settings, lambda name, state: print(f"{name}: {state}", flush=True))
        try:
            make_tiny(settings.outputs / "data", 2000, 16, seed=0)
            yield deployment
        finally:
            take_down(deployment)


def _serve_config(engine: str) -> dict[str, Any]:
    config = yaml.safe_load(CPU_CONFIG.read_text())
    if engine == "sim":
        tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
        script = [tokenizer.encode(turn, add_special_tokens=False) for turn in SAID]
        simulated = {"script": script, "step_s": TOKEN_S, "step_slope_s": 0.0}
        [rollout] = [app for app in config["applications"] if app["name"] == "rollout"]
        rollout["args"] |= {"engine": use_sim(), "engine_options": simulated}
    return config


def _total(runs: list[list[float]]) -> float:
    return sum(step for run in runs for step in run)


def _quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.3f} to {high:.3f}"


def _run(deployment: Deployment, mode: str, number: int) -> list[float]:
    """Seconds of each step of one run; the same seed in every mode, so the same rollouts."""
    with contextlib.ExitStack() as stack:
        still: list[bool] = []

        def away(info: RunInfo) -> None:
            if mode == "away" and info.step >= 1 and not still:
                still.append(True)
                stack.enter_context(_standing_still(deployment))
            if info.step == STEPS:
                stack.close()

        return train(deployment, f"{mode}{number}", number, TRACED[mode], away)


def train(
    deployment: Deployment,
    name: str,
    seed: int,
    traced: int,
    show: Callable[[RunInfo], None] = lambda info: None,
    overrides: Sequence[str] = (),
) -> list[float]:
    """Seconds of each step of a run that traces so many of its prompts, but for the first step."""
    data = deployment.outputs / "data"
    config = compose(
        [
            f"data.train_files={data / 'train.parquet'}",
            "data.val_files=[]",
            f"actor_rollout_ref.model.path={TINY_MODEL}",
            f"trainer.experiment_name={name}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.val_before_train=false",
            "trainer.save_freq=-1",
            f"trackway.seed={seed}",
            f"trackway.trace_prompts_per_step={traced}",
            *overrides,
        ],
        config_name="tiny_demo",
    )
    RunSession(deployment).start(config, name)
    info = RunSession(deployment).follow(name, show)
    rows = [json.loads(line) for line in (Path(info.folder) / "metrics.jsonl").read_text().splitlines()]
    return [row["data"]["timing_s/step"] for row in rows if row["step"] > 1]


@contextlib.contextmanager
def _standing_still(deployment: Deployment) -> Iterator[None]:
    family = _mlflow(deployment)
    for process in family:
        process.suspend()
    try:
        yield
    finally:
        for process in family:
            process.resume()


def _mlflow(deployment: Deployment) -> list[psutil.Process]:
    """MLflow's processes."""
    found = [process for record in deployment.processes if record.name == "mlflow" and (process := record.find())]
    return [member for process in found for member in [process, *process.children(recursive=True)]]


@dataclass(frozen=True)
class Cpu:
    """CPU seconds so far: of MLflow, and of everything else on the machine."""

    mlflow: float
    others: float

    @classmethod
    def now(cls, deployment: Deployment) -> "Cpu":
        machine = psutil.cpu_times()
        mlflow = sum(sum(process.cpu_times()[:2]) for process in _mlflow(deployment))
        return cls(mlflow, machine.user + machine.nice + machine.system - mlflow)

    def since(self, before: "Cpu") -> "Cpu":
        """Of a step, on average."""
        return Cpu((self.mlflow - before.mlflow) / STEPS, (self.others - before.others) / STEPS)
