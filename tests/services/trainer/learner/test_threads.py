"""How many CPU threads a learner computes with."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.services.trainer.learner_settings import learner_config
from trackway.trainer.learner.learner import Learner
from trackway.trainer.learner.threads import choose_threads, usable_cores

BOUND = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """The suite's number of threads, back after each test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("parameters", "cores", "engine_threads", "threads"),
    [
        (1_999_999, 8, 0, 1),
        (2_000_000, 8, 0, 8),
        (2_000_000, 8, 1, 7),
        (2_000_000, 2, 1, 1),
        (2_000_000, 1, 1, 1),
    ],
)
def test_a_large_model_takes_the_cores_that_the_engine_leaves(
    parameters: int, cores: int, engine_threads: int, threads: int
):
    assert choose_threads(parameters, cores, engine_threads) == threads


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", BOUND), (f"{(BOUND + 1) * 100000} 100000", BOUND), ("150000 100000", 1), ("50000 100000", 1)],
)
def test_a_containers_limit_counts_in_whole_cores(tmp_path: Path, quota: str, cores: int):
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    assert usable_cores(file) == cores
    assert usable_cores(tmp_path / "none") == BOUND


def test_a_learner_computes_with_as_many_threads_as_its_model_is_worth(tiny_model: Path, tmp_path: Path):
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=20_000, hidden_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
        )
    ).save_pretrained(tmp_path)
    for config, threads in [
        (learner_config(tiny_model), 1),
        (learner_config(tmp_path), usable_cores()),
        (replace(learner_config(tiny_model), threads=3), 3),
    ]:
        learner = Learner(config)
        assert (learner.threads, torch.get_num_threads()) == (threads, threads)
