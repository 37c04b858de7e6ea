"""`import trackway` on running services: the example notebook, and a notebook whose process is killed."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from nbclient import NotebookClient

from tests.e2e.access_tokens import OPERATOR
from tests.e2e.another_machine import run_elsewhere
from tests.waiting import until
from trackway.clients import ToolsClient, run
from trackway.clients.http_client import TOKEN
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.commands.why import reasons
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.found import find_run
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
    assert [tool.function.name for tool in RunFolder(deployment.outputs / "run-1").tools()] == ["calculator"]


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


def code_of(page: str) -> dict[str, str]:
    """The blocks of a page for users of another library that are for Trackway, by the file that each names."""
    text = (NOTEBOOK.parents[1] / "docs" / "coming-from" / f"{page}.md").read_text()
    blocks = re.findall(
        r"^```python\n# Trackway(?:: (\w+\.py)[^\n]*)?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL
    )
    return {file or "train.py": block for file, block in blocks}


def run_page(page: str, folder: Path, token: str = OPERATOR) -> str:
    """The last line that the page's script prints, with the run's name, state and steps added."""
    end = "print(run.name, run.info.state.value, len(run.metrics()), round(run.trajectories().score.mean(), 2))"
    for file, block in code_of(page).items():
        (folder / file).write_text(f"{GIVEN}\n{block}\n{end}" if file == "train.py" else block)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, TOKEN: token},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.extended  # restarts two services twice
@pytest.mark.parametrize("page", ["trl", "tinker"])
def test_the_script_of_the_page_for_users_of_another_library_runs(deployment: Deployment, page: str):
    assert re.fullmatch(r"run-\d+ finished 4 \d\.\d+", run_page(page, deployment.outputs.parent))


@pytest.mark.extended  # starts services of its own, whose agent is a program
def test_the_program_of_the_page_for_agent_lightnings_users_is_trained(tmp_path: Path):
    assert re.fullmatch(r"run-1 finished 4 \d\.\d+", run_page("agent-lightning", tmp_path, token=""))


STEPS = 30
"""More than are done between two kills."""
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
    trainer={{"total_training_steps": {steps}, "save_freq": 1, "val_before_train": False}},
)
run.wait()
"""
FUNCTIONS = """
text = "Ben has {} boxes with {} cards in each box. How many cards does Ben have?"
rows = [{"prompt": text.format(a, b), "answer": a * b} for a in range(2, 12) for b in range(2, 12)]


def score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.endswith(f"#### {ground_truth}"))
"""


@contextmanager
def killed_at_the_end(folder: Path) -> Iterator[tuple[int, BlockingKernelClient]]:
    """The process of a notebook's kernel, and its client, for the duration of the block."""
    manager, kernel = start_new_kernel(cwd=folder)
    assert isinstance(manager.provisioner, LocalProvisioner) and manager.provisioner.pid
    try:
        yield manager.provisioner.pid, kernel
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)


def shown(kernel: BlockingKernelClient, cell: str) -> list[str]:
    """Each text that the output of the cell's run was replaced with. The cell must end without an error."""
    texts = list[str]()

    def see(message: dict[str, Any]) -> None:
        if message["msg_type"] in ("display_data", "update_display_data"):
            texts.append(re.sub(r"<[^>]+>", "", message["content"]["data"].get("text/html", "")))

    reply = kernel.execute_interactive(cell, timeout=300, output_hook=see)
    assert reply["content"]["status"] == "ok", reply["content"]
    return texts


@pytest.mark.extended  # restarts two services four times, and waits for a run to fail
def test_a_killed_kernel_is_a_named_wait_and_then_ends_its_run_by_name(deployment: Deployment, tmp_path: Path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    cell = CELL.format(steps=STEPS, folder=str(tmp_path), outputs=str(deployment.outputs))
    killed = RunFolder(deployment.outputs / "killed")

    def named_wait(process: int) -> str:
        lines = reasons(find_run(deployment.outputs, "killed").info, time.time())
        return next((line for line in lines if f"waiting for the functions of process {process} on " in line), "")

    def until_killed(past_step: int) -> int:
        with killed_at_the_end(tmp_path) as (process, kernel):
            kernel.execute(cell)
            until(lambda: killed.exists and killed.info().step > past_step)
        return process

    first = until_killed(0)
    assert re.search(
        r"rollout \d+/\d+/\d waits for (tool calculator|the reward service), ", until(lambda: named_wait(first))
    )
    second = until_killed(killed.info().step)  # the same cell, in time
    assert killed.info().state is RunState.RUNNING
    until(lambda: named_wait(second))
    until(lambda: killed.info().state is RunState.FAILED)

    assert f"from the functions of process {second} on " in killed.info().message
    assert "within 60 s, got none" in killed.info().message
    with killed_at_the_end(tmp_path) as (_, kernel):
        progress = shown(kernel, cell)
    assert (killed.info().state, killed.info().step) == (RunState.FINISHED, STEPS)
    assert [row.step for row in killed.rows()] == [*range(1, STEPS + 1)]
    assert any("running" in text for text in progress) and any(f"{STEPS}/{STEPS}" in text for text in progress)


ELSEWHERE = """
import trackway
from trackway.system.process import UserError

def calculator(expression: str) -> str:
    \"\"\"Calculate with two whole numbers, such as 12-5.\"\"\"
    return str(eval(expression, {{}}))

services = trackway.connect("http://127.0.0.2:8000", {token!r}, outputs="here")
text = "Ben has 3 boxes with 4 cards in each box. How many cards does Ben have?"
rows = [{{"prompt": text, "answer": 12, "data_source": "trackway/tiny_math"}}]
for given in ({{"rows": "/volume/rows.jsonl", "tools": [calculator]}}, {{"rows": rows}}):
    try:
        services.train(**given)
    except UserError as error:
        print(error)
model = {model!r}  # is on the services' machines too
keys = {{"run": "from-elsewhere", "config": "tiny_demo", "trainer": {{"total_training_steps": 2}}}}
run = services.train({rows!r}, model=model, **keys).wait()
print(run.info.state.value, *run.metrics().index)
try:
    run.trajectories()
except UserError as error:
    print(error)
print(len(services.rollout("running", rows, n=3)))
"""


@pytest.mark.program("bwrap")
def test_another_machine_trains_and_rolls_out_and_its_functions_are_refused(deployment: Deployment, tmp_path: Path):
    rows = str(deployment.outputs / "data" / "train.parquet")
    url = httpx.URL(deployment.base_url)

    done = run_elsewhere(
        ELSEWHERE.format(token=OPERATOR, rows=rows, model=str(TINY_MODEL)),
        url.port or 80,
        deployment.outputs.parent,
        tmp_path,
        {TOKEN: ""},
        300,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    functions, given_rows, state, folder, rollouts = done.stdout.splitlines()
    assert re.fullmatch(
        r"tools, reward: expected no functions, .* \(http://127.0.0.2:8000\), got some; .* trackway\.modules", functions
    )
    assert given_rows.startswith("rows: expected a path on the services' volume, since they run elsewhere, got rows; ")
    assert state == "finished 1 2"
    assert re.fullmatch(r"run from-elsewhere: expected its folder .* on this machine, got none; .*", folder)
    assert rollouts == "3"
