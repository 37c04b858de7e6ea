"""What a user can correct is one line and exit status 2, never a traceback."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import typer
from typer.main import get_command

from trackway.deploy.cli import app
from trackway.deploy.terminal.entry import enter
from trackway.main_ppo import app as main_ppo
from trackway.run_config.compose import PRESETS


class Ended(NamedTuple):
    """The end of a command, and what it printed."""

    status: object
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def trackway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command line in an empty folder, in this process."""

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["trackway", *words])
        with pytest.raises(SystemExit) as ended:
            enter(app)
        out, err = capsys.readouterr()
        return Ended(ended.value.code, out, err)

    monkeypatch.chdir(tmp_path)
    handler, factory = signal.getsignal(signal.SIGTERM), logging.getLogRecordFactory()
    with patch.dict(os.environ):
        yield run
    signal.signal(signal.SIGTERM, handler)
    logging.setLogRecordFactory(factory)


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
def test_a_mistake_is_one_line_with_exit_status_2(words: list[str], expected: str, trackway: Run) -> None:
    ended = trackway(*words)
    assert (ended.status, len(ended.err.strip().splitlines())) == (2, 1)
    assert expected in ended.err.replace("\n", " ").replace("  ", " ")


@pytest.mark.slow
def test_a_process_ends_with_the_status_and_the_line_of_its_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trackway.deploy.cli", "status"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)

    said = "error: no services are running for outputs; start them with `trackway up`, or give --outputs\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", said)


@pytest.mark.parametrize("words", [["status", "--json"], ["status", "--json", "--typo"]])
def test_a_mistake_is_one_json_document_with_json(words: list[str], trackway: Run) -> None:
    ended = trackway(*words)

    error = json.loads(ended.out)["error"]
    assert (ended.status, error["code"]) == (2, "invalid_request")
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
        for words, command in [*commands(get_command(app)), *commands(get_command(main_ppo))]
    }

    assert len(options) >= 24 and ("runs", "logs") in options
    assert [words for words, helps in options.items() if len(helps) != 1] == []
    starts = "Print one JSON document and nothing else: "
    assert [words for words, (text,) in options.items() if not text.startswith(starts)] == []


def test_help_has_an_example_for_every_command() -> None:
    helps = {words: command.help for words, command in commands(get_command(app))}

    assert [words for words, text in helps.items() if "Example: trackway" not in " ".join(text.split())] == []


def test_a_key_is_explained_with_what_a_preset_says_of_it(trackway: Run) -> None:
    told = trackway("config", "explain", "data.train_batch_size", "--config-name", "tiny_demo").out

    assert [" ".join(line.split()) for line in told.splitlines()] == [
        "",
        "key data.train_batch_size",
        "default 1024",
        "meaning Prompts per step, each with `rollout.n` rollouts.",
        "source verl's; 12 in tiny_demo",
    ]


def test_a_dry_run_without_running_services_plans_those_that_it_would_start(trackway: Run) -> None:
    words = ["data.train_files=nowhere.parquet", "actor_rollout_ref.model.path=Some/Model"]
    told = trackway("train", "--dry-run", "trainer.total_training_steps=7", *words)

    assert told.status == 2  # the rows lead nowhere
    assert {"steps 7 in all", "rollout engine torch; replicas as in the Serve config"} <= {
        " ".join(line.split()) for line in told.out.splitlines()
    }


@pytest.mark.parametrize("command", ["train", "try"])
def test_the_help_names_every_preset(command: str) -> None:
    [option] = [p for p in get_command(app).commands[command].params if p.name == "config_name"]  # pyright: ignore[reportAttributeAccessIssue]

    named = re.findall(r"\w+(?=[,;.])", option.help)
    assert sorted(named) == sorted(preset.stem for preset in PRESETS.glob("*.yaml"))
