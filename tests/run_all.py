"""`make test`: both halves of the suite side by side, and one last line that adds them up.

    python tests/run_all.py [argument of pytest ...]

One half starts no Ray and runs in two processes. The other shares one Ray and waits most of its time, so it runs beside
the first, and its output follows the first's. Exits with the first half's status that is not 0; with arguments, a half
that selected no test has passed.
"""

import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

REPORT = "TRACKWAY_TEST_REPORT"
NO_TESTS = 5
OF_OTHER_TARGETS = ["extended", "vllm", "sglang", "pods", "manifests", "chaos", "install", "agents", "model", "mutants"]
OF_OTHER_TARGETS += ["stores", "kubernetes"]
OF_RAY = "tests/e2e tests/cluster"
"""Where the second half looks, unless its arguments name a place: importing all tests takes half a minute."""
HALVES = [
    ["-n", "2", "--dist", "loadfile", "-m", " and ".join(f"not {mark}" for mark in ["e2e", *OF_OTHER_TARGETS])],
    ["-m", "e2e and not chaos and not extended", "-o", f"testpaths={OF_RAY}"],
]


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report.jsonl"), Path(folder, "output")
        report.touch()
        environment = {**os.environ, REPORT: str(report)}
        commands = [[sys.executable, "-m", "pytest", *half, *arguments] for half in HALVES]
        with output.open("wb") as written, output.open() as shown:
            first = subprocess.Popen(commands[0], env=environment)
            second = subprocess.Popen(commands[1], env=environment, stdout=written, stderr=subprocess.STDOUT)
            statuses = [_status(first), _status(second, shown)]
        print(last_line([json.loads(line) for line in report.read_text().splitlines()]))
    if arguments and NO_TESTS in statuses and len(set(statuses)) > 1:
        statuses = [status for status in statuses if status != NO_TESTS]
    return next((status for status in statuses if status), 0)


def _status(half: "subprocess.Popen[bytes]", output: TextIO | None = None) -> int:
    """Wait for a half and print its output. Ctrl-C reaches it too, and it then reports and exits by itself."""
    status = None
    while status is None:
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            status = half.wait(0.5)
        if output:
            print(output.read(), end="", flush=True)
    return status


def last_line(halves: list[dict]) -> str:
    """`3468 passed, 0 failed, 81 skipped: bubblewrap is not installed (80), needs a GPU (1)`."""
    passed, failed, errors = (sum(half[name] for half in halves) for name in ("passed", "failed", "error"))
    reasons = sum((collections.Counter(half["skipped"]) for half in halves), collections.Counter[str]())
    line = f"{passed} passed, {failed + errors} failed, {reasons.total()} skipped"
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    why = ", ".join(f"{reason} ({count})" for reason, count in ordered)
    return f"{line}: {why}" if why else line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
