"""The promise: what the tutorial prints is what runs, from a wheel in a fresh environment and an empty folder."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.e2e.conftest import Train
from tests.install.test_install import Installed
from tests.services.trainer.run_state.atif_documents import read_back
from trackway.deploy.cli import app
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.session import RunSession
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "start" / "your-own-agent.md"
README = Path(__file__).parents[2] / "README.md"
SHELL = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKWAY_", "PYTHON", "VIRTUAL_"))}


def commands_of_the_page() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def outputs_of(blocks: list[str], folder: Path, programs: Path) -> list[str]:
    """What each block of commands prints, run one after another in one shell that ends at the first failure."""
    script = "set -euo pipefail\n" + "".join(f"echo '=== block'\n{block}" for block in blocks)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**SHELL, "PATH": f"{programs}{os.pathsep}{SHELL['PATH']}", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [" ".join(printed.split()) for printed in done.stdout.split("=== block\n")[1:]]


def told(*words: str) -> tuple[int, str]:
    """The exit status of a command and what it says, on one line. It runs in this process, whose imports are done."""
    ended = CliRunner().invoke(app, words, env={"COLUMNS": "400"})
    if isinstance(ended.exception, UserError | TrackwayError):
        return 2, " ".join(str(ended.exception).split())
    return ended.exit_code, " ".join(ended.output.split())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new project, made in an empty folder, which is the working folder from now on."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TRACKWAY_UP_MIN_MEMORY_GB", "0.001")
    for name in ("TRACKWAY_TEST_PATH", "TRACKWAY_TEST_REPORT"):  # set while tests run; commands refuse them
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    status, made = told("init", "first_hour")
    assert status == 0, made
    monkeypatch.chdir("first_hour")
    yield tmp_path / "first_hour"
    sys.modules.pop("first_hour", None)


@pytest.mark.parametrize(
    ("files", "words", "status", "message"),
    [
        ({}, ["train", "data.trian_files=x"], 2, "unknown key 'data.trian_files': did you mean data.train_files"),
        ({}, ["train", "--dry-run", "data.train_files=row.jsonl"], 2, "got none; {0} has held_out.jsonl, rows.jsonl"),
        (
            {},
            ["train", "--dry-run", "actor_rollout_ref.model.path=modle"],
            2,
            "on the Hugging Face Hub, got modle; corr",
        ),
        (
            {"rows.jsonl": ('"reward_model"', '"reward_modl"')},
            ["try", "rows.jsonl"],
            2,
            "missing reward_model (is it reward_modl? rename it) of data_source",
        ),
        (
            {"rows.jsonl": ('"ground_truth": "24"', '"ground_truth": ["24"]')},
            ["try", "rows.jsonl"],
            2,
            "rows.jsonl:1: expected verl's row schema, got reward_model.ground_truth: Input should be a valid string, "
            'got list; write reward_model as {{"style": "rule", "ground_truth": "<text>"}}',
        ),
        (
            {"reward.py": ('return {"score"', 'return "good" or {"score"')},
            ["try", "rows.jsonl"],
            1,
            "TypeError: expected it to return a number or a dict with 'score', got str 'good'; the reward service",
        ),
        (
            {"first_hour.py": ("await self.begin(episode", "self.begin(episode")},
            ["try", "rows.jsonl"],
            1,
            "ValueError: expected a prompt before the first turn, got none; call `await self.begin(episode, ...)`",
        ),
        (
            {},
            ["try", "rows.jsonl", "--config", "other.yaml"],
            2,
            "--config: expected a folder or a YAML file, got other",
        ),
        ({}, ["serve", "agent"], 2, "agent: model_path (TRACKWAY_MODEL_PATH): Field required"),
        ({}, ["evaluat", "short"], 2, "No such command 'evaluat'. Did you mean 'evaluate'?"),
        ({}, ["evaluate", "short"], 2, "expected a run (none), a checkpoint, a model's folder or Hub id, a URL"),
        (
            {},
            ["train", "--resume", "short"],
            2,
            "--resume: expected a run in outputs, got short; `trackway train` starts",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_mistake_of_the_first_hour_is_told_with_its_remedy(
    project: Path, files: dict[str, tuple[str, str]], words: list[str], status: int, message: str
) -> None:
    for name, (right, wrong) in files.items():
        text = (project / name).read_text()
        assert right in text
        (project / name).write_text(text.replace(right, wrong))

    ended, said = told(*words)

    assert message.format(project) in said
    assert ended == status


def test_a_copy_of_the_projects_file_is_tried_from_another_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "big.yaml").write_text((project / "trackway.yaml").read_text())
    monkeypatch.chdir(tmp_path)

    status, said = told("try", "--config", str(project / "big.yaml"))

    assert status == 0, said
    assert "rows.jsonl row 1 loop first_hour data source first_hour ground truth 24" in said


def test_a_finished_run_is_extended_by_name(deployment: Deployment, started: Train) -> None:
    RunSession(deployment).follow(started("hour", 1).run, lambda info: None)

    status, said = told(
        "train", "--resume", "hour", "trainer.total_training_steps=2", "--outputs", str(deployment.outputs)
    )

    run = RunFolder(deployment.outputs / "hour")
    assert status == 0, said
    assert (run.info().state, [row.step for row in run.rows()]) == (RunState.FINISHED, [0, 1, 2])


@pytest.mark.extended
def test_the_tutorial_trains_ones_own_agent_from_an_empty_folder(tmp_path: Path, wheel: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    programs = Installed(tmp_path, sys.executable, wheel, "cpu").bin

    init, once, group, train, look, traces, compared, used = outputs_of(commands_of_the_page(), folder, programs)

    project, outputs = folder / "my-agent", folder / "my-agent" / "outputs"
    assert "my_agent.py" in init and (project / "trackway.yaml").is_file()
    assert once.startswith("rows.jsonl row 1 loop my_agent data source my_agent ground truth 24")
    assert re.search(r"reward \S+ tool/calculator 0, acc [01], failed_calls [01]", once)
    assert len(re.findall(r"[+-]\d\.\d\d 2 1 \d+ ", group)) == 8, group
    assert f"run short finished at step 3; folder {outputs / 'short'}" in train
    assert "short finished 3/3" in look and "val-core/my_agent/acc/mean@1" in look and "16 traces" in look
    assert "execute_tool calculator" in traces and "compare.html" in traces
    assert re.search(r"[+-]\d\.\d{3} in score against eval-short-0, 95 % interval", compared), compared
    assert "is now the model model" in used and "held_out.jsonl row 1 loop my_agent" in used
    assert "How many" in (project / "compare.html").read_text()

    run = RunFolder(outputs / "short")
    assert (run.info().state, [row.step for row in run.rows()]) == (RunState.FINISHED, [0, 1, 2, 3])
    trained = read_trajectories(run.path / "trajectories" / "step_1.parquet")
    assert len(trained) == 96 and [trajectory.error for trajectory in trained if trajectory.error] == []
    assert {(trajectory.agent_name, trajectory.data_source) for trajectory in trained} == {("my_agent", "my_agent")}
    assert all(
        trajectory.reward and {"acc", "failed_calls"} <= trajectory.reward.components.keys() for trajectory in trained
    )
    assert json.loads((run.path / "config.json").read_text())["trackway"]["modules"] == ["my_agent"]

    [extended] = outputs_of(["trackway train --resume short trainer.total_training_steps=4"], project, programs)

    assert f"run short finished at step 4; folder {run.path}" in extended
    assert [row.step for row in run.rows()] == [0, 1, 2, 3, 4]
    assert Deployment.load(outputs) is None  # the services that the runs started are down again


@pytest.mark.extended
def test_the_readmes_lines_of_python_train_and_evaluate_from_the_wheel(tmp_path: Path, wheel: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    python = Installed(tmp_path, sys.executable, wheel, "cpu").bin / "python"
    folder = tmp_path / "work"
    folder.mkdir()

    done = subprocess.run(
        [python, "-c", code], cwd=folder, env=SHELL, capture_output=True, text=True, timeout=500, check=False
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    [low] = re.findall(r"interval=\((-?\d\.\d+),", done.stdout)
    assert float(low) > 0, done.stdout
    assert "rows x rollouts 256 x 1" in " ".join(done.stdout.split()) and Deployment.load(folder / "outputs") is None
    assert read_back(RunFolder(folder / "outputs" / "run-1"), tmp_path / "atif") == 30 * 96 + 2 * 256
