"""`trackway traces` as a person meets it: help with examples, mistakes in one line with exit status 2."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trackway.deploy.commands.traces import app
from trackway.system.process import UserError


@pytest.mark.parametrize("command", ["list", "show", "compare", "verify"])
def test_each_commands_help_has_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"})
    assert (done.exit_code, f"Example: trackway traces {command}" in " ".join(done.stdout.split())) == (0, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list"], "no MLflow database in .*; set --outputs to the folder of a deployment or demo, or --mlflow-uri"),
        (["list", "--step", "7-3"], "--step: expected a range that goes up, got '7-3'"),
        (["list", "--tag", "step"], "--tag: expected key=value, got 'step'"),
        (["list", "--backend", "weave"], "--backend weave: expected --project entity/project, got none"),
        (["compare", "one"], "expected two traces"),
        (["verify"], "expected a run in .*, found none; start one with `trackway train`"),
    ],
)
def test_a_mistake_says_what_was_expected(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, [*words, "--outputs", str(tmp_path)], catch_exceptions=False)


@pytest.mark.slow
def test_a_mistake_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trackway.deploy.cli", "traces", "verify", "--outputs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, "")
