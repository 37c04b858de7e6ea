"""`trackway export --as atif | datasets | chat`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.console.example_run import write_run
from trackway.deploy.cli import app
from trackway.system.user_error import UserError


def export(*words: str) -> str:
    result = CliRunner().invoke(app, ["export", *words], catch_exceptions=False)
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
    ("words", "message"),
    [
        (["tidy", "t", "--where", "score > 1"], "expected --as atif, datasets or chat beside --where and --validation"),
        (["tidy", "t", "--as", "chat", "--merge"], "expected --as model beside --merge, got trajectories"),
        (
            ["./t", "t", "--as", "chat", "--step", "1"],
            "expected --step and --validation beside a run, got the files ./t",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(outputs: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        export(*words, outputs)
