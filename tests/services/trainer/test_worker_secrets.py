"""A process that waits on standard input for its secrets, or for its run."""

import os
import subprocess
import sys

import pytest

WORKER = (
    "import os; from trackway.trainer.worker import receive; os.environ.update(receive({})); print(os.environ['TOKEN'])"
)


def waiting(deadline_s: float) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", WORKER.format(deadline_s)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, "TOKEN": ""})


def test_secrets_that_come_in_pieces_are_in_the_environment():
    with waiting(60) as process:
        assert process.stdin is not None and process.stdout is not None
        for piece in (b'{"TOK', b'EN": "s3cret"}', b"\n"):
            process.stdin.write(piece)
            process.stdin.flush()

        assert process.wait(60) == 0
        assert process.stdout.read() == b"s3cret\n"


@pytest.mark.parametrize(("deadline_s", "closes"), [(60.0, True), (0.5, False)])
def test_without_secrets_the_process_ends_when_its_input_closes_or_at_the_deadline(deadline_s: float, closes: bool):
    with waiting(deadline_s) as process:
        assert process.stdin is not None
        if closes:
            process.stdin.close()

        assert process.wait(50) == 1
