"""The recipes of Tinker's cookbook, unmodified and offline, against a trainer service whose runs are real.

Folders in the working directory shadow the names of the hub. The model is the tiny one, taught here to answer with a
boxed digit at random, since the RL recipe rewards no other form.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serving import served_in_thread
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.app import create_app as rollout_app
from trackway.rollout.settings import RolloutSettings
from trackway.trainer.app import create_app as trainer_app
from trackway.trainer.settings import TrainerSettings
from trackway.wire.weights import policy_url

pytestmark = [pytest.mark.agents, pytest.mark.timeout(900)]

MODEL, TEACHER = "Qwen/Qwen3-8B", "teacher"
DIGITS = "1234"
RIGHT = "3"
"""Answer of every row."""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (
    f"<|im_start|>user\nHow many r's are in strawberry?{SUFFIX}<|im_end|>\n<|im_start|>assistant\n"
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have "
    "r's at positions 3, 8, and 9. \\boxed{3}<|im_end|>\n"
)
"""Beginning of each prompt of the RL recipe."""


def teach(folder: Path, before: str, digits: str) -> None:
    """Write the tiny model, taught to answer a question after `before` with one of the digits, boxed."""
    tokenizer, model = AutoTokenizer.from_pretrained(TINY_MODEL), AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    draw, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = torch.zeros(())
        for row in rows(draw, 8):
            question = f"<|im_start|>user\n{row['question']}{SUFFIX}<|im_end|>\n<|im_start|>assistant\n"
            prompt = tokenizer.encode(before + question)
            answer = tokenizer.encode(f"\\boxed{{{draw.choice(digits)}}}<|im_end|>")
            ids = torch.tensor([prompt + answer])
            labels = torch.tensor([[-100] * len(prompt) + answer])
            loss = loss + model(input_ids=ids, labels=labels).loss / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shutil.copytree(TINY_MODEL, folder)
    model.save_pretrained(folder)


def rows(draw: random.Random, count: int) -> list[dict[str, Any]]:
    questions = [f"{draw.randint(2, 9)}+{draw.randint(2, 9)}?" for _ in range(count)]
    return [{"question": question, "answer": f"#### {RIGHT}"} for question in questions]


def write_dataset(folder: Path, config: str, records: list[dict[str, Any]]) -> None:
    (folder / config).mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(records), folder / config / f"{split}.parquet")
    splits = "".join(f"  - split: {split}\n    path: {config}/{split}.parquet\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{splits}---\n")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cookbook and what it imports beside our environment."""
    folder = tmp_path_factory.mktemp("cookbook")
    wanted = Path(__file__).with_name("cookbook.txt")
    install = ["--quiet", "--no-deps", "--require-hashes", "--target", str(folder), "--requirement", str(wanted)]
    subprocess.run([Path(sys.executable).with_name("uv"), "pip", "install", *install], check=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the model and the datasets under their names on the hub."""
    folder, draw = tmp_path_factory.mktemp("work"), random.Random(1)
    torch.manual_seed(0)
    teach(folder / MODEL, EXAMPLE, DIGITS)
    teach(folder / TEACHER, "", RIGHT)
    problems = rows(draw, 512)
    write_dataset(folder / "openai/gsm8k", "main", problems)
    chats = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": f"\\boxed{{{RIGHT}}}"},
            ]
        }
        for row in problems
    ]
    for name in ("HuggingFaceH4/no_robots", "allenai/tulu-3-sft-mixture"):
        write_dataset(folder / name, "default", chats)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    outputs = tmp_path_factory.mktemp("outputs")
    store = str(outputs / "weights")
    WeightStore(policy_url(store, TEACHER)).publish(1, TEACHER, folder / TEACHER, ANY_PROOF)
    rollout = rollout_app(RolloutSettings(model_path=folder / MODEL, weights_url=store, device="cpu"))
    with served_in_thread(rollout) as rollout_url:
        settings = TrainerSettings(outputs_dir=str(outputs), weights_url=store, rollout_url=rollout_url, max_runs=3)
        with served_in_thread(trainer_app(settings)) as trainer_url:
            yield trainer_url


def metrics_of(recipe: str, url: str, folder: Path, packages: Path, **keys: object) -> list[dict[str, Any]]:
    """Run a recipe. Returns the rows of its metrics."""
    log = folder / recipe
    own = {
        "TINKER_API_KEY": "tml-any",
        "PYTHONPATH": str(packages),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
    }
    words = {"base_url": url, "model_name": MODEL, "log_path": log, "save_every": 0, **keys}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *(f"{k}={v}" for k, v in words.items())]
    done = subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_the_supervised_recipe_lowers_its_loss(url: str, folder: Path, packages: Path) -> None:
    found = metrics_of("sl_loop", url, folder, packages, batch_size=32, learning_rate=5e-3)

    losses = [row["train_mean_nll"] for row in found]
    assert len(losses) == 16 and losses[-1] < losses[0] / 2


def test_the_rl_recipe_raises_its_reward(url: str, folder: Path, packages: Path) -> None:
    sizes = {"batch_size": 8, "group_size": 8, "max_tokens": 24, "max_steps": 10}
    found = metrics_of("rl_loop", url, folder, packages, loss_fn="importance_sampling", learning_rate=5e-3, **sizes)

    rewards = [row["reward/total"] for row in found]
    assert len(rewards) == 10 and sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.3


def test_the_distillation_recipe_comes_near_its_teacher(url: str, folder: Path, packages: Path) -> None:
    sizes = {"groups_per_batch": 8, "group_size": 4, "max_tokens": 24, "max_steps": 10, "lora_rank": 32}
    words = {"teacher_model": TEACHER, "dataset": "tulu3", "learning_rate": 5e-3, "eval_every": 0, **sizes}
    found = metrics_of("distillation.on_policy_distillation", url, folder, packages, **words)

    distances = [row["teacher_kl"] for row in found]
    assert len(distances) == 10 and distances[-1] < distances[0] / 2
