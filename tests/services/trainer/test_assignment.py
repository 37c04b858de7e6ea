"""A process that waits for its run on standard input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trackway.trainer.assignment import EXIT_UNUSED, Assignment

WORKER = "import os; from trackway.trainer.assignment import receive; print(receive({}), os.environ['TOKEN'])"


def waiting(deadline_s: float) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", WORKER.format(deadline_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "TOKEN": ""})


def test_a_run_that_comes_in_pieces_gets_its_arguments_environment_and_log(tmp_path: Path):
    log = tmp_path / "worker.log"
    log.write_text("before\n")
    line = Assignment(arguments=["run", "--lifeline"], log=log, environment={"TOKEN": "s3cret"}).model_dump_json()
    with waiting(60) as process:
        assert process.stdin is not None
        for piece in (line[:10], line[10:], "\n"):
            process.stdin.write(piece.encode())
            process.stdin.flush()

        assert process.wait(60) == 0
    assert log.read_text() == "before\n['run', '--lifeline'] s3cret\n"


@pytest.mark.parametrize(("deadline_s", "closes"), [(60.0, True), (0.5, False)])
def test_without_a_run_the_process_ends_when_its_input_closes_or_at_the_deadline(deadline_s: float, closes: bool):
    with waiting(deadline_s) as process:
        assert process.stdin is not None
        if closes:
            process.stdin.close()

        assert process.wait(50) == EXIT_UNUSED
