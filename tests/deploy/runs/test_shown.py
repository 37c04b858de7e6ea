"""A run of the command line and one of Python take the same steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trackway
from trackway.deploy.checks.run import Subject
from trackway.deploy.cli import app
from trackway.deploy.deployment.processes import Report
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.losses import Unsent
from trackway.deploy.runs.session import RunSession, Show
from trackway.wire.trainer import RunInfo, RunState

pytestmark = pytest.mark.slow

FINISHED = RunInfo(run="mine", state=RunState.FINISHED, step=2, total_steps=2, folder="outputs/mine")


class Scripted(RunSession):
    """Services that this session starts, and a run that ends at once."""

    def __init__(self, deployment: Deployment, calls: list[str]) -> None:
        self.deployment, self.own, self.calls = deployment, True, calls

    def close(self, report: Report) -> None:
        self.calls.append("close")

    def submit(self, subject: Subject, show: Show, skip_damaged: bool = False) -> RunInfo:
        self.calls.append(f"submit {subject.config.trainer.experiment_name}")
        return FINISHED

    def follow(self, name: str, show: Show) -> RunInfo:
        self.calls.append("follow")
        show(FINISHED)
        return FINISHED

    def deliver(self, info: RunInfo, show: Callable[[Unsent], None]) -> RunInfo:
        self.calls.append("deliver")
        return info


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The calls of a session."""
    made: list[str] = []
    services = Deployment(base_url="http://127.0.0.1:1", dashboard_url="", mlflow_uri="http://m", outputs=tmp_path)
    monkeypatch.setattr(RunSession, "open", lambda subject, report: Scripted(services, made))
    monkeypatch.chdir(tmp_path)
    return made


def by_command(*words: str) -> None:
    rows = [
        f"data.{name}_files=outputs/rows/tiny-seed0/{split}.parquet"
        for name, split in (("train", "train"), ("val", "test"))
    ]
    result = CliRunner().invoke(app, ["train", "--config-name", "tiny_demo", "--run", "mine", *rows, *words])
    assert result.exit_code == 0, result.output


def test_the_command_line_and_python_take_the_same_steps(calls: list[str], capsys: pytest.CaptureFixture[str]):
    trackway.train(config="tiny_demo", run="mine").wait()
    of_python, shown = [*calls], capsys.readouterr().err
    calls.clear()
    by_command()

    assert of_python == calls == ["submit mine", "follow", "deliver", "close"]
    assert "services  http://127.0.0.1:1   MLflow  http://m\nfinished step 2/2 \n" in shown


def test_services_that_are_kept_are_not_closed(calls: list[str]):
    with trackway.local() as services:
        services.train(config="tiny_demo", run="mine").wait()
        assert calls == ["submit mine", "follow", "deliver"]
    assert calls.pop() == "close"

    by_command("--keep")

    assert "close" not in calls and calls[3:] == ["submit mine", "follow", "deliver"]
