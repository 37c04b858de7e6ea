"""What the terminal shows of a run."""

import pytest
from rich.progress import Progress

from trackway.deploy.terminal.progress import RunBar, board
from trackway.wire.trainer import RunInfo, RunState


def test_what_an_active_run_says_is_printed_once_and_what_an_ended_one_says_is_left_to_the_caller(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = RunBar(Progress(disable=True), quiet=False)
    full = RunInfo(run="a", state=RunState.RUNNING, step=1, total_steps=4, message="waits for its disk [/mnt]")

    for info in (full, full, full.model_copy(update={"state": RunState.FAILED, "message": "disk_full"})):
        bar.show(info)

    assert capsys.readouterr().err.splitlines() == ["run a: waits for its disk [/mnt]", "running step 1/4 "]


def test_a_run_that_starts_has_no_steps_yet(capsys: pytest.CaptureFixture[str]) -> None:
    RunBar(Progress(disable=True), quiet=False).show(RunInfo(run="a", state=RunState.STARTING))

    assert capsys.readouterr().err.splitlines() == ["starting"]


@pytest.mark.parametrize(("end", "mark"), [("ready", "✓"), ("with problems", "✗"), ("not checked", "?")])
def test_a_part_is_printed_once_with_its_mark(end: str, mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    with board(quiet=False) as shown:
        for state in ("reading", end, end):
            shown.report("rows", state)

    assert capsys.readouterr().err == f"{mark} rows {end} 0 s\n"


def test_a_quiet_bar_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    RunBar(Progress(disable=True), quiet=True).show(RunInfo(run="a", state=RunState.RUNNING, message="waits"))

    assert capsys.readouterr().err == ""
