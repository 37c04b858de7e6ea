"""Which GPUs Ray shows to actors, on a machine that is said to have three, of which one is hidden from Ray."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from trackway.deploy.config.serve_config import VISIBLE, on_own_gpus

pytestmark = pytest.mark.extended


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VISIBLE, "0,1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("two_gpus")
def test_a_deployments_own_gpu_is_neither_the_trainers_nor_given_to_another():
    class Replica:
        def gpus(self) -> str | None:
            return os.environ.get(VISIBLE)

    options = [{"num_gpus": 0}, on_own_gpus(["2"]), {"num_gpus": 1}, {"num_gpus": 1}]
    actor = ray.remote(num_cpus=0.1)(Replica)
    replicas: list[Any] = [actor.options(**option).remote() for option in options]
    trainer, reward_model, *rollout = ray.get([replica.gpus.remote() for replica in replicas])

    assert (trainer, reward_model, sorted(rollout)) == ("0,1", "2", ["0", "1"])
