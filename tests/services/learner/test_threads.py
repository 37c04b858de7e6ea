"""A learner and an embedded engine compute with as many CPU threads as their model is worth."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.learner import Learner
from trackway.learner.ranks.sharding import Ranks
from trackway.system.process import usable_cores


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """The suite's number of threads, back after each test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def larger_model(tmp_path: Path) -> Path:
    """A random model of 3 million parameters."""
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=20_000, hidden_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
        )
    ).save_pretrained(tmp_path)
    return tmp_path


def test_a_learner_computes_with_as_many_threads_as_its_model_is_worth(tiny_model: Path, larger_model: Path):
    for config, threads in [
        (learner_config(tiny_model), 1),
        (learner_config(larger_model), usable_cores()),
        (replace(learner_config(tiny_model), threads=3), 3),
    ]:
        learner = Learner(config)
        assert (learner.threads, torch.get_num_threads()) == (threads, threads)


def test_the_ranks_of_a_node_share_its_cores_and_those_of_other_nodes_have_their_own(
    larger_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trackway.learner.learner.usable_cores", lambda: 8)
    ranks = Ranks(per_node=2)
    ranks.count = 4

    assert Learner(learner_config(larger_model), ranks).threads == 4
