"""`import trackway` on running services: the example notebook, and a notebook whose process is killed."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.waiting import until
from trackway.clients import ToolsClient, run
from trackway.deploy.deployment.record import Deployment
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


def tools_of(deployment: Deployment) -> list[str]:
    return [tool.function.name for tool in run(ToolsClient(deployment.url("tools")).list())]


def test_the_example_notebook_trains_evaluates_and_uses_a_model(deployment: Deployment):
    folder, before = deployment.outputs.parent, tools_of(deployment)
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()

    printed = {cell["id"]: str(cell.get("outputs")) for cell in notebook.cells}
    [name] = [text for text in printed.values() if "95 % interval of the difference (0." in text]
    assert "image/png" in str(printed) and "score: 1.0" in str(printed) and "model.safetensors" in str(printed), name
    info = RunFolder(deployment.outputs / "run-1").info()
    assert (info.state, info.step) == (RunState.FINISHED, 8)
    assert tools_of(deployment) == before  # the functions were the run's alone


GIVEN = """
import re
from operator import add, floordiv, mul, sub

dataset = [{"prompt": f"Ben packs {10 * number} eggs into boxes of 10. How many boxes does Ben need?", "answer": number}
           for number in range(1, 25)]

def calculator(expression: str) -> str:
    \"\"\"Calculate with two whole numbers, such as 12-5.\"\"\"
    left, sign, right = re.fullmatch(r"(\\d+)([-+*/])(\\d+)", expression).groups()
    return str({"+": add, "-": sub, "*": mul, "/": floordiv}[sign](int(left), int(right)))
"""


@pytest.mark.extended  # restarts two services twice
def test_the_script_of_the_page_for_trls_users_runs(deployment: Deployment):
    page = (NOTEBOOK.parents[1] / "docs" / "coming-from" / "trl.md").read_text()
    _, code = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    script = f"{GIVEN}\n{code}\nprint(run.name, run.info.state.value, len(run.metrics()))"

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=deployment.outputs.parent, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"run-\d+ finished 4", done.stdout.splitlines()[-1]), done.stdout


CELL = """
import sys
sys.path.insert(0, {folder!r})
from functions import rows, score
import trackway

def calculator(expression: str) -> str:
    \"\"\"Calculate with two whole numbers, such as 12-5.\"\"\"
    return str(eval(expression, {{}}))

run = trackway.local({outputs!r}).train(
    rows, tools=[calculator], reward=score, config="tiny_demo", run="killed",
    trainer={{"total_training_steps": 6, "save_freq": 1, "val_before_train": False}},
)
print("started", flush=True)
run.wait()
"""
FUNCTIONS = """
text = "Ben has {} boxes with {} cards in each box. How many cards does Ben have?"
rows = [{"prompt": text.format(a, b), "answer": a * b} for a in range(2, 12) for b in range(2, 12)]


def score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.endswith(f"#### {ground_truth}"))
"""


@pytest.mark.extended  # restarts two services three times, and waits for a run to fail
def test_a_killed_notebook_ends_its_run_by_name_and_the_same_cell_resumes_it(deployment: Deployment, tmp_path: Path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    cell = CELL.format(folder=str(tmp_path), outputs=str(deployment.outputs))
    killed = RunFolder(deployment.outputs / "killed")

    with subprocess.Popen([sys.executable, "-c", cell], cwd=tmp_path) as notebook:
        until(lambda: killed.exists and killed.info().step >= 1)
        notebook.kill()
    until(lambda: killed.exists and killed.info().state is RunState.FAILED)

    assert f"process {notebook.pid} on " in killed.info().message
    done = subprocess.run([sys.executable, "-c", cell], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (killed.info().state, killed.info().step) == (RunState.FINISHED, 6)
    assert [row.step for row in killed.rows()] == [1, 2, 3, 4, 5, 6]
