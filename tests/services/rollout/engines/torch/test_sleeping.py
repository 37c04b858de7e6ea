"""Sleep releases the engine's memory, and after the wake-up the weights are bit for bit those that slept."""

import asyncio
import math
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.services.rollout.engine_runs import LONG, PROMPT, running, started
from tests.services.rollout.engines.torch.test_engine import proof_of
from tests.services.rollout.rollout_models import FAMILIES
from trackway.rollout.engines.protocol import Generation, MemoryPart
from trackway.rollout.engines.torch.core import EngineCore
from trackway.rollout.engines.torch.decoder import DecoderWeights
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.engines.torch.weights import SleepingWeights
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams

pytestmark = pytest.mark.anyio

ALL: tuple[MemoryPart, ...] = ("weights", "kv_cache")
SHORT = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)


@pytest.fixture
def settings(model_path: Path) -> RolloutSettings:
    return RolloutSettings(model_path=model_path, max_num_seqs=2, device="cpu", enable_sleep=True)


def core_of(engine: TorchEngine) -> EngineCore:
    assert engine._core is not None
    return engine._core


def held_bytes(engine: TorchEngine) -> dict[str, int]:
    """Bytes of the engine's tensors."""
    core = core_of(engine)
    weights = [tensor.nbytes for tensor in core.weights.tensors() if tensor.device.type != "meta"]
    return {"weights": sum(weights), "kv_cache": core._cache.data.nbytes}


async def refused(work: Awaitable[object]) -> tuple[ErrorCode, str]:
    with pytest.raises(TrackwayError) as raised:
        await work
    return raised.value.code, raised.value.message


async def answer(engine: TorchEngine) -> Generation:
    return await engine.generate(PROMPT, SHORT, "a")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_memory_is_released_and_the_answers_after_the_wake_up_are_the_same(
    folders: Callable[[str, int], Path], settings: RolloutSettings, family: str, dtype: str
) -> None:
    settings = settings.model_copy(update={"model_path": folders(family, 0), "dtype": dtype})
    async with started(TorchEngine(settings)) as engine:
        before, held, reused = await answer(engine), held_bytes(engine), engine.stats().reused_tokens
        bits = [tensor.clone() for tensor in core_of(engine).weights.tensors()]
        weights = [weakref.ref(tensor) for tensor in core_of(engine).weights.tensors()]
        await engine.pause("wait")
        await engine.sleep(ALL)
        asleep, left, kept = engine.asleep, held_bytes(engine), [ref for ref in weights if ref() is not None]
        await engine.wake_up(["weights"])
        staged, woken = engine.asleep, held_bytes(engine)
        await engine.wake_up(["kv_cache"])
        await engine.resume()
        after = await answer(engine)
        assert engine.stats().reused_tokens == reused  # the prefix cache is lost
        core = core_of(engine)
        assert all(map(torch.equal, core.weights.tensors(), bits))
        assert (core.weights.lm_head is core.weights.embed) == core.decoder.config.tied

    assert (asleep, left, kept) == (frozenset(ALL), {"weights": 0, "kv_cache": 0}, [])
    assert (staged, woken) == (frozenset({"kv_cache"}), {"weights": held["weights"], "kv_cache": 0})
    assert after.token_ids == before.token_ids
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)  # the memory's alignment chooses CPU kernels


async def test_each_part_sleeps_alone_and_twice_is_once(settings: RolloutSettings) -> None:
    async with started(TorchEngine(settings)) as engine:
        held = held_bytes(engine)
        await engine.pause("wait")
        seen: list[tuple[frozenset[MemoryPart], dict[str, int]]] = []
        for part in ALL:
            for _ in range(2):
                await engine.sleep([part])
            seen.append((engine.asleep, held_bytes(engine)))
            for _ in range(2):
                await engine.wake_up([part])
        assert (engine.asleep, held_bytes(engine)) == (frozenset(), held)
    assert seen == [(frozenset({part}), {**held, part: 0}) for part in ALL]


async def test_an_engine_that_runs_or_holds_requests_does_not_sleep(engine: TorchEngine) -> None:
    at_work = await refused(engine.sleep(ALL))
    task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
    await running(engine, 1)
    await engine.pause("keep")
    frozen = await refused(engine.sleep(ALL))
    await engine.pause("abort")
    await engine.sleep(ALL)  # although the aborted caller has not run since
    assert (await task).finish_reason == "abort"

    conflict = "expected a paused engine without requests, got {}; POST /pause?mode=wait or abort first"
    assert at_work == (ErrorCode.CONFLICT, conflict.format("one that is not paused"))
    assert frozen == (ErrorCode.CONFLICT, conflict.format("1 requests in flight"))


async def test_requests_and_a_resume_are_refused_while_any_part_sleeps(settings: RolloutSettings) -> None:
    async with started(TorchEngine(settings)) as engine:
        await engine.pause("wait")
        for part in ALL:
            await engine.sleep([part])
            assert await refused(engine.resume()) == (
                ErrorCode.CONFLICT,
                f"expected all memory to be awake, got {part} asleep; POST /wake_up first",
            )
            assert (await refused(answer(engine)))[0] is ErrorCode.PAUSED
            await engine.wake_up([part])
        await engine.resume()
        assert len((await answer(engine)).token_ids) == 12


async def test_weights_are_loaded_and_proved_while_the_cache_sleeps_but_not_while_they_sleep(
    settings: RolloutSettings, other_path: Path
) -> None:
    async with started(TorchEngine(settings)) as engine:
        await engine.pause("wait")
        await engine.sleep(ALL)
        asleep = await refused(engine.load_weights(other_path, 1, proof_of(other_path)))
        await engine.wake_up(["weights"])
        wrong = await refused(engine.load_weights(other_path, 1, proof_of(other_path, shift=0.5)))
        await engine.load_weights(other_path, 1, proof_of(other_path))
        await engine.wake_up(["kv_cache"])
        await engine.resume()
        woken = await answer(engine)
    async with started(TorchEngine(settings.model_copy(update={"model_path": other_path}))) as engine:
        expected = await answer(engine)

    assert (asleep[0], wrong[0]) == (ErrorCode.CONFLICT, ErrorCode.WEIGHTS_CORRUPT)
    assert woken.token_ids == expected.token_ids
    assert woken.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


async def test_weights_that_wait_for_their_swap_are_dropped_by_a_sleep(
    settings: RolloutSettings, other_path: Path
) -> None:
    read, go_on = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def swapping() -> AsyncIterator[None]:
        read.set()
        await go_on.wait()
        yield

    async with started(TorchEngine(settings)) as engine:
        load = asyncio.create_task(engine.load_weights(other_path, 1, proof_of(other_path), swapping))
        await asyncio.wait_for(read.wait(), 60)
        assert engine._read is not None
        waiting = weakref.ref(engine._read.embed)
        await engine.pause("wait")
        await engine.sleep(ALL)
        held = waiting()
        go_on.set()
        dropped = await refused(load)
        await engine.wake_up(ALL)
        assert engine.version == 0

    assert (held, dropped[0]) == (None, ErrorCode.CONFLICT)


def one_bit_off(weights: DecoderWeights) -> None:
    weights.layers[1].down.view(torch.int32)[3, 4] ^= 1


def no_norm(weights: DecoderWeights) -> None:
    weights.norm.zero_()


@pytest.mark.parametrize("fault", [one_bit_off, no_norm])
async def test_a_wake_up_that_does_not_restore_the_weights_is_refused_and_the_engine_is_lost(
    settings: RolloutSettings, monkeypatch: pytest.MonkeyPatch, fault: Callable[[DecoderWeights], None]
) -> None:
    copied_back = SleepingWeights._copied_back

    def with_fault(slept: SleepingWeights) -> list[Tensor]:
        tensors = copied_back(slept)
        held = iter(tensors)
        fault(slept.shapes.mapped(lambda _: next(held)))
        return tensors

    monkeypatch.setattr(SleepingWeights, "_copied_back", with_fault)
    async with started(TorchEngine(settings)) as engine:
        await engine.pause("wait")
        await engine.sleep(ALL)
        wrong = await refused(engine.wake_up(ALL))
        assert (engine.asleep, engine.stuck_for()) == (frozenset(ALL), math.inf)

    assert wrong == (
        ErrorCode.ENGINE_FAILED,
        "expected the weights that went to sleep, got other bits; restart this replica",
    )


async def test_a_wake_up_without_memory_may_be_tried_again(
    settings: RolloutSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with started(TorchEngine(settings)) as engine:
        before = await answer(engine)
        await engine.pause("wait")
        await engine.sleep(ALL)
        with monkeypatch.context() as patch:
            patch.setattr(SleepingWeights, "_copied_back", full)
            code, message = await refused(engine.wake_up(ALL))
        assert engine.asleep == frozenset(ALL)
        assert engine.stuck_for() < math.inf
        await engine.wake_up(ALL)
        await engine.resume()
        assert (await answer(engine)).logprobs == pytest.approx(before.logprobs, abs=1e-5)
    assert code is ErrorCode.UNAVAILABLE
    assert message == "expected free memory for the wake-up, got CUDA out of memory; free it, then try again"


async def test_an_engine_whose_weights_do_not_fit_on_the_disk_stays_awake(
    settings: RolloutSettings, small_disk: Path, fill: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(small_disk, leave=8192)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    async with started(TorchEngine(settings)) as engine:
        await engine.pause("wait")
        code, message = await refused(engine.sleep(["weights"]))
        assert engine.asleep == frozenset()
        await engine.resume()
        assert len((await answer(engine)).token_ids) == 12
    assert code is ErrorCode.DISK_FULL
    assert message.startswith(f"expected to write the weights of a sleeping engine to {small_disk}, got 'No space left")
