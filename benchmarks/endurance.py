"""A long run of the demo's steps: seconds and CPU seconds of a step, and the memory of each process, by step.

    .venv/bin/python benchmarks/endurance.py                   3,000 steps, an hour on two idle cores
    .venv/bin/python benchmarks/endurance.py --steps 300

Memory is the proportional set size (PSS) of each process, summed by name: a page that two processes share counts half
in each. Memory and CPU seconds are read every ten seconds. A slope is a least-squares line over the second half of the
run, with its 95 % interval from the differences to the line; the first half fills caches, queues and logs. The plot and
the readings are written to `--outputs`, as endurance.svg and endurance.json.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import matplotlib
import psutil
from checkout import run_in
from step_trackway import Meter

matplotlib.use("Agg")
from matplotlib import pyplot

from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.trainer.data import make_tiny
from trackway.trainer.run_state.folder import RunFolder

RUN = "endurance"
EVERY_S = 10.0
_T_95 = 1.96
"""Half-width of a 95 % interval in standard errors, for many readings."""


class Slope(NamedTuple):
    """A line through readings."""

    start: float
    """Its value where the readings begin."""
    per_thousand: float
    """Growth in 1,000 steps."""
    half_width: float
    """Half of the growth's 95 % interval."""


class Reading(NamedTuple):
    """The processes' memory at one time, and their CPU seconds so far."""

    step: int
    mb: dict[str, float]
    """By name of the process."""
    cpu_s: float
    """All processes together."""


def slope_of(steps: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the least-squares line of values by step. `values` has three or more."""
    line = statistics.linear_regression(steps, values)
    mean = statistics.fmean(steps)
    spread = sum((step - mean) ** 2 for step in steps)
    residues = sum((value - line.intercept - line.slope * step) ** 2 for step, value in zip(steps, values, strict=True))
    error = math.sqrt(residues / (len(steps) - 2) / spread)
    return Slope(line.intercept + line.slope * steps[0], 1000 * line.slope, 1000 * _T_95 * error)


class ProcessWatch(threading.Thread):
    """Reads memory and CPU seconds of a deployment's processes until `end`."""

    def __init__(self, meter: Meter, folder: RunFolder) -> None:
        super().__init__(daemon=True)
        self.readings: list[Reading] = []
        self._meter, self._folder, self._ended = meter, folder, threading.Event()

    def run(self) -> None:
        """Read every EVERY_S seconds."""
        while not self._ended.wait(EVERY_S):
            if self._folder.exists:
                step = self._folder.info().step
                self.readings.append(Reading(step, self._memory(), sum(self._meter.now().values())))

    def end(self) -> None:
        """Stop reading."""
        self._ended.set()
        self.join()

    def _memory(self) -> dict[str, float]:
        mb: dict[str, float] = defaultdict(float)
        for process, name in self._meter.living():
            with contextlib.suppress(psutil.Error):
                mb[name] += process.memory_full_info().pss / 2**20
        return dict(mb)


def trained(outputs: Path, steps: int, words: Sequence[str]) -> tuple[list[Reading], dict[int, float]]:
    """Train so many steps. Return the readings, and the seconds of each step."""
    make_tiny(outputs / "data", 1536, 256, seed=0)
    settings = UpSettings(outputs=outputs, port=0, dashboard_port=0, ray_port=0, mlflow_port=0)
    deployment = bring_up(settings, lambda name, state: None)
    watch = ProcessWatch(Meter(deployment), RunFolder(outputs / RUN))
    try:
        watch.start()
        config = compose(
            [
                f"data.train_files={outputs}/data/train.parquet",
                f"data.val_files={outputs}/data/test.parquet",
                f"actor_rollout_ref.model.path={TINY_MODEL}",
                f"trainer.experiment_name={RUN}",
                f"trainer.total_training_steps={steps}",
                "trainer.save_freq=100",
                "trainer.test_freq=100",
                "trainer.max_actor_ckpt_to_keep=2",
                *words,
            ],
            config_name="tiny_demo",
        )
        RunSession(deployment).start(config, RUN)
        RunSession(deployment).follow(
            RUN, lambda info: print(f"\rstep {info.step} of {info.total_steps} ", end="", file=sys.stderr, flush=True)
        )
    finally:
        watch.end()
        take_down(deployment)
    rows = [row for row in RunFolder(outputs / RUN).rows() if "timing_s/step" in row.data]
    return watch.readings, {row.step: float(row.data["timing_s/step"]) for row in rows}


def cpu_by_step(readings: Sequence[Reading]) -> list[tuple[int, float]]:
    """Return the CPU seconds of a step between each two readings, by the later one's step."""
    return [
        (later.step, (later.cpu_s - earlier.cpu_s) / (later.step - earlier.step))
        for earlier, later in itertools.pairwise(readings)
        if later.step > earlier.step
    ]


def report(readings: Sequence[Reading], seconds: dict[int, float], file: Path) -> None:
    """Print the slopes of the second half, and write the plot."""
    half = max(seconds) / 2
    late = [step for step in seconds if step > half]
    step_s = slope_of(late, [seconds[step] for step in late])
    cpu_s = slope_of(*zip(*((step, cpu) for step, cpu in cpu_by_step(readings) if step > half), strict=True))
    names = sorted({name for reading in readings for name in reading.mb})
    for name, slope in (("a step", step_s), ("CPU of a step", cpu_s)):
        grown = f"{slope.per_thousand:+.3f} s in 1,000 steps (within {slope.half_width:.3f})"
        print(f"\n{name}: {slope.start:.3f} s, {grown}", end="")
    print()
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    upper.plot(list(seconds), list(seconds.values()), label="seconds", linewidth=0.5)
    upper.plot(*zip(*cpu_by_step(readings), strict=True), label="CPU seconds", linewidth=0.8)
    upper.legend(fontsize=6)
    upper.set(ylabel="seconds of a step")
    for name in names:
        points = [(reading.step, reading.mb.get(name, 0.0)) for reading in readings]
        of_late = [point for point in points if point[0] > half]
        if len(of_late) > 2:
            slope = slope_of(*zip(*of_late, strict=True))
            grown = f"{slope.per_thousand:+.1f} MB in 1,000 steps (within {slope.half_width:.1f})"
            print(f"{name}: {slope.start:.0f} MB, {grown}")
        lower.plot(*zip(*points, strict=True), label=name, linewidth=0.8)
    lower.set(xlabel="step", ylabel="memory (PSS), MB")
    lower.legend(fontsize=6, ncols=2)
    figure.savefig(file)


def main() -> None:
    """Train, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="configuration of the run: key=value")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--outputs", type=Path, default=Path("outputs/endurance"), help="folder of the run")
    args = parser.parse_args()
    run_in(None, parser)
    outputs = args.outputs.resolve()
    if RunFolder(outputs / RUN).exists:
        parser.error(f"--outputs: expected a folder without a run, got {outputs} with {RUN}; give another")
    readings, seconds = trained(outputs, args.steps, args.words)
    record = {"readings": [reading._asdict() for reading in readings], "seconds": seconds}
    (outputs / "endurance.json").write_text(json.dumps(record))
    report(readings, seconds, outputs / "endurance.svg")


if __name__ == "__main__":
    main()
