"""`trackway export --as atif | datasets | chat`, and `Run.export` of Python."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import trackway
from tests.console.example_run import write_run
from trackway import Run
from trackway.deploy.cli import app as cli
from trackway.run_config import compose
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.errors import TrackwayError


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
    assert said == (f"{target} has 1 of 8 trajectories; without definitions of tools, which are not recorded\n")


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


def test_the_tools_that_the_run_recorded_go_along(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    folder.write_config(compose(["trackway.tools=[add]"]))
    folder.write_tools([ToolSchema(function=FunctionSchema(name=name)) for name in ("add", "search")])

    said = export("tidy", str(tmp_path / "sft.jsonl"), "--as", "chat", "--step", "1", f"--outputs={tmp_path}")

    lines = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert [[tool["function"]["name"] for tool in line["tools"]] for line in lines] == 4 * [["add"]]
    assert said == f"{tmp_path / 'sft.jsonl'} has 4 of 4 trajectories\n"


def test_python_exports_the_same_trajectories(outputs: str, tmp_path: Path) -> None:
    folder, session = tmp_path / "outputs" / "tidy", cast(Any, None)
    run = Run(trackway.local(tmp_path / "outputs"), session, RunFolder(folder).info(), ExitStack())
    where = "score > 0.5"
    export("tidy", str(tmp_path / "cli.jsonl"), "--as", "chat", "--where", where, outputs)

    exported = run.export(tmp_path / "python.jsonl", format="chat", where=where)
    by_step = run.export(tmp_path / "atif", 1, format="atif")
    validated = run.export(tmp_path / "set", format="datasets", validation=True)

    assert (tmp_path / "python.jsonl").read_text() == (tmp_path / "cli.jsonl").read_text()
    assert (exported.format, exported.trajectories + exported.filtered) == ("chat", 8)
    assert (by_step.trajectories, validated.trajectories) == (4, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, "format: expected one of model, atif, datasets, chat, got 'csv'"),
        ({"where": "score > 1"}, "expected merge with a model, .* got format='model'"),
        ({"format": "atif", "merge": True}, "expected merge with a model, .* got format='atif'"),
    ],
)
def test_options_of_python_that_do_not_go_together_are_refused(outputs: str, tmp_path: Path, options, message) -> None:
    info = RunFolder(tmp_path / "outputs" / "tidy").info()
    with pytest.raises(UserError, match=message):
        Run(trackway.local(tmp_path / "outputs"), cast(Any, None), info, ExitStack()).export(tmp_path / "t", **options)


@pytest.mark.parametrize("kind", ["atif", "chat", "datasets"])
def test_a_target_below_a_file_is_refused_with_the_file(outputs: str, tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    for target in ("file/new", "file/folder/new"):
        with pytest.raises(TrackwayError, match=r"expected a target below a folder, got .* where .*/file is a file"):
            export("tidy", str(tmp_path / target), "--as", kind, outputs)
