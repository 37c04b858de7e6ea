"""Engines on the learner's GPUs: asleep while it computes, awake for rollouts, and never left asleep."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from unittest.mock import Mock

import pytest
from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse

from trackway.clients import close_shared_http
from trackway.clients.weights import WeightStore
from trackway.learner.config import LearnerConfig
from trackway.learner.learner import Learner
from trackway.run_config import compose
from trackway.trainer import worker
from trackway.trainer.data.row_files import write_rows
from trackway.trainer.loop import build as build_module
from trackway.trainer.loop.build import build
from trackway.trainer.loop.fit import fit
from trackway.trainer.loop.schedule import OpenValidation
from trackway.trainer.loop.training import Training
from trackway.trainer.run_state.checkpoint import find_latest
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.heartbeat import EXIT_FAILED
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import GroupRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import MemoryPart, SleepReplies, SleepReply
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

KEY = "actor_rollout_ref.rollout.free_cache_engine"
HANGS = TrackwayError(ErrorCode.DEADLINE_EXCEEDED, "failed on 1 of 2 rollout replicas: b: hangs")

Described = Callable[..., AbstractContextManager[RunFolder]]
Started = Callable[..., AbstractAsyncContextManager[Training]]


@dataclass
class Replicas:
    """Two rollout replicas as far as their sleep goes, and the order of all that a run does."""

    store: WeightStore
    can_sleep: bool = True
    asleep: set[MemoryPart] = field(default_factory=set)
    events: list[str] = field(default_factory=list)
    refuses: str = ""
    """The call that fails for good."""

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/replicas/is_sleeping", self._replies)
        app.add_api_route("/replicas/sleep", self.sleep, methods=["POST"], response_model=None)
        app.add_api_route("/replicas/wake_up", self.wake_up, methods=["POST"], response_model=None)
        return app

    async def sleep(self, mode: str) -> SleepReplies | JSONResponse:
        self.asleep = {"weights", "kv_cache"}
        return self._told(f"sleep, {mode}")

    async def wake_up(
        self, min_weight_version: int, tags: Annotated[list[MemoryPart] | None, Query()] = None
    ) -> SleepReplies | JSONResponse:
        self.asleep -= {*(tags or ["weights", "kv_cache"])}
        latest = self.store.latest()
        assert min_weight_version in (0, latest and latest.version)  # never before it is published
        return self._told(f"wake {' '.join(tags or ['all'])}, v{min_weight_version}")

    def _told(self, event: str) -> SleepReplies | JSONResponse:
        self.events.append(event)
        if event == self.refuses:
            return JSONResponse(HANGS.to_reply().model_dump(mode="json"), HANGS.status)
        return self._replies()

    def _replies(self) -> SleepReplies:
        state = {"is_sleeping": bool(self.asleep), "asleep": sorted(self.asleep), "can_sleep": self.can_sleep}
        return SleepReplies(replicas=[SleepReply.model_validate({**state, "replica": name}) for name in "ab"])


@pytest.fixture
def replicas(tmp_path: Path) -> Replicas:
    return Replicas(WeightStore(str(tmp_path / "weights")))


@pytest.fixture
def described(agent_url: str, replicas: Replicas, serving, sample, tiny_model: Path, tmp_path: Path) -> Described:
    """`with described("key=value") as folder`: that of a run of two steps, which validates after each."""
    write_rows(tmp_path / "rows.parquet", [sample(index) for index in range(2)])
    lines = [
        f"actor_rollout_ref.model.path={tiny_model}",
        f"data.train_files={tmp_path}/rows.parquet",
        f"data.val_files={tmp_path}/rows.parquet",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
        "trainer.val_before_train=false",
    ]

    @contextmanager
    def describe(*overrides: str) -> Iterator[RunFolder]:
        with serving(replicas.app()) as url:
            services = ServiceUrls(
                agent_url=agent_url,
                tools_url="http://127.0.0.1:9",
                weights_url=str(tmp_path / "weights"),
                rollout_url=url,
            )
            folder = RunFolder(tmp_path / "outputs" / "run")
            folder.create(compose([*lines, *overrides]), services)
            yield folder

    return describe


@pytest.fixture
def started(described: Described, agent, replicas: Replicas, monkeypatch) -> Started:
    """`async with started("key=value") as run`: before its first step."""

    def noted(config: LearnerConfig) -> Learner:
        replicas.events.append("build")
        return Learner(config)

    @asynccontextmanager
    async def start(*overrides: str) -> AsyncIterator[Training]:
        with described(*overrides) as folder:
            try:
                monkeypatch.setattr(build_module, "Learner", noted)
                run, _ = await build(folder, asyncio.Event())
                _note_requests(agent, replicas.events)
                note_updates(run, monkeypatch, lambda: replicas.events.append("update"))
                monkeypatch.setattr(run.learner, "release_memory", lambda: replicas.events.append("release"))
                yield run
                run.publisher.close()
            finally:
                await close_shared_http()

    return start


def _note_requests(agent, events: list[str]) -> None:
    """The first request of every rollout and validation."""

    class Requests(list[GroupRequest]):
        def append(self, request: GroupRequest) -> None:
            event = f"{'validate' if request.validation else 'rollout'} {request.step}, v{request.min_weight_version}"
            if event not in events:
                events.append(event)
            super().append(request)

    agent.requests = Requests()


def note_updates(run: Training, monkeypatch: pytest.MonkeyPatch, note: Callable[[], object]) -> None:
    update = run.learner.update

    def noted(*arguments):
        note()
        return update(*arguments)

    monkeypatch.setattr(run.learner, "update", noted)


async def test_engines_sleep_while_the_learner_computes_and_have_the_new_weights_before_the_next_rollout(
    started: Started, replicas: Replicas
):
    async with started() as run:
        state = await fit(run)

    assert replicas.events == [
        *("sleep, abort", "build", "release", "wake weights, v1", "wake kv_cache, v0"),
        *("rollout 1, v1", "sleep, abort", "update"),
        *("release", "wake weights, v2", "wake kv_cache, v0", "validate 1, v2"),
        *("rollout 2, v2", "sleep, abort", "update"),
        *("release", "wake weights, v3", "wake kv_cache, v0", "validate 2, v3"),
    ]
    assert (state, replicas.asleep) == (RunState.FINISHED, set())
    for row in run.folder.rows():
        assert {"timing_s/sleep", "timing_s/wake_up", "timing_s/update_actor"} <= row.data.keys()


async def test_rollouts_in_flight_outlive_the_sleep_and_a_validation_does_not_run_beside_it(
    started: Started, replicas: Replicas, agent
):
    async with started("async_training.staleness_threshold=1") as run:
        state = await fit(run)

    assert [event for event in replicas.events if not event.startswith("rollout")] == [
        *("sleep, retract", "build", "release", "wake weights, v1", "wake kv_cache, v0"),
        *("sleep, retract", "update", "release", "wake weights, v2", "wake kv_cache, v0", "validate 1, v2"),
        *("sleep, retract", "update", "release", "wake weights, v3", "wake kv_cache, v0", "validate 2, v3"),
    ]
    assert (state, run.progress.step, replicas.asleep) == (RunState.FINISHED, 2, set())
    assert [row.data["val-core/openai/gsm8k/acc/mean@1"] for row in run.folder.rows()] == [0.0, 0.0]


async def test_all_memory_comes_back_at_once_when_the_run_wants_no_stages(started: Started, replicas: Replicas):
    async with started("actor_rollout_ref.rollout.multi_stage_wake_up=false") as run:
        await fit(run)

    assert [event for event in replicas.events if event.startswith("wake")] == [f"wake all, v{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(("can_sleep", "override"), [(False, f"{KEY}=null"), (True, f"{KEY}=false")])
async def test_engines_that_keep_their_memory_are_asked_for_nothing(
    started: Started, replicas: Replicas, can_sleep: bool, override: str
):
    replicas.can_sleep = can_sleep
    async with started(override) as run:
        await fit(run)

    assert (run.engines, {event.split(",")[0].split()[0] for event in replicas.events}) == (
        None,
        {"build", "release", "rollout", "update", "validate"},
    )
    assert not [
        name for row in run.folder.rows() for name in row.data if name in ("timing_s/sleep", "timing_s/wake_up")
    ]


async def test_a_replica_that_does_not_wake_ends_the_run_after_its_step_is_saved(started: Started, replicas: Replicas):
    replicas.refuses = "wake weights, v2"
    async with started() as run:
        with pytest.raises(TrackwayError) as late:
            await fit(run)
        assert run.engines is not None
        await run.engines.close()

    saved = find_latest(run.folder.checkpoints)
    assert late.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert late.value.message == (
        f"expected every rollout engine to wake up within 600 s, got: {HANGS.message}; see `trackway status`, then "
        "resume the run"
    )
    assert saved is not None and saved.name == "global_step_1"
    assert run.progress.metrics["training/global_step"] == 1.0
    assert replicas.events[-4:] == ["update", "release", "wake weights, v2", "wake all, v0"]


async def test_a_replica_that_does_not_go_to_sleep_ends_the_run_before_the_update(started: Started, replicas: Replicas):
    async with started() as run:
        replicas.refuses = "sleep, abort"
        with pytest.raises(TrackwayError, match="to go to sleep within 600 s"):
            await fit(run)
        assert run.engines is not None
        await run.engines.close()

    assert (run.step, replicas.events[-2:], replicas.asleep) == (0, ["sleep, abort", "wake all, v0"], set())


async def test_an_update_that_fails_leaves_the_engines_awake(started: Started, replicas: Replicas, monkeypatch):
    async with started() as run:
        note_updates(run, monkeypatch, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await fit(run)
        asleep = replicas.asleep.copy()
        assert run.engines is not None
        await run.engines.close()
        await run.engines.close()

    assert (asleep, replicas.asleep) == ({"weights", "kv_cache"}, set())
    assert replicas.events[-2:] == ["sleep, abort", "wake all, v0"]


async def test_a_run_that_is_stopped_while_they_sleep_wakes_them_before_it_ends(
    started: Started, replicas: Replicas, monkeypatch
):
    async with started() as run:
        note_updates(run, monkeypatch, run.stop.set)
        state = await fit(run)

    assert (state, run.step, run.saved_step, replicas.asleep) == (RunState.STOPPED, 1, 1, set())
    since = replicas.events[replicas.events.index("update") :]
    assert since[:4] == ["update", "release", "wake weights, v2", "wake kv_cache, v0"]


async def test_engines_do_not_wake_up_where_the_learner_left_them_too_little_memory(
    started: Started, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
):
    gib = 2**30
    async with started() as run:
        # Before and after the sleep, the engines being awake in between; then before they wake up.
        monkeypatch.setattr(run.learner, "free_memory", Mock(side_effect=[[], [3 * gib], [43 * gib], [39 * gib]]))
        with pytest.raises(TrackwayError) as raised:
            await fit(run)

    assert raised.value.message == (
        "expected 40.0 GiB free on the GPU of rank 0 for the engines that wake up, got 39.0 GiB; set "
        "actor.fsdp_config.param_offload and optimizer_offload and ref.fsdp_config.param_offload, or lower "
        "rollout.gpu_memory_utilization, then resume the run"
    )
    assert (run.step, run.saved_step) == (1, 1)
    assert "wake weights, v2" not in replicas.events


def test_a_run_that_fails_ends_its_learner_and_then_wakes_the_engines(
    described: Described, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
):
    replicas.refuses = "wake weights, v2"
    monkeypatch.setattr(Learner, "close", lambda _: replicas.events.append("close"))
    with described() as folder:
        assert worker.main([str(folder.path)]) == EXIT_FAILED

    assert folder.info().state is RunState.FAILED
    assert folder.info().message.startswith("deadline_exceeded: expected every rollout engine to wake up")
    assert (replicas.events[-3:], replicas.asleep) == (["wake weights, v2", "close", "wake all, v0"], set())


def test_a_run_that_cannot_be_built_leaves_no_engine_asleep(
    described: Described, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build_module, "begin", Mock(side_effect=TrackwayError(ErrorCode.CONFLICT, "damaged")))
    with described() as folder:
        assert worker.main([str(folder.path)]) == EXIT_FAILED

    assert (replicas.events, replicas.asleep) == (["sleep, abort", "wake all, v0"], set())


async def test_engines_wake_up_for_a_validation_that_was_cut_off(started: Started, replicas: Replicas):
    async with started() as run:
        await run.publish()
        run.progress = run.progress.model_copy(update={"validation": OpenValidation(step=0, version=1)})
        await run.resume_validation()
        await run.close()

    woken = ["sleep, abort", "build", "release", "wake weights, v1", "wake kv_cache, v0"]
    assert (replicas.events[:5], replicas.asleep) == (woken, set())
