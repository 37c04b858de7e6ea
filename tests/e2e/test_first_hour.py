"""The promise: what the tutorial prints is what runs, from a wheel in a fresh environment and an empty folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.test_install import Installed
from trackway.deploy.deployment.record import Deployment
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
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
    assert Deployment.load(outputs) is None  # the services that the run started are down again


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
    assert "pass@4" in done.stdout and Deployment.load(folder / "outputs") is None
