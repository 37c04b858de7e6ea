"""The simulated engine: its arithmetic by exact times, and its face over an event loop."""

import asyncio
import itertools
import math
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from benchmarks.sim_engine import Answers, PrefixCache, Request, SimCore, SimEngine, SimSettings

from tests.services.rollout.engine_runs import started
from tests.weight_proofs import ANY_PROOF
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import WeightSpan

pytestmark = pytest.mark.anyio

ONE_SECOND = SimSettings(step_s=1.0, step_slope_s=0.5, prefill_tokens_per_s=4.0, response_tokens=8)
FAST = {"step_s": 1e-5, "step_slope_s": 0.0, "prefill_tokens_per_s": 1e6}
NEVER = {"step_s": 3600.0}
EOS = 2
_names = itertools.count()


def request(prompt: int, tokens: int, streamed: bool = False) -> Request:
    """A prompt of `prompt` tokens, all its own, whose answer has `tokens`."""
    name = next(_names)
    answer = list(range(3, 3 + tokens))
    return Request(str(name), [name] * prompt, answer, [-1.0] * tokens, "stop", streamed)


def endings(core: SimCore, until: float) -> list[tuple[float, str]]:
    """(time, request) of what happens, each event waited for by itself."""
    found: list[tuple[float, str]] = []
    while (at := core.next_at()) is not None and at <= until:
        found += [(round(at, 6), event.request_id) for event in core.advance(at)]
    return found


def test_a_lone_request_takes_its_prefill_and_one_step_per_token() -> None:
    core, only = SimCore(ONE_SECOND, 4, caching=False), request(prompt=8, tokens=5)
    core.add(only)
    assert endings(core, 100) == [(7.0, only.request_id)]
    assert only.result is not None and only.result.token_ids == [3, 4, 5, 6, 7]
    assert core.stats() == (0, 0, 7, 5, 8, 0, 0, 0)


def test_a_fuller_batch_steps_slower_for_all_its_members() -> None:
    core, long, short = SimCore(ONE_SECOND, 4, caching=False), request(4, 11), request(4, 3)
    core.add(long)
    core.advance(4.0)
    core.add(short)
    # Four steps of 1 s alone, four of 1.5 s together, the last four alone again.
    assert endings(core, 100) == [(10.0, short.request_id), (14.0, long.request_id)]


def test_a_request_without_a_slot_starts_when_the_first_one_ends_however_late_the_loop_is() -> None:
    core, first, second = SimCore(ONE_SECOND, 1, caching=False), request(4, 4), request(4, 2)
    core.add(first)
    core.add(second)
    assert core.stats()[:2] == (1, 1)
    assert core.advance(100.0) == [first, second]
    assert second.admitted_at == 5.0


def test_a_streamed_request_tells_each_token() -> None:
    core, only = SimCore(ONE_SECOND, 1, caching=False), request(4, 3, streamed=True)
    core.add(only)
    assert [at for at, _ in endings(core, 100)] == [2.0, 3.0, 4.0]


def test_frozen_requests_stand_still_and_go_on_after() -> None:
    core, only = SimCore(ONE_SECOND, 1, caching=False), request(4, 10)
    core.add(only)
    core.advance(4.0)
    core.frozen = True
    core.advance(50.0)
    assert (core.generated(only), core.next_at()) == (3, None)
    core.frozen = False
    assert endings(core, 100) == [(57.0, only.request_id)]


def test_new_weights_part_the_tokens_of_a_running_request() -> None:
    core, only = SimCore(ONE_SECOND, 1, caching=False), request(4, 10)
    core.add(only)
    core.advance(4.0)
    core.swap(7)
    core.advance(100.0)
    assert only.result is not None
    assert only.result.spans == [
        WeightSpan(version=0, start=0, end=3),
        WeightSpan(version=7, start=3, end=10, kv_version=0),
    ]


def test_a_cut_request_keeps_what_it_has_and_frees_its_slot() -> None:
    core, cut, waiting = SimCore(ONE_SECOND, 1, caching=False), request(4, 10), request(4, 2)
    core.add(cut)
    core.add(waiting)
    core.advance(3.0)
    core.end([cut])
    assert cut.result is not None and (cut.result.token_ids, cut.result.finish_reason) == ([3, 4], "abort")
    assert endings(core, 100) == [(6.0, waiting.request_id)]
    assert core.generated(cut) == 2


def test_a_second_turn_finds_its_first_in_the_prefix_cache_until_the_weights_change() -> None:
    core, first = SimCore(ONE_SECOND, 1, caching=True), request(40, 8)
    core.add(first)
    core.advance(100.0)
    history = [*first.prompt, *first.answer]
    for version in (0, 1):
        core.swap(version) if version else None
        core.add(Request("next", [*history, 1, 1, 1], [3], [-1.0], "stop"))
        core.advance(core.next_at() or 0.0)
    assert core.stats().reused_tokens == 48
    assert core.stats().prefilled_tokens == 40 + 3 + 51


def test_the_prefix_cache_knows_whole_blocks_and_leaves_one_token_to_compute() -> None:
    cache = PrefixCache(2)
    assert [cache.reuse([1] * length) for length in (32, 32, 33, 31)] == [0, 31, 32, 16]


def test_the_prefix_cache_forgets_the_least_recently_used() -> None:
    cache, ones, two, three = PrefixCache(2), [1] * 16, [2] * 16, [3] * 16
    for used in (ones, two, ones, three):
        cache.reuse(used)
    assert [cache.reuse(prompt) for prompt in (ones, two)] == [15, 0]


def test_those_turned_away_are_told_to_come_one_after_the_other_when_half_the_queue_is_served() -> None:
    core = SimCore(ONE_SECOND, 2, caching=False)
    for _ in range(10):
        core.add(request(4, 4))
    # 8 tokens of 1.5 s are expected of each request, so that a slot comes free every 6 s; 4 of the 8 go before.
    assert [core.turn_away() for _ in range(3)] == [24.0, 30.0, 36.0]
    core.advance(9.0)
    assert core.turn_away() == pytest.approx(36.0 + 6.0 - 9.0, rel=0.05)
    assert max(core.turn_away() for _ in range(100)) == 60.0


@pytest.fixture
async def punctual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's clock moves by ten tokens of `FAST` at most between two looks, however busy the machine."""
    loop = asyncio.get_running_loop()
    real = loop.time
    seen = shown = real()

    def time() -> float:
        nonlocal seen, shown
        now = real()
        shown += min(now - seen, 10 * FAST["step_s"])
        seen = now
        return shown

    monkeypatch.setattr(loop, "time", time)


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with started(SimEngine(RolloutSettings(max_num_seqs=2, max_queue=1, engine_options=FAST))) as engine:
        yield engine


@pytest.fixture
async def stopped_clock() -> AsyncIterator[SimEngine]:
    """An engine whose first token never comes."""
    async with started(SimEngine(RolloutSettings(max_num_seqs=2, max_queue=1, engine_options=NEVER))) as engine:
        yield engine


async def in_flight(engine: SimEngine, count: int) -> list[asyncio.Task]:
    """Tasks that have asked; the loop runs them all before it comes back here."""
    params = SamplingParams(max_tokens=4000)
    tasks = [asyncio.create_task(engine.generate([5, 6], params, str(name))) for name in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_the_same_seed_gives_the_same_answer_and_another_one_another(engine: SimEngine) -> None:
    first, again, reseeded = [await engine.generate([5, 6], SamplingParams(seed=seed), "a") for seed in (1, 1, 2)]
    assert first == again
    assert first.token_ids != reseeded.token_ids
    assert (first.finish_reason, first.token_ids[-1], first.token_ids.count(EOS)) == ("stop", EOS, 1)
    assert len(first.logprobs) == len(first.token_ids) and all(-10 < logprob < 0 for logprob in first.logprobs)


def test_lengths_follow_their_distribution() -> None:
    answers = Answers(SimSettings.model_validate(FAST))
    lengths = [len(answers.answer([5], SamplingParams(seed=seed), 4000, 0)[0]) for seed in range(4000)]
    logarithms = [math.log(length) for length in lengths]
    assert statistics.mean(lengths) == pytest.approx(128, rel=0.02)
    assert statistics.stdev(logarithms) == pytest.approx(0.5, rel=0.02)


async def test_limits_and_stop_tokens_end_an_answer(engine: SimEngine) -> None:
    free = await engine.generate([5], SamplingParams(seed=1, max_tokens=300, ignore_eos=True), "a")
    stop = free.token_ids[9]
    params = SamplingParams(seed=1, max_tokens=300, ignore_eos=True, stop_token_ids=[stop])
    stopped = await engine.generate([5], params, "b")
    cut = await engine.generate([5], SamplingParams(seed=1, max_tokens=4), "c")
    assert (free.finish_reason, len(free.token_ids)) == ("length", 300)
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", free.token_ids[: free.token_ids.index(stop) + 1])
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 4)


async def test_a_stream_joined_is_what_generate_returns(engine: SimEngine) -> None:
    whole = await engine.generate([5, 6], SamplingParams(seed=4), "a")
    pieces = [piece async for piece in engine.stream([5, 6], SamplingParams(seed=4), "b")]
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [logprob for piece in pieces for logprob in piece.logprobs] == whole.logprobs
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "stop"


async def test_a_script_is_answered_turn_by_turn_and_a_cut_turn_is_continued() -> None:
    sim = {**FAST, "script": [[10, 11, 12, EOS], [20, EOS]]}
    engine = SimEngine(RolloutSettings(engine_options=sim))
    await engine.start()
    prompts = [[7, 7], [7, 10, 11], [7, 10, 11, 12, EOS, 8], [7, 10, 11, 12, EOS, 8, 20, EOS, 8]]
    answers = [(await engine.generate(prompt, SamplingParams(), "a")).token_ids for prompt in prompts]
    assert answers == [[10, 11, 12, EOS], [12, EOS], [20, EOS], [20, EOS]]
    await engine.stop()


@pytest.mark.parametrize("prompt", [[], [480], [-1], [5] * 4096])
async def test_a_prompt_that_the_model_could_not_take_is_refused(engine: SimEngine, prompt: list[int]) -> None:
    with pytest.raises(TrackwayError) as raised:
        await engine.generate(prompt, SamplingParams(), "a")
    assert raised.value.code is ErrorCode.INVALID_REQUEST


async def test_one_request_over_slots_and_queue_is_told_when_to_come_again(stopped_clock: SimEngine) -> None:
    tasks = await in_flight(stopped_clock, 3)
    with pytest.raises(TrackwayError) as raised:
        await stopped_clock.generate([5], SamplingParams(), "refused")
    assert raised.value.code is ErrorCode.OVERLOADED
    assert raised.value.detail == {"bound": 3, "retry_after_s": round(128 * 3600.0002 / 2, 3)}
    assert await stopped_clock.abort("1") == 1
    assert (await tasks[1]).finish_reason == "abort"
    assert stopped_clock.stats()[:2] == (2, 0)


async def test_a_cancelled_caller_leaves_nothing_behind(stopped_clock: SimEngine) -> None:
    tasks = await in_flight(stopped_clock, 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert stopped_clock.stats()[:2] == (0, 0)
    assert stopped_clock.stuck_for() == 0.0


async def test_a_pause_refuses_and_cuts_or_waits(stopped_clock: SimEngine, engine: SimEngine) -> None:
    tasks = await in_flight(stopped_clock, 3)
    await stopped_clock.pause("abort")
    assert [(await task).finish_reason for task in tasks] == ["abort"] * 3
    with pytest.raises(TrackwayError, match="paused"):
        await stopped_clock.generate([5], SamplingParams(), "a")
    tasks = await in_flight(engine, 3)
    await engine.pause("wait")
    assert engine.stats()[:2] == (0, 0)
    assert [(await task).finish_reason for task in tasks] == ["stop"] * 3
    await engine.resume()
    assert (await engine.generate([5], SamplingParams(seed=0), "a")).finish_reason == "stop"


async def test_requests_frozen_over_an_update_have_a_span_of_each_version(punctual: None, engine: SimEngine) -> None:
    params = SamplingParams(seed=1, max_tokens=4000, ignore_eos=True)
    stream = engine.stream([5], params, "a")
    before = (await anext(stream)).token_ids
    await engine.pause("keep")
    frozen = engine.stats()
    await engine.load_weights(Path("none"), 3, ANY_PROOF)
    assert engine.stats() == frozen
    await engine.resume()
    after = [piece async for piece in stream]
    assert before and [piece.version for piece in after[-2:]] == [3, 3]
    assert sum(len(piece.token_ids) for piece in after) + len(before) == 4000
    assert engine.version == 3


async def test_a_sleeping_engine_is_paused_and_does_not_resume(engine: SimEngine) -> None:
    with pytest.raises(TrackwayError, match="expected a paused engine"):
        await engine.sleep(["weights"])
    await engine.pause("wait")
    await engine.sleep(["weights", "kv_cache"])
    assert engine.asleep == {"weights", "kv_cache"}
    await engine.wake_up(["weights"])
    with pytest.raises(TrackwayError, match="got kv_cache asleep; POST /wake_up first"):
        await engine.resume()
    await engine.wake_up(["kv_cache"])
    assert engine.asleep == frozenset()
    await engine.resume()
    assert not engine.paused


@pytest.mark.parametrize("wrong", [{"script": [[5], []]}, {"script": [[480]]}, {"eos_token_id": 480}])
def test_settings_that_name_no_or_unknown_tokens_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="expected turns of ids below 480"):
        SimSettings.model_validate(wrong)
