"""Which rollout engines leave their GPUs to the learner: what verl's keys say, and what the service says of itself."""

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from trackway.run_config import compose
from trackway.trainer.loop.colocation import Sharing, open_engines
from trackway.trainer.loop.from_config import sharing
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SleepReplies, SleepReply

KEY = "actor_rollout_ref.rollout.free_cache_engine"


def service(*can_sleep: bool) -> FastAPI:
    """A service of so many replicas."""
    app = FastAPI()

    @app.get("/replicas/is_sleeping")
    async def is_sleeping() -> SleepReplies:
        replicas = [SleepReply(is_sleeping=False, can_sleep=can, replica=f"r{n}") for n, can in enumerate(can_sleep)]
        return SleepReplies(replicas=replicas)

    return app


@pytest.mark.anyio
@pytest.mark.usefixtures("shared_http")
@pytest.mark.parametrize(
    ("wanted", "can_sleep", "sleep"),
    [(None, (True, True), True), (None, (True, False), False), (True, (True,), True), (False, (True,), False)],
)
async def test_engines_sleep_if_all_of_them_can_and_nobody_objects(serving, wanted, can_sleep, sleep):
    with serving(service(*can_sleep)) as url:
        assert (await open_engines(Sharing(wanted), url) is not None) is sleep


@pytest.mark.anyio
@pytest.mark.usefixtures("shared_http")
async def test_engines_that_must_sleep_and_cannot_are_named(serving):
    with serving(service(True, False, False)) as url, pytest.raises(TrackwayError) as refused:
        await open_engines(Sharing(wanted=True), url)

    assert (refused.value.code, refused.value.message) == (
        ErrorCode.INVALID_REQUEST,
        f"{KEY}=true: expected rollout replicas that can sleep, got r1, r2 that cannot; set enable_sleep: true on "
        "the rollout service, or leave the key out, as for vLLM on a CPU, which ignores sleep",
    )


@pytest.mark.anyio
@pytest.mark.usefixtures("shared_http")
async def test_a_service_of_one_replica_without_ray_and_one_that_knows_no_sleep(serving):
    alone, plain = FastAPI(), FastAPI()

    @alone.api_route("/replicas/{rest:path}", methods=["GET", "POST"])
    async def unknown() -> JSONResponse:
        error = TrackwayError(ErrorCode.NOT_FOUND, "no such route")
        return JSONResponse(error.to_reply().model_dump(mode="json"), 404)

    @alone.get("/is_sleeping")
    async def is_sleeping() -> SleepReply:
        return SleepReply(is_sleeping=False, can_sleep=True)

    with serving(alone) as engine, serving(plain) as without_sleep:
        assert await open_engines(Sharing(), engine) is not None
        assert await open_engines(Sharing(), without_sleep) is None
        with pytest.raises(TrackwayError, match=f"got none at {without_sleep}"):
            await open_engines(Sharing(wanted=True), without_sleep)
    assert await open_engines(Sharing(), None) is None
    with pytest.raises(TrackwayError, match="got no URL of the rollout service"):
        await open_engines(Sharing(wanted=True), None)


def test_the_keys_of_verl_and_our_bound_say_how_memory_is_shared():
    rollout = "actor_rollout_ref.rollout"
    words = [f"{rollout}.free_cache_engine=true", f"{rollout}.multi_stage_wake_up=false", "trackway.sleep_timeout_s=9"]

    assert sharing(compose([])) == Sharing(wanted=None, staged=True, timeout_s=600.0)
    assert sharing(compose(words)) == Sharing(wanted=True, staged=False, timeout_s=9.0)
