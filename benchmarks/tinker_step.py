"""A step of `examples/tinker/rl_loop.py` beside a step of the fit loop: wall seconds and CPU seconds.

    .venv/bin/python benchmarks/tinker_step.py
    .venv/bin/python benchmarks/tinker_step.py --rounds 5 --steps 15 --json

Both train an adapter of rank 32 of the demo's model on 12 prompts x 8 trajectories of two turns with the calculator, in
turn on one deployment that is started and stopped here. The example runs unmodified. Warm-up steps are not counted.
Wall is the median of the steps, CPU the average of all processes: services, MLflow, the run's and the example's own.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml
from environments import ROOT
from rich.console import Console
from step_report import Round, ratio, summary
from step_trackway import Meter, Watch, run_config, serve_config
from step_work import SILENCE_S, Events, Work

from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.deploy.runs.session import RunSession
from trackway.trainer.data import make_tiny

EXAMPLE = ROOT / "examples/tinker/rl_loop.py"
ADAPTER = {
    "actor_rollout_ref.model.lora_rank": 32,
    "actor_rollout_ref.model.lora_alpha": 32,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
}
"""The example's adapter, for the fit loop."""
_LINE = re.compile(r"step (\d+): accuracy ([0-9.]+)")

console = Console(stderr=True)


def fit(work: Work, deployment: Deployment, name: str) -> None:
    """Run the fit loop, and report the end of each step."""
    make_tiny(Path(work.folder, "data"), work.prompts * (work.warm + work.steps + 1), 16, seed=work.seed)
    config = run_config(work, Path(work.folder, "data")).with_values(ADAPTER | {"trainer.experiment_name": name})
    meter, events = Meter(deployment), Events(work)
    watch = Watch(deployment.outputs / name / "metrics.jsonl", work.warm + work.steps, meter, events)
    watch.start()
    RunSession(deployment).start(config, name)
    RunSession(deployment).follow(name, lambda info: None)
    watch.join(10)
    events.end()


def example(work: Work, deployment: Deployment, name: str) -> None:
    """Run the example, and report each of its lines: step k ends when its trajectories are there."""
    meter, events = Meter(deployment), Events(work)
    environment = {**os.environ, "TRACKWAY_BASE_URL": deployment.base_url, "OMP_NUM_THREADS": "1"}
    environment |= {"TINKER_BASE_URL": deployment.tinker_url}
    environment |= {"SEED": str(work.seed), "STEPS": str(work.warm + work.steps)}
    command = [sys.executable, "-W", "ignore", str(EXAMPLE)]
    with subprocess.Popen(command, env=environment, cwd=work.folder, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        process = psutil.Process(program.pid)
        for line in program.stdout:
            if (found := _LINE.match(line)) and int(found[1]) <= work.warm + work.steps:
                times = process.cpu_times()
                spent = meter.now() | {"the example": times.user + times.system}
                events.step(int(found[1]), spent, reward=float(found[2]))
    if program.returncode:
        raise RuntimeError(f"expected {EXAMPLE} to end well, got status {program.returncode} ({name})")
    events.end()


CONTENDERS: dict[str, Callable[[Work, Deployment, str], None]] = {"fit loop": fit, "tinker": example}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Let both take turns on a deployment. Returns the report."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  Ray's own default is 15
    rounds: dict[str, list[Round]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="trackway-tinker-") as temporary:
        folder = Path(temporary)
        sizes: dict[str, Any] = {"model": str(TINY_MODEL), "prompts": 12, "samples": 8, "turns": 2}
        sizes |= {"warm": args.warm, "steps": args.steps, "threads": 1, "tracing": True, "device": "cpu"}
        work = Work(folder=temporary, seed=0, learning_rate=2e-3, **sizes)
        (folder / "serve.yaml").write_text(yaml.safe_dump(serve_config(work)))
        settings = UpSettings(
            config=folder / "serve.yaml",
            outputs=folder / "outputs",
            mlflow_uri=None,
            start_timeout_s=SILENCE_S,
            port=0,
            dashboard_port=0,
            ray_port=0,
            mlflow_port=0,
        )
        deployment = bring_up(settings, lambda name, state: None)
        try:
            for number in range(args.rounds):
                for name in [*CONTENDERS][:: 1 if number % 2 == 0 else -1]:
                    place = folder / f"{name.replace(' ', '-')}-{number}"
                    place.mkdir()
                    work = Work(folder=str(place), seed=number, learning_rate=2e-3, **sizes)
                    CONTENDERS[name](work, deployment, place.name)
                    events = [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]
                    rounds[name].append(made := Round.of(events, args.warm, args.steps))
                    cpu = sum(made.cpu_s.values())
                    console.print(
                        f"round {number + 1} of {args.rounds}, {name}: {summary([made])['wall_s']:.2f} s, {cpu:.2f} "
                        f"CPU s a step; other programs {made.others_cores:.2f} cores"
                    )
        finally:
            take_down(deployment)
    ratios = {what: ratio(rounds["tinker"], rounds["fit loop"], f"{what}_s") for what in ("wall", "cpu")}
    return {"contenders": {name: summary(made) for name, made in rounds.items()}, "ratios": ratios}


def table(found: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"{'':24} {'wall s':>8} {'CPU s':>8} {'reward':>8} {'others cores':>13}"]
    for name, contender in found["contenders"].items():
        lines.append(
            f"{name:24} {contender['wall_s']:8.2f} {contender['cpu_s']:8.2f} {contender['reward']:8.2f} "
            f"{contender['other_programs_cores']:13.2f}"
        )
    lines.append(f"{'tinker / fit loop':24} {found['ratios']['wall']:8.2f} {found['ratios']['cpu']:8.2f}")
    for name, contender in found["contenders"].items():
        lines += ["", f"{name}: CPU s of a step by process"]
        lines += [f"  {process:24} {cpu:6.3f}" for process, cpu in contender["cpu_s_by_process"].items()]
    return "\n".join(lines)


def main() -> None:
    """Print the report; status 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="that count, of each round; default 10")
    parser.add_argument("--warm", type=int, default=3, help="steps before them; default 3")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = measure(args)
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left running")
        sys.exit(130)
    print(json.dumps(found, indent=2) if args.json else table(found))


if __name__ == "__main__":
    main()
