"""`fsdp_config.full_determinism`: deterministic kernels, and generators that begin at `fsdp_config.seed`."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.learner import Learner

FSDP = "actor_rollout_ref.actor.fsdp_config"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores what a learner changes in its process."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("section", [FSDP, "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"])
def test_one_of_the_models_makes_the_process_deterministic(tiny_model: Path, section: str):
    draws = []
    for seed in (7, 7, 8):
        Learner(learner_config(tiny_model, **{f"{section}.full_determinism": True, f"{FSDP}.seed": seed}))
        draws.append(drawn())

    assert draws[0] == draws[1]
    assert all(ours != theirs for ours, theirs in zip(draws[0], draws[2], strict=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("process")
def test_without_it_a_learner_leaves_its_process_as_it_was(tiny_model: Path):
    state = torch.get_rng_state()
    Learner(learner_config(tiny_model, **{f"{FSDP}.seed": 7}))

    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
