"""A training step of Trackway, of TRL's `GRPOTrainer` with `tools=` and of a plain loop: wall seconds and CPU seconds.

    .venv/bin/python benchmarks/step.py                                the demo's batch: 12 prompts x 8, two turns
    .venv/bin/python benchmarks/step.py --batch 48x8 --turns 8 --model 5m
    .venv/bin/python benchmarks/step.py --checkout ../before           Trackway of another checkout too, in turn

All train the same model on the same prompts with a calculator, one torch thread, one update a step, at the same
niceness, each in processes of its own. A round runs each alone, one after the other, Trackway with a deployment that it
starts and stops; the next round begins with the next. Warm-up steps are not counted. TRL's environment, `.venv-trl`, is
made on the first call (1.1 GB). Wall is the median of the steps. CPU is the average of all processes, services and
MLflow included, which other programs on the machine disturb less; what those used is printed too.

With two turns `tiny` is the demo's model, which learns in all three as in the demo. Otherwise the model has random
weights of the size that is asked for, calls the calculator with 8 tokens in every turn, and stays as it is.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from checkout import interpreter
from environments import CONSTRAINTS, ROOT, NotMade, environment
from rich.console import Console
from step_report import Round, report, table
from step_work import SHAPES, SILENCE_S, Work, scripted_model

HERE = Path(__file__).resolve().parent
TRL_REQUIREMENTS = ["trl==1.16.0", "torch", "transformers", "psutil"]
"""The last three in the versions of constraints.txt."""
CONTENDERS = ("trackway", "trl", "plain")
STOP_S = 90.0
"""For a contender to stop its processes."""

console = Console(stderr=True)


class Failed(Exception):
    """A contender or its environment: expected, got, remedy."""


@dataclass(frozen=True)
class Contender:
    """The program that is started for each round."""

    name: str
    python: str
    script: str
    environment: Mapping[str, str]


def contenders(names: list[str], checkouts: list[Path], device: str) -> list[Contender]:
    """The contenders by name, and Trackway of each checkout."""
    found = []
    for name in names:
        if name == "trackway":
            found.append(_trackway(name, ROOT))
        elif name == "trl":
            found.append(Contender(name, str(trl_python(device)), "step_trl.py", {}))
        else:
            found.append(Contender(name, sys.executable, "step_plain.py", {}))
    return found + [_trackway(path.resolve().name, path.resolve()) for path in checkouts]


def _trackway(name: str, checkout: Path) -> Contender:
    try:
        python, path = interpreter(checkout)
    except ValueError as error:
        raise Failed(f"--checkout: {error}") from error
    return Contender(name, python, "step_trackway.py", {"PYTHONPATH": path})


def trl_python(device: str) -> Path:
    """The interpreter of TRL's environment, which is made if it is missing or has other versions."""
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    torch_from = [part for link in links for part in ("--find-links", link)] or [
        *("--torch-backend", "cpu" if device == "cpu" else "auto")
    ]
    try:
        return environment(
            "trl" if device == "cpu" else "trl-cuda",
            TRL_REQUIREMENTS,
            options=[*torch_from, "--constraint", str(CONSTRAINTS)],
        )
    except NotMade as error:
        raise Failed(f"{error}: --contenders trackway,plain") from error


def run(contender: Contender, work: Work, folder: Path, show: Any) -> Round:
    """One round of a contender; `show(done, text)` is called after each step. Whatever it started is stopped."""
    log, events = folder / "log", folder / "events.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": str(work.threads), "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", **contender.environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [contender.python, str(HERE / contender.script), str(work.save())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    tree = psutil.Process(process.pid)
    try:
        seen, last = 0, time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            written = _read(events)
            if len(written) > seen:
                seen, last = len(written), time.monotonic()
                show(written)
            if time.monotonic() - last > SILENCE_S:
                raise Failed(f"{contender.name}: expected a step within {SILENCE_S:.0f} s, got none;{_tail(log)}")
        if process.returncode:
            raise Failed(f"{contender.name}: expected it to end well, got status {process.returncode};{_tail(log)}")
        return Round.of(_read(events), work.warm, work.steps)
    except ValueError as error:
        raise Failed(f"{contender.name}: {error};{_tail(log)}") from error
    finally:
        _stop(tree, process, folder)


def _read(events: Path) -> list[dict[str, Any]]:
    lines = events.read_text().split("\n")[:-1] if events.exists() else []
    return [json.loads(line) for line in lines]


def _tail(log: Path) -> str:
    return f" the end of its log:\n{log.read_text(errors='replace')[-2500:]}"


def _stop(tree: psutil.Process, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Let the contender stop what it started; kill what is left of it after a while."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            for child in tree.children(recursive=True):
                child.kill()
        process.kill()
        process.wait()
    from trackway.deploy.deployment.processes import stop_tree
    from trackway.deploy.deployment.record import Deployment

    left = Deployment.load(folder / "outputs")  # its last act is to remove this record
    for record in left.processes if left else []:
        stop_tree(record)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make the model and the prompts, let the contenders take turns, return the report."""
    from trackway.deploy.bundled import TINY_MODEL
    from trackway.trainer.data.tiny import make_tiny_rows

    chosen = contenders(args.contenders, args.checkout, args.device)
    prompts, samples = args.batch
    rounds: dict[str, list[Round]] = {contender.name: [] for contender in chosen}
    with tempfile.TemporaryDirectory(prefix="trackway-step-") as name, console.status("starting") as status:
        model = TINY_MODEL
        scripted = args.model != "tiny" or args.turns != 2
        if scripted:
            model = Path(name, "model")
            model.mkdir()
            scripted_model(model, args.model, TINY_MODEL)
        for number in range(args.rounds):
            rows = make_tiny_rows("train", prompts * (args.warm + args.steps + 1), seed=number)
            turn = number % len(chosen)
            for contender in [*chosen[turn:], *chosen[:turn]]:
                folder = Path(name, f"{number}-{contender.name}")
                folder.mkdir()
                pairs = [{"question": row.prompt[0].content, "answer": row.reward_model.ground_truth} for row in rows]
                (folder / "rows.json").write_text(json.dumps(pairs))
                work = Work(
                    folder=str(folder),
                    model=str(model),
                    prompts=prompts,
                    samples=samples,
                    turns=args.turns,
                    warm=args.warm,
                    steps=args.steps,
                    threads=args.threads,
                    tracing=args.tracing,
                    seed=number,
                    device=args.device,
                    learning_rate=1e-9 if scripted else 5e-4,
                )
                head = f"round {number + 1} of {args.rounds}, {contender.name}"
                status.update(f"{head}: starting")
                made = run(
                    contender, work, folder, lambda events, head=head: status.update(_progress(head, args, events))
                )
                rounds[contender.name].append(made)
                shutil.rmtree(folder)
                console.print(
                    f"{head}: {statistics.median(made.wall_s):.2f} s, "
                    f"{sum(made.cpu_s.values()):.2f} CPU s a step; other programs {made.others_cores:.2f} cores"
                )
    options = {
        "batch": f"{prompts}x{samples}",
        **{
            key: getattr(args, key)
            for key in ("device", "turns", "model", "rounds", "steps", "warm", "threads", "tracing")
        },
        "cores": os.cpu_count(),
        "niceness": psutil.Process().nice(),
    }
    return {"options": options, **report(rounds)}


def _progress(head: str, args: argparse.Namespace, events: list[dict[str, Any]]) -> str:
    steps = [event for event in events if "step" in event]
    wall = [later["clock_s"] - earlier["clock_s"] for earlier, later in pairwise(steps)][-1:]
    return f"{head}: step {len(steps)} of {args.warm + args.steps}" + "".join(f", {seconds:.2f} s" for seconds in wall)


def _batch(text: str) -> tuple[int, int]:
    with contextlib.suppress(ValueError):
        prompts, samples = map(int, text.split("x"))
        if prompts >= 1 and samples >= 2:
            return prompts, samples
    raise argparse.ArgumentTypeError(f"expected prompts x samples such as 12x8, at least 1x2, got {text!r}")


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(CONTENDERS)}, got {', '.join(unknown)}")
    return names


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if text.isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")

    return number


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=_batch, default=(12, 8), help="prompts x samples of a step; default 12x8")
    parser.add_argument("--turns", type=_at_least(1), default=2, help="most turns of the model; default 2")
    parser.add_argument("--model", choices=[*SHAPES], default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="float32 on a CPU, bfloat16 with CUDA")
    parser.add_argument("--rounds", type=_at_least(1), default=3)
    parser.add_argument("--steps", type=_at_least(1), default=10, help="that count, of each round; default 10")
    parser.add_argument("--warm", type=_at_least(1), default=5, help="steps before them; default 5")
    parser.add_argument("--threads", type=_at_least(1), default=1, help="of torch in TRL and the plain loop; default 1")
    parser.add_argument("--contenders", type=_names, default=[*CONTENDERS], help=f"of {','.join(CONTENDERS)}; all")
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="another checkout; may be repeated")
    parser.add_argument("--no-tracing", dest="tracing", action="store_false", help="Trackway traces nothing")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser.parse_args()


def main() -> None:
    """Print the report; status 1 with the reason when a contender fails, 130 after Ctrl-C."""
    args = _read_arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        found = measure(args)
    except Failed as failed:
        console.print(str(failed), style="red", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left running")
        sys.exit(130)
    print(json.dumps(found, indent=2) if args.json else table(found))


if __name__ == "__main__":
    main()
