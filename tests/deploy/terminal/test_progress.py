"""What the terminal shows of a run."""

import pytest
from IPython.display import HTML
from rich.progress import Progress

from trackway.deploy.terminal.progress import RunBar, board, run_bar, stderr
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


def test_a_notebook_has_one_output_that_each_step_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[str] = []

    class Handle:
        def __init__(self, place: int) -> None:
            self.place = place

        def update(self, shown: HTML) -> None:
            outputs[self.place] = str(shown.data)

    def display(shown: HTML, display_id: bool) -> Handle:
        outputs.append(str(shown.data))
        return Handle(len(outputs) - 1)

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(stderr, "is_jupyter", True)

    with run_bar(quiet=False) as bar, board(quiet=False) as parts:
        for step in (1, 2):
            metrics = {"critic/score/mean": step / 4}
            bar.show(RunInfo(run="a", state=RunState.RUNNING, step=step, total_steps=4, metrics=metrics))
            for state in ("reading", "ready"):  # twice: of another file
                parts.report("rows", state)

    run, rows = outputs
    assert "running" in run and "2/4" in run and "reward 0.50" in run
    assert "rows ready" in rows and "reading" not in rows
