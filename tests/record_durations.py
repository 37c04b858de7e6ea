"""pytest plugin: `--record-durations` writes what the tests took into `tests/durations/<target>.json`.

A file that took a second or more, set-ups included, has its seconds by the clock and its CPU seconds (this process and
child processes that ended). A file that did not run keeps its earlier figures.
"""

import collections
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path("tests", "durations")
TARGETS = ["vllm", "sglang", "pods", "manifests", "chaos", "install", "agents", "model", "mutants", "stores"]
TARGETS += ["kubernetes", "extended", "e2e"]
"""Marks that decide which target runs a test, the most special one first. `unit` is the rest."""

_cpu_s = 0.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations/<target>.json")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart() -> None:
    global _cpu_s
    _cpu_s = sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Give the report the target and the processor's seconds, which xdist's workers send with it."""
    global _cpu_s
    report = yield
    before, _cpu_s = _cpu_s, sum(os.times()[:4])
    report.cpu_s = _cpu_s - before
    report.target = next((mark for mark in TARGETS if item.get_closest_marker(mark)), "unit")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("record_durations") or hasattr(config, "workerinput"):
        return
    measured: dict[str, dict[str, list[float]]] = collections.defaultdict(dict)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds = measured[report.target].setdefault(report.nodeid.partition("::")[0], [0.0, 0.0])
                seconds[0] += report.duration
                seconds[1] += report.cpu_s
    for target, files in measured.items():
        file = config.rootpath / FOLDER / f"{target}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = json.loads(file.read_text()) if file.exists() else {}
        kept = {name: kept[name] for name in kept if name not in files and (config.rootpath / name).exists()}
        for name, (wall_s, cpu_s) in files.items():
            if wall_s >= 1:
                kept[name] = {"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1)}
        slowest_first = sorted(kept.items(), key=lambda entry: -entry[1]["wall_s"])
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(seconds)}" for name, seconds in slowest_first)
        file.write_text(f"{{\n{lines}\n}}\n")
