"""`python -m trackway.main_sft` up to where something would start: plan and problems of supervised training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.services.trainer.sft_rows import write_conversations
from trackway.deploy.bundled import TINY_MODEL
from trackway.main_sft import app
from trackway.system.process import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKWAY_UP_MIN_MEMORY_GB", "0.001")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(folder: Path, *overrides: str) -> dict:
    """The plan of a preflight, as JSON."""
    train = write_conversations(folder / "train.jsonl", 40)
    held_out = write_conversations(folder / "val.jsonl", 8, "test")
    words = ["--config-name=sft", "--preflight", "--json", "--outputs", str(folder / "outputs")]
    words += [f"model.path={TINY_MODEL}", f"data.train_files={train}", f"data.val_files={held_out}"]
    result = CliRunner().invoke(app, [*words, "data.train_batch_size=16", *overrides])
    assert result.exception is None or isinstance(result.exception, SystemExit | UserError), result.exception
    return json.loads(result.stdout)


def test_a_plan_counts_rows_and_steps_and_asks_no_service(tmp_path: Path):
    planned = plan(tmp_path, "trainer.test_freq=after_each_epoch", "trainer.save_freq=4")

    assert (planned["wrong"], planned["rows"]) == ([], "40")
    counted = {name: planned["plan"][name] for name in ("steps_per_epoch", "total_steps", "updates", "mini_batch")}
    assert counted == {"steps_per_epoch": 2, "total_steps": 8, "updates": 1, "mini_batch": 16}
    assert (planned["plan"]["validations"], planned["plan"]["checkpoints"]) == ([2, 4, 6, 8], [4, 8])


@pytest.mark.parametrize(
    ("word", "part", "said"),
    [
        ("data.max_length=20", "wrong", "data.train_files: expected rows of at most data.max_length=20 tokens, got 40"),
        ("data.messages_key=talk", "wrong", "train.jsonl:1: expected the column talk (data.messages_key), got messag"),
        ("data.train_batch_size=41", "wrong", "expected at least data.train_batch_size=41 rows, got 40; lower it"),
        ("data.val_files=/nowhere.jsonl", "not_found", "data.val_files: expected a dataset file at /nowhere.jsonl"),
    ],
)
def test_rows_that_cannot_be_trained_are_found_before_anything_starts(tmp_path: Path, word: str, part: str, said: str):
    assert [problem for problem in plan(tmp_path, word)[part] if said in problem]


def test_verls_command_takes_the_preset_of_supervised_training_by_itself(tmp_path: Path):
    rows = write_conversations(tmp_path / "train.jsonl", 40)
    words = [f"model.path={TINY_MODEL}", f"data.train_files={rows}", "data.train_batch_size=16", "optim.lr=1e-4"]

    command = [sys.executable, "-m", "trackway.main_sft", *words, "--cfg", "job", "--json"]
    printed = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)

    assert printed["trackway"]["rollouts_from"] == "rows" and printed["trainer"]["total_epochs"] == 4
    assert printed["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-4
