"""What a run needs before its first step so that engines can take its weights from GPU memory."""

from typing import cast

import pytest
import torch

from trackway.clients import RolloutClient
from trackway.clients.weights import WeightStore
from trackway.learner.learner import Learner
from trackway.trainer.loop import weight_publisher
from trackway.trainer.loop.weight_publisher import require_takers, sender_of
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SleepReplies, SleepReply, WeightsReply
from trackway.wire.weights import TransportName

pytestmark = pytest.mark.anyio


def services(weights_url: str = "/weights", rollout_url: str | None = "http://rollout") -> ServiceUrls:
    return ServiceUrls(agent_url="", tools_url="", weights_url=weights_url, rollout_url=rollout_url)


async def refusal(where: ServiceUrls) -> str:
    with pytest.raises(TrackwayError) as raised:
        await require_takers("ipc", where)
    assert raised.value.code is ErrorCode.INVALID_REQUEST
    return raised.value.message


async def test_the_store_needs_nothing() -> None:
    await require_takers("store", services("memory://x", None))
    assert sender_of("store", WeightStore("memory://x"), cast(Learner, None)) is None


async def test_a_machine_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert await refusal(services()) == (
        "trackway.weights_transport=ipc: expected a learner on a GPU, got no CUDA; set that up, or leave the key out "
        "(weights_transport=store)"
    )


@pytest.mark.parametrize(
    ("where", "takes", "said"),
    [
        (services("memory://x"), "ipc", "expected a weight store in a folder of this machine, got memory://x"),
        (services(rollout_url=None), "ipc", "expected a rollout service to take them, got no URL of one"),
        (
            services(),
            "store",
            "expected a rollout service with engine: vllm and weights_transport: ipc, got weights",
        ),
    ],
)
async def test_services_that_cannot_take_weights_are_named(
    monkeypatch: pytest.MonkeyPatch, where: ServiceUrls, takes: TransportName, said: str
) -> None:
    answers(monkeypatch, takes)
    assert said in await refusal(where)


async def test_services_that_take_them_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "ipc")
    await require_takers("ipc", services())


async def test_several_replicas_are_refused_as_one_alone_shares_the_learners_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(monkeypatch, "ipc", replicas=2)
    assert "expected one rollout replica, on the learner's GPU, got 2; set that up" in await refusal(services())


def answers(monkeypatch: pytest.MonkeyPatch, takes: TransportName, replicas: int = 1) -> None:
    """On a machine with CUDA: what the rollout service says of itself."""

    async def weights(client: RolloutClient) -> WeightsReply:
        return WeightsReply(version=0, latest=0, model="policy", replica="r", transport=takes)

    async def sleeping(client: RolloutClient) -> SleepReplies:
        return SleepReplies(replicas=[SleepReply(is_sleeping=False, replica=str(n)) for n in range(replicas)])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(weight_publisher.RolloutClient, "weights", weights)
    monkeypatch.setattr(weight_publisher.RolloutClient, "sleeping", sleeping)
