"""Where weights and moments are at each moment of a learner's work, and that being away changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from trackway.trainer.learner.learner import Learner, LearnerConfig
from trackway.trainer.learner.offload import CpuOffload
from trackway.trainer.learner.optimizer import state_tensors
from trackway.wire.trajectory import Trajectory

Rollout = Callable[..., Trajectory]
AWAY = {"param_offload": True, "optimizer_offload": True, "ref_param_offload": True}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pairs(rollout: Rollout) -> list[Trajectory]:
    return [
        rollout(0, 0, 1.0),
        rollout(0, 1, 0.0),
        rollout(1, 0, 0.0, response_ids=[1, 2, 3, 4, 5, 6]),
        rollout(1, 1, 1.0),
    ]


@pytest.fixture
def config(tiny_model: Path) -> LearnerConfig:
    return LearnerConfig(
        str(tiny_model), dtype="float64", lr=1e-2, use_kl_loss=True, mini_batch_size=2, recompute_old_logprobs=True
    )


def test_an_offloaded_learner_computes_what_one_at_hand_does(config: LearnerConfig, rollout: Rollout, tmp_path: Path):
    at_hand, away = Learner(config), Learner(replace(config, **AWAY))
    expected = [at_hand.update(pairs(rollout)).metrics for _ in range(2)]

    first = away.update(pairs(rollout)).metrics
    away.save(tmp_path)
    resumed = Learner(replace(config, **AWAY))
    resumed.load(tmp_path)
    second = resumed.update(pairs(rollout)).metrics

    assert [first, second] == [pytest.approx(one, abs=1e-12) for one in expected]
    assert resumed.canary() == at_hand.canary()


@pytest.mark.parametrize("kind", ["low_var_kl", "full"])
def test_each_part_is_at_hand_only_while_it_is_computed_with(config: LearnerConfig, rollout: Rollout, kind: str):
    learner = Learner(replace(config, **AWAY, kl_loss_type=kind))
    assert learner.reference is not None
    policy, reference, moments = learner.policy.residence, learner.reference.residence, learner.moments
    seen: set[tuple[str, bool, bool, bool]] = set()

    def note(what: str) -> Callable[..., None]:
        return lambda *_: seen.add((what, policy.here, reference.here, moments.here))

    learner.policy.model.register_forward_pre_hook(note("policy"))
    learner.reference.model.register_forward_pre_hook(note("reference"))
    learner.policy.model.get_output_embeddings().register_full_backward_hook(note("backward"))
    learner.optimizer.register_step_pre_hook(note("step"))
    before = (policy.here, reference.here, moments.here)

    learner.update(pairs(rollout))
    learner.canary()

    full = kind == "full"
    assert seen == {
        ("policy", True, False, False),
        *({("policy", True, True, False)} if full else set()),
        ("reference", full, True, False),
        ("backward", True, full, False),
        ("step", True, full, True),
    }
    assert before == (policy.here, reference.here, moments.here) == (False, False, False)


def test_without_offload_everything_stays_and_on_a_cpu_nothing_moves(config: LearnerConfig, rollout: Rollout):
    learner, away = Learner(config), Learner(replace(config, **AWAY))
    before = [p.data_ptr() for p in away.policy.model.parameters()]

    for one in (learner, away):
        one.update(pairs(rollout))

    assert learner.reference is not None
    assert learner.policy.residence.here and learner.reference.residence.here and learner.moments.here
    assert [p.data_ptr() for p in away.policy.model.parameters()] == before


def test_a_residence_opened_twice_is_left_once():
    residence = CpuOffload(list, CPU, offload=True)

    with residence.at_hand():
        with residence.at_hand():
            pass
        assert residence.here
    assert not residence.here


def test_a_residence_is_left_when_the_work_inside_fails():
    residence = CpuOffload(list, CPU, offload=True)

    with pytest.raises(ZeroDivisionError), residence.at_hand():
        _ = 1 / 0

    assert not residence.here


@dataclass
class Data:
    """A tensor's data as far as moving is concerned, on a machine with a GPU."""

    device: torch.device

    def to(self, device: torch.device) -> "Data":
        return self if device == self.device else Data(device)


@dataclass
class Holder:
    data: Data


def test_data_moves_to_a_gpu_and_back_and_what_is_frozen_is_not_copied_back():
    trained, frozen = ([Holder(Data(CPU)), Holder(Data(CPU))] for _ in range(2))
    originals = [one.data for one in frozen]
    of_trained = CpuOffload(lambda: trained, CUDA, offload=True)  # pyright: ignore[reportArgumentType]
    of_frozen = CpuOffload(lambda: frozen, CUDA, offload=True, frozen=True)  # pyright: ignore[reportArgumentType]

    with of_trained.at_hand(), of_frozen.at_hand():
        there = [one.data.device for one in (*trained, *frozen)]
        trained.append(Holder(Data(CUDA)))  # as an optimizer does at its first step

    assert there == [CUDA] * 4
    assert [one.data.device for one in (*trained, *frozen)] == [CPU] * 5
    assert all(one.data is original for one, original in zip(frozen, originals, strict=True))


def test_what_is_not_offloaded_is_brought_once_and_stays():
    holders = [Holder(Data(CPU))]
    residence = CpuOffload(lambda: holders, CUDA)  # pyright: ignore[reportArgumentType]

    with residence.at_hand():
        moved = holders[0].data
    with residence.at_hand():
        pass

    assert moved.device == CUDA
    assert holders[0].data is moved


def devices(learner: Learner) -> tuple[set[str], set[str]]:
    """Of the weights, and of AdamW's state."""
    weights = {one.device.type for one in learner.policy.model.parameters()}
    return weights, {one.device.type for one in state_tensors(learner.optimizer)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_weights_and_moments_are_there_only_during_the_work(config: LearnerConfig, rollout: Rollout):
    learner = Learner(replace(config, **AWAY, device="cuda"))
    during: list[tuple[set[str], set[str]]] = []
    learner.optimizer.register_step_post_hook(lambda *_: during.append(devices(learner)))

    metrics = learner.update(pairs(rollout)).metrics

    assert during == [({"cuda"}, {"cuda"})] * 2
    assert devices(learner) == ({"cpu"}, {"cpu"})
    assert metrics == pytest.approx(Learner(config).update(pairs(rollout)).metrics, abs=1e-6)
