"""`make test`: both halves of the suite, and one last line that adds them up.

    python tests/run_all.py [argument of pytest ...]

Tests that start no Ray run on two cores; then those that share one Ray start. The second half runs whatever became of
the first. Exits with the first half's status that is not 0; with arguments, a half that selected no test has passed.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPORT = "TRACKWAY_TEST_REPORT"
NO_TESTS = 5
INTERRUPTED = 2
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
        report = Path(folder, "report.jsonl")
        report.touch()
        statuses: list[int] = []
        for half in HALVES:
            command = [sys.executable, "-m", "pytest", *half, *arguments]
            statuses.append(_status(subprocess.Popen(command, env={**os.environ, REPORT: str(report)})))
            if statuses[-1] == INTERRUPTED:
                break
        print(last_line([json.loads(line) for line in report.read_text().splitlines()]))
    if arguments and NO_TESTS in statuses and len(set(statuses)) > 1:
        statuses = [status for status in statuses if status != NO_TESTS]
    return next((status for status in statuses if status), 0)


def _status(half: "subprocess.Popen[bytes]") -> int:
    """Waits for it; Ctrl-C reaches it too, and it then reports and exits by itself."""
    while True:
        try:
            return half.wait()
        except KeyboardInterrupt:
            continue


def last_line(halves: list[dict]) -> str:
    """`3468 passed, 0 failed, 81 skipped: bubblewrap is not installed (80), needs a GPU (1)`."""
    passed, failed, errors = (sum(half[name] for half in halves) for name in ("passed", "failed", "error"))
    reasons = sum((collections.Counter(half["skipped"]) for half in halves), collections.Counter[str]())
    line = f"{passed} passed, {failed + errors} failed, {reasons.total()} skipped"
    why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    return f"{line}: {why}" if why else line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
