"""`trackway export --as atif | datasets | chat`."""

import json
from pathlib import Path

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from tests.console.example_run import write_run
from tests.serving import served_in_thread
from trackway.deploy.cli import app as cli
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.found import FoundRun
from trackway.system.user_error import UserError
from trackway.tools.app import create_app
from trackway.tools.settings import ToolsSettings
from trackway.trainer.config import compose


def export(*words: str) -> str:
    result = CliRunner().invoke(cli, ["export", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def outputs(tmp_path: Path) -> str:
    write_run(tmp_path / "outputs")
    return f"--outputs={tmp_path / 'outputs'}"


def test_a_runs_trajectories_become_chat_lines(outputs: str, tmp_path: Path) -> None:
    target = tmp_path / "sft.jsonl"

    said = export("tidy", str(target), "--as", "chat", "--where", "score > 0.5 and step == 2", outputs)

    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == ["tidy/2/7/1"]
    assert said == (
        f"{target} has 1 of 8 trajectories; without definitions of tools, which only running services know\n"
    )


def test_validations_are_exported_when_asked_for(outputs: str, tmp_path: Path) -> None:
    said = json.loads(export("tidy", str(tmp_path / "v"), "--as", "atif", "--validation", "--json", outputs))

    expected = {"format": "atif", "target": str(tmp_path / "v"), "trajectories": 1, "filtered": 0, "further_rows": 0}
    assert said == expected
    again = json.loads(export(str(tmp_path / "v"), str(tmp_path / "v.jsonl"), "--as", "chat", "--json"))
    assert again["trajectories"] == 1


@pytest.mark.parametrize(
    "words",
    [
        ["tidy", "t", "--where", "score > 1"],
        ["tidy", "t", "--validation"],
        ["tidy", "t", "--as", "chat", "--merge"],
        ["./t", "t", "--as", "chat", "--step", "1"],
        ["./t", "t", "--as", "chat", "--validation"],
    ],
)
def test_options_that_do_not_go_together_are_refused(outputs: str, words: list[str]) -> None:
    with pytest.raises(UserError, match=r"expected --merge with a model, .* got another of these options with .*"):
        export(*words, outputs)


@pytest.mark.parametrize(("key", "others"), [("null", True), ("[calculator]", False)])
def test_running_services_give_the_tools_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, others: bool
) -> None:
    folder = write_run(tmp_path)
    folder.write_config(compose([f"trackway.tools={key}"]))
    app = FastAPI()
    app.mount("/tools", create_app(ToolsSettings()))
    with served_in_thread(app) as url:
        services = Deployment(base_url=url, dashboard_url="", mlflow_uri="", outputs=tmp_path)
        found = FoundRun(folder.info(), tmp_path, services)
        monkeypatch.setattr("trackway.deploy.runs.found.find_run", lambda outputs, name: found)

        export("tidy", str(tmp_path / "sft.jsonl"), "--as", "chat", "--step", "1")

    lines = (tmp_path / "sft.jsonl").read_text().splitlines()
    offered = [tool["function"]["name"] for tool in json.loads(lines[0])["tools"]]
    assert len(lines) == 4
    assert ("calculator" in offered, len(offered) > 1) == (True, others)
