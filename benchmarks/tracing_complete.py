"""Whether a run that traces everything has all of it in MLflow when its command ends, and what each step takes."""

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tracing_run import Cpu, deployed

from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.demo import RunOutput, count_complete, gaps_on_one_machine
from trackway.deploy.runs.losses import Unsent
from trackway.deploy.runs.session import RunSession
from trackway.deploy.terminal.progress import run_bar
from trackway.run_config import compose
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import RunInfo

NAME = "complete"


def measure(steps: int, prompts: int, rollouts: int, burners: int) -> None:
    """Train so many steps with a trace of each trajectory, wait as `trackway train` does, and count in MLflow."""
    with deployed("torch") as deployment, _burning(burners):
        before = Cpu.now(deployment)
        info = _trained(deployment, steps, prompts, rollouts)
        shown = -1.0

        def show(unsent: object) -> None:
            nonlocal shown
            if time.monotonic() - shown > 15:
                shown = time.monotonic()
                print(f"left to send: {unsent}", flush=True)

        info = RunSession(deployment).deliver(info, show)
        ended = time.time()
        cpu = Cpu.now(deployment).mlflow - before.mlflow
        _report(deployment, info, ended, cpu)


@contextlib.contextmanager
def _burning(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _trained(deployment: Deployment, steps: int, prompts: int, rollouts: int) -> RunInfo:
    data = deployment.outputs / "data"
    config = compose(
        [
            f"data.train_files={data / 'train.parquet'}",
            f"data.val_files={data / 'test.parquet'}",
            f"data.train_batch_size={prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            f"actor_rollout_ref.rollout.n={rollouts}",
            f"actor_rollout_ref.model.path={TINY_MODEL}",
            f"trainer.experiment_name={NAME}",
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=1000",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            f"trackway.trace_prompts_per_step={prompts}",
        ],
        config_name="tiny_demo",
    )
    RunSession(deployment).start(config, NAME)
    with run_bar(quiet=False) as bar:
        return RunSession(deployment).follow(NAME, bar.show)


def _report(deployment: Deployment, info: RunInfo, ended: float, cpu: float) -> None:
    folder = RunFolder(Path(info.folder))
    output = RunOutput.of(folder)
    times = [row.data["timing_s/step"] for row in output.rows if "timing_s/step" in row.data]
    tenth = max(1, len(times) // 10)
    first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
    after = ended - output.rows[-1].timestamp / 1000
    database = deployment.outputs / "mlflow" / "mlflow.db"
    values: dict[str, dict[str, str]] = defaultdict(dict)
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        for trace_id, name, value in connection.execute("SELECT trace_id, name, value FROM assessments"):
            values[trace_id.removeprefix("tr-")][name] = json.loads(value)
        [(linked,)] = connection.execute("SELECT COUNT(*) FROM entity_associations WHERE source_type = 'trace'")
        [(metrics,)] = connection.execute("SELECT COUNT(DISTINCT step) FROM metrics WHERE key = 'timing_s/step'")
    expected = found = 0
    for trajectory in output.traced:
        own = values[trajectory.trace_id or ""]
        names = {"reward"} if trajectory.reward is not None else set[str]()
        if not trajectory.tags.validation:
            names |= {"fate", "advantage"} if own.get("fate", "used") == "used" else {"fate"}
        expected += len(names)
        found += len(names & own.keys())
    whole = count_complete(str(deployment.mlflow_uri), info.experiment_id or "", output.traced, gaps_on_one_machine)
    print(f"left when the wait ended: {Unsent.of(info)}")
    print(f"traces whole: {whole} of {len(output.traced)}; linked to the run: {linked}, with one of each step")
    print(f"values of feedback: {found} of {expected}; metrics of {metrics} of {len(times)} steps")
    print(f"in MLflow {after:.0f} s after the last step's end")
    print(f"seconds of a step: {first:.2f} in the first tenth, {last:.2f} in the last ({last / first:.2f}x)")
    print(f"MLflow's CPU: {1000 * cpu / max(1, len(output.traced)):.1f} ms per trajectory; {os.cpu_count()} cores")
