"""Where weights and moments are during a learner's work, and that offloading changes no result."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from trackway.learner.config import LearnerConfig
from trackway.learner.learner import Learner
from trackway.learner.optimizer import state_tensors
from trackway.learner.policy import Policy
from trackway.learner.weights import offload
from trackway.learner.weights.offload import CpuOffload
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]
Config = Callable[..., LearnerConfig]
AWAY = {"param_offload": True, "optimizer_offload": True, "ref_param_offload": True}
LOAD = CpuOffload._load  # pyright: ignore[reportPrivateUsage]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pairs(rollout: Rollout) -> list[Trajectory]:
    return [
        rollout(0, 0, 1.0),
        rollout(0, 1, 0.0),
        rollout(1, 0, 0.0, response_ids=[1, 2, 3, 4, 5, 6]),
        rollout(1, 1, 1.0),
    ]


@pytest.fixture
def config(tiny_model: Path) -> Config:
    settings = {"lr": 1e-2, "use_kl_loss": True, "mini_batch_size": 2, "bypass_mode": False}
    return partial(learner_config, tiny_model, dtype="float64", **settings)


def test_an_offloaded_learner_computes_the_same_as_one_without_offload(
    config: Config, rollout: Rollout, tmp_path: Path
):
    resident, away = Learner(config()), Learner(config(**AWAY))
    expected = [resident.update(pairs(rollout)).metrics for _ in range(2)]

    first = away.update(pairs(rollout)).metrics
    away.save(tmp_path)
    resumed = Learner(config(**AWAY))
    resumed.load(tmp_path)
    second = resumed.update(pairs(rollout)).metrics

    assert [first, second] == [pytest.approx(metrics, abs=1e-12) for metrics in expected]
    assert logprobs_of(resumed) == logprobs_of(resident)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_new_learner_and_its_checkpoint_bring_no_offloaded_weights_to_the_device(
    config: Config, tmp_path: Path, lora_rank: int
):
    critic = {"algorithm.adv_estimator": "gae", "critic.fsdp.param_offload": True}
    with patch.object(CpuOffload, "_load") as loaded:
        learner = Learner(config(**AWAY, **critic, lora_rank=lora_rank))
        begun = loaded.call_count
        learner.save(tmp_path)

    assert begun == (1 if lora_rank else 0)  # the adapter's base model is scored once, while engines sleep
    assert loaded.call_count == begun


@pytest.mark.parametrize(
    ("settings", "trips"),
    [
        ({"bypass_mode": True}, [1, 1, 2]),
        ({"bypass_mode": False}, [1, 1, 2]),
        ({"bypass_mode": False, "use_kl_loss": True, "lora_rank": 2}, [1, 1, 2]),
        ({"bypass_mode": False, "algorithm.adv_estimator": "gae"}, [2, 2, 4]),  # a value model needs the memory between
    ],
)
def test_offloaded_weights_make_one_trip_from_an_update_to_the_end_of_its_publication(
    tiny_model: Path, rollout: Rollout, tmp_path: Path, settings: dict[str, object], trips: list[int]
):
    learner = Learner(learner_config(tiny_model, param_offload=True, mini_batch_size=2, **settings))
    counts = list[int]()
    with patch.object(CpuOffload, "_load", autospec=True, side_effect=LOAD) as loaded:
        learner.update(pairs(rollout))
        counts.append(_trips(learner, loaded))
        learner.export_to_engines(tmp_path)
        learner.proof(tmp_path, 1)
        counts.append(_trips(learner, loaded))
        assert learner.policy.cpu_offload.is_on_device
        learner.release_memory()
        assert not learner.policy.cpu_offload.is_on_device
        learner.update(pairs(rollout))
        counts.append(_trips(learner, loaded))

    assert counts == trips


def _trips(learner: Learner, loaded: Mock) -> int:
    return sum(call.args[0] is learner.policy.cpu_offload for call in loaded.call_args_list)


@pytest.mark.parametrize("kind", ["low_var_kl", "full"])
def test_each_part_is_on_the_device_only_while_it_is_computed_with(config: Config, rollout: Rollout, kind: str):
    learner = Learner(config(**AWAY, kl_loss_type=kind))
    assert isinstance(learner.reference, Policy)
    policy, reference = learner.policy.cpu_offload, learner.reference.cpu_offload
    moments = learner.moments
    seen: set[tuple[str, bool, bool, bool]] = set()

    def note(what: str) -> Callable[..., None]:
        return lambda *_: seen.add((what, policy.is_on_device, reference.is_on_device, moments.is_on_device))

    learner.policy.model.register_forward_pre_hook(note("policy"))
    learner.reference.model.register_forward_pre_hook(note("reference"))
    learner.policy.model.get_output_embeddings().register_full_backward_hook(note("backward"))
    learner.optimizer.register_step_pre_hook(note("step"))
    before = (policy.is_on_device, reference.is_on_device, moments.is_on_device)

    learner.update(pairs(rollout))
    learner.release_memory()
    logprobs_of(learner)

    full = kind == "full"
    assert seen == {
        ("policy", True, False, False),
        *({("policy", True, True, False)} if full else set()),
        ("reference", True, True, False),
        ("backward", True, full, False),
        ("step", True, full, True),
    }
    assert before == (policy.is_on_device, reference.is_on_device, moments.is_on_device) == (False, False, False)


@pytest.mark.parametrize(
    ("key", "away"),
    [
        ("param_offload", {"policy"}),
        ("optimizer_offload", {"moments"}),
        ("offload_policy", {"policy", "moments"}),
        ("ref_param_offload", {"reference"}),
        ("critic.fsdp.param_offload", {"critic"}),
        ("critic.fsdp.optimizer_offload", {"moments of the critic"}),
        ("critic.fsdp.offload_policy", {"critic", "moments of the critic"}),
    ],
)
def test_a_key_offloads_its_own_part_alone(config: Config, key: str, away: set[str]):
    learner = Learner(config(**{"algorithm.adv_estimator": "gae", key: True}))
    assert isinstance(learner.reference, Policy) and learner.critic is not None
    parts = {
        **{"policy": learner.policy.cpu_offload, "moments": learner.moments},
        "reference": learner.reference.cpu_offload,
        **{"critic": learner.critic.model.cpu_offload, "moments of the critic": learner.critic.moments},
    }

    assert {name for name, part in parts.items() if not part.is_on_device} == away


def test_without_offload_everything_stays_and_on_a_cpu_nothing_moves(config: Config, rollout: Rollout):
    learner, away = Learner(config()), Learner(config(**AWAY))
    before = [p.data_ptr() for p in away.policy.model.parameters()]

    for trained in (learner, away):
        trained.update(pairs(rollout))

    assert isinstance(learner.reference, Policy)
    assert learner.policy.cpu_offload.is_on_device and learner.reference.cpu_offload.is_on_device
    assert learner.moments.is_on_device
    assert [p.data_ptr() for p in away.policy.model.parameters()] == before


def test_nested_contexts_offload_only_at_the_outer_end():
    cpu_offload = CpuOffload(list, CPU, offload=True)

    with cpu_offload.on_device():
        with cpu_offload.on_device():
            pass
        assert cpu_offload.is_on_device
    assert not cpu_offload.is_on_device


def test_tensors_are_offloaded_when_the_work_inside_fails():
    cpu_offload = CpuOffload(list, CPU, offload=True)

    with pytest.raises(ZeroDivisionError), cpu_offload.on_device():
        _ = 1 / 0

    assert not cpu_offload.is_on_device


@dataclass
class Data:
    """A tensor's data as far as moving is concerned, on a machine with a GPU."""

    device: torch.device
    value: int = 0
    copies: int = 0
    """How often it was written to."""

    def to(self, device: torch.device, *, non_blocking: bool) -> "Data":
        return self if device == self.device else Data(device, self.value)

    def copy_(self, other: "Data", *, non_blocking: bool) -> None:
        self.value, self.copies = other.value, self.copies + 1


@dataclass(eq=False)
class Holder:
    data: Data


def test_data_moves_to_a_gpu_and_back_to_pinned_copies_that_are_kept(monkeypatch: pytest.MonkeyPatch):
    pinned = list[Data]()
    monkeypatch.setattr(offload, "pinned_like", lambda data: pinned.append(Data(CPU)) or pinned[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    trained, frozen = ([Holder(Data(CPU, 1)), Holder(Data(CPU, 2))] for _ in range(2))
    of_trained = CpuOffload(lambda: trained, CUDA, offload=True)  # pyright: ignore[reportArgumentType]
    of_frozen = CpuOffload(lambda: frozen, CUDA, offload=True, frozen=True)  # pyright: ignore[reportArgumentType]

    there = list[torch.device]()
    for step in range(3):
        with of_trained.on_device(), of_frozen.on_device():
            there = [holder.data.device for holder in (*trained, *frozen)]
            for holder in trained:
                holder.data.value += 10
            if not step:
                trained.append(Holder(Data(CUDA)))  # as an optimizer does at its first step

    assert there == [CUDA] * 5
    assert {id(holder.data) for holder in (*trained, *frozen)} == {id(data) for data in pinned}
    assert [(holder.data.value, holder.data.copies) for holder in trained] == [(31, 3), (32, 3), (20, 3)]
    assert [(holder.data.value, holder.data.copies) for holder in frozen] == [(1, 1), (2, 1)]


def test_what_is_not_offloaded_is_brought_once_and_stays():
    holders = [Holder(Data(CPU))]
    cpu_offload = CpuOffload(lambda: holders, CUDA)  # pyright: ignore[reportArgumentType]

    with cpu_offload.on_device():
        moved = holders[0].data
    with cpu_offload.on_device():
        pass

    assert moved.device == CUDA
    assert holders[0].data is moved


def devices(learner: Learner) -> tuple[set[str], set[str]]:
    """Of the weights, and of AdamW's state."""
    weights = {tensor.device.type for tensor in learner.policy.model.parameters()}
    return weights, {tensor.device.type for tensor in state_tensors(learner.optimizer)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_weights_and_moments_are_there_only_during_the_work(config: Config, rollout: Rollout):
    learner = Learner(config(**AWAY, device="cuda"))
    during: list[tuple[set[str], set[str]]] = []
    learner.optimizer.register_step_post_hook(lambda *_: during.append(devices(learner)))

    metrics = learner.update(pairs(rollout)).metrics
    learner.release_memory()

    assert during == [({"cuda"}, {"cuda"})] * 2
    assert devices(learner) == ({"cpu"}, {"cpu"})
    assert metrics == pytest.approx(Learner(config()).update(pairs(rollout)).metrics, abs=1e-6)
