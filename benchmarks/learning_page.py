"""Puts what `benchmarks/learning.py` recorded into the tables of docs/concepts/algorithms.md: a curve for each setting.

    .venv/bin/python benchmarks/learning_page.py --outputs outputs/learning

The part `teachers` becomes one figure, of docs/guides/distillation.md.

A curve shows the training reward by step: the mean and the range over the seeds whose runs finished. The number beside
it is the held-out accuracy after the last step. A setting without a record keeps its curve, so this may run before all
runs have finished, or after those of one setting.
"""

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "concepts" / "algorithms.md"
CURVES = DOCS / "pictures" / "learning"

SECTIONS = {"Advantages": "estimators", "Loss": "losses"}
"""Heading of a section -> the part of the benchmark that its table shows."""
COLUMN = "on the demo"
"""Header of the last column of these tables."""
SETTINGS = {"norm_adv_by_std_in_grpo=false": "dr_grpo", "bypass_mode": "bypass_pg_is"}
"""Name in a row -> its setting, where that is not the same."""
GOAL = 0.8
TEACHERS, TAUGHT = "teachers", 0.9
"""The part of the benchmark that becomes a figure, and its dotted line."""

WIDTH, HEIGHT, TEXT, EDGE = 96, 32, 40, 2
"""In pixels: width and height of a curve, width of its number, margin."""


class Run(TypedDict):
    """A run in the JSON of the benchmark."""

    setting: str
    seed: int
    accuracies: Mapping[str, float]
    """Held out, by step."""
    rewards: NotRequired[Mapping[str, float]]
    """Mean training reward by step."""
    error: str


class Point(NamedTuple):
    """A value at a step, over seeds."""

    step: int
    mean: float
    low: float
    high: float


def points(series: Sequence[Mapping[str, float]]) -> list[Point]:
    """The curve of values by step, at the steps that all of the series have."""
    if not series:
        return []
    steps = sorted(map(int, set.intersection(*(set(values) for values in series))))
    columns = [(step, [values[str(step)] for values in series]) for step in steps]
    return [Point(step, statistics.fmean(values), min(values), max(values)) for step, values in columns]


def told(runs: Sequence[Run]) -> str:
    """The held-out accuracy in words: `0.95 (0.93 to 0.97)`, and how many runs failed."""
    curve = points([run["accuracies"] for run in runs if not run["error"]])
    failed = sum(bool(run["error"]) for run in runs)
    parts = [f"{curve[-1].mean:.2f} ({curve[-1].low:.2f} to {curve[-1].high:.2f})"] if curve else []
    return ", ".join([*parts, *([f"{failed} of {len(runs)} failed"] if failed else [])])


def drawn(curve: Sequence[Point], accuracy: str) -> str:
    """The curve as SVG: the range of the seeds, their mean, the goal as a dotted line, and the accuracy."""
    first, last = curve[0], curve[-1]

    def places(values: Sequence[tuple[int, float]]) -> str:
        width = max(1, last.step - first.step)
        return " ".join(
            f"{EDGE + (step - first.step) / width * WIDTH:.1f},{EDGE + (1 - value) * HEIGHT:.1f}"
            for step, value in values
        )

    band = places([(p.step, p.high) for p in curve] + [(p.step, p.low) for p in reversed(curve)])
    goal = places([(first.step, GOAL), (last.step, GOAL)])
    size = f'width="{WIDTH + TEXT + 2 * EDGE}" height="{HEIGHT + 2 * EDGE}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<polyline points="{goal}" fill="none" stroke="#8b949e" stroke-dasharray="2 3"/>
<polygon points="{band}" fill="#1f6feb" fill-opacity="0.25"/>
<polyline points="{places([(p.step, p.mean) for p in curve])}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>
<text x="{WIDTH + 4 * EDGE}" y="{HEIGHT / 2 + 3 * EDGE:g}" font-family="sans-serif" font-size="13" \
fill="#1f6feb">{accuracy}</text>
</svg>
"""


def filled(page: str, records: Mapping[str, Sequence[Run]], folder: Path) -> str:
    """The page with the last cell of each row filled from the records by part; writes the curves into `folder`."""
    part, lines = None, []
    for line in page.splitlines():
        if line.startswith("## "):
            part = SECTIONS.get(line.removeprefix("## "))
        if part is not None and line.startswith("| ") and not line.endswith(f"| {COLUMN} |"):
            line = _row(line, part, records.get(part, ()), folder)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _row(line: str, part: str, runs: Sequence[Run], folder: Path) -> str:
    names: list[str] = re.findall(r"`([^`]+)`", line.split(" | ")[0])
    start, _, before = line.removesuffix(" |").rpartition(" |")
    cells = (_cell(part, SETTINGS.get(name, name), runs, folder, before) for name in names)
    return " ".join([f"{start} |", *filter(None, cells), "|"])


def _cell(part: str, setting: str, runs: Sequence[Run], folder: Path, before: str) -> str:
    name = f"{part}-{setting}.svg"
    own = [run for run in runs if run["setting"] == setting]
    if not own:
        kept = re.search(rf"!\[[^]]*\]\([^)]*/{re.escape(name)}\)", before)
        return kept[0] if kept else ""
    curve, text = points([run.get("rewards") or run["accuracies"] for run in own if not run["error"]]), told(own)
    if not curve:
        return text
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(drawn(curve, text.partition(" ")[0]))
    return f"![{text}](../pictures/{folder.name}/{name})"


def write_figure(runs: Sequence[Run], file: Path) -> None:
    """Write an SVG of the held-out accuracy by step: a curve for each setting, the mean and the range of its seeds."""
    # the same bytes on every machine, text as text
    with pyplot.rc_context({"svg.hashsalt": "teachers", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
        for setting in dict.fromkeys(run["setting"] for run in runs):
            curve = points([run["accuracies"] for run in runs if run["setting"] == setting and not run["error"]])
            steps = [point.step for point in curve]
            [line] = axes.plot(steps, [point.mean for point in curve], label=setting)
            lows, highs = [point.low for point in curve], [point.high for point in curve]
            axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.axhline(TAUGHT, color="#8b949e", linestyle=":")
        axes.set(xlabel="step", ylabel="held-out accuracy")
        axes.legend(loc="lower right", frameon=False)
        figure.savefig(file, metadata={"Date": None})
        pyplot.close(figure)


def recorded(outputs: Path) -> Iterator[tuple[str, list[Run]]]:
    """The runs of each part that the folder has."""
    for part in (*SECTIONS.values(), TEACHERS):
        file = outputs / f"{part}.json"
        if file.exists():
            yield part, json.loads(file.read_text())


def main() -> None:
    """Fill the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=Path, default=Path("outputs/learning"), help="folder of the benchmark's JSON")
    outputs = parser.parse_args().outputs
    records = dict(recorded(outputs))
    if not records:
        names = " or ".join(f"{part}.json" for part in (*SECTIONS.values(), TEACHERS))
        parser.error(f"--outputs: expected {names} in {outputs}, got none; run benchmarks/learning.py first")
    if TEACHERS in records:
        write_figure(records[TEACHERS], CURVES / f"{TEACHERS}.svg")
    PAGE.write_text(filled(PAGE.read_text(), records, CURVES))


if __name__ == "__main__":
    main()
