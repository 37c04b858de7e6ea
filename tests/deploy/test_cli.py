"""What a user can correct is one line and exit status 2, never a traceback."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from trackway.deploy.cli import app
from trackway.deploy.commands import main_ppo
from trackway.trainer.config.compose import PRESETS


def trackway(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trackway.deploy.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["status"], "no services are running for outputs; start them with `trackway up`"),
        (["train", "data.trian_batch_size=4"], "unknown key 'data.trian_batch_size'"),
        (["config", "explain", "data.trian_batch_size"], "unknown key 'data.trian_batch_size': did you mean"),
        (["train", "--config", "nowhere.yaml"], "--config: expected a folder or a YAML file, got nowhere.yaml"),
        (["up", "--model-path", "nowhere"], "model not found: nowhere/config.json"),
        (["up", "--config", "nowhere.yaml"], "Ray Serve config not found: nowhere.yaml"),
        (["traces", "list"], "no MLflow database in outputs"),
        (["ui"], "no MLflow database in outputs"),
        (["attach", "--base-url", "here"], "--base-url: expected an address like http://127.0.0.1:8000, got 'here'"),
        (["demo", "--attached"], "expected outputs to be attached to running services, got no attachment"),
        (["demo", "--wait", "9"], "--data-dir and --wait: expected --attached with them"),
        (["data", "gsm8k", "--local-dataset-path", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_with_exit_status_2(words: list[str], expected: str, tmp_path: Path) -> None:
    result = trackway(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert expected in result.stderr.replace("\n", " ").replace("  ", " ")
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [["status", "--json"], ["status", "--json", "--typo"]])
def test_a_mistake_is_one_json_document_with_json(words: list[str], tmp_path: Path) -> None:
    result = trackway(*words, cwd=tmp_path)

    error = json.loads(result.stdout)["error"]
    assert (result.returncode, error["code"]) == (2, "invalid_request")
    assert error["message"].startswith(("no services are running for outputs", "No such option: --typo"))


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below this one, with its words."""
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    context = typer.Context(command)
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), (*path, name))


def test_every_command_has_json_and_says_what_is_in_it() -> None:
    options = {
        words: [parameter.help for parameter in command.params if "--json" in parameter.opts]
        for words, command in [*commands(get_command(app)), *commands(get_command(main_ppo.app))]
    }

    assert len(options) >= 24 and ("runs", "logs") in options
    assert [words for words, helps in options.items() if len(helps) != 1] == []
    starts = "Print one JSON document and nothing else: "
    assert [words for words, (text,) in options.items() if not text.startswith(starts)] == []


@pytest.mark.slow
def test_help_has_an_example_for_every_command(tmp_path: Path) -> None:
    for command in (
        ["up"],
        ["attach"],
        ["down"],
        ["status"],
        ["scale"],
        ["train"],
        ["demo"],
        ["ui"],
        ["clean"],
        ["serve"],
        ["runs", "list"],
        ["traces", "list"],
        ["config", "explain"],
    ):
        result = trackway(*command, "--help", cwd=tmp_path)
        assert (result.returncode, "Example: trackway" in " ".join(result.stdout.split())) == (0, True), command


@pytest.mark.slow
def test_a_key_is_explained_with_what_a_preset_says_of_it(tmp_path: Path) -> None:
    told = trackway("config", "explain", "data.train_batch_size", "--config-name", "tiny_demo", cwd=tmp_path).stdout

    assert [" ".join(line.split()) for line in told.splitlines()] == [
        "",
        "key data.train_batch_size",
        "default 1024",
        "meaning Prompts per step, each with `rollout.n` rollouts.",
        "source verl's; 12 in tiny_demo",
    ]


@pytest.mark.slow
def test_a_dry_run_without_running_services_plans_those_that_it_would_start(tmp_path: Path) -> None:
    words = ["data.train_files=nowhere.parquet", "actor_rollout_ref.model.path=Some/Model"]
    told = trackway("train", "--dry-run", "trainer.total_training_steps=7", *words, cwd=tmp_path)

    assert told.returncode == 0, told.stderr
    assert {"steps 7 in all", "rollout engine torch; replicas as in the Serve config"} <= {
        " ".join(line.split()) for line in told.stdout.splitlines()
    }


@pytest.mark.parametrize("command", ["train", "try"])
def test_the_help_names_every_preset(command: str) -> None:
    [option] = [p for p in get_command(app).commands[command].params if p.name == "config_name"]  # pyright: ignore[reportAttributeAccessIssue]

    named = re.findall(r"\w+(?=[,;.])", option.help)
    assert sorted(named) == sorted(preset.stem for preset in PRESETS.glob("*.yaml"))
