"""How many rollouts the KV caches hold: those in flight and their growth count, and what the engines report."""

import pytest

from trackway.clients.in_flight import RolloutLimiter
from trackway.wire.rollout import EngineLoad

LOAD = EngineLoad(running=0, waiting=0, preemptions=0, kv_used=0, kv_tokens=100_000, max_len=1000)
HALF = LOAD.model_copy(update={"kv_tokens": 50_000})


def limiter_with(ended: int = 0, least: int = 1, most: int = 1000) -> RolloutLimiter:
    """A limiter that knows rollouts which began with 100 tokens and ended with 499."""
    limiter = RolloutLimiter(least, most)
    for number in range(ended):
        limiter.begin_turn(f"ended {number}", 100, 0.0)
        limiter.end_turn(f"ended {number}", 399, 1.0)
        limiter.release(f"ended {number}")
    return limiter


def fly(limiter: RolloutLimiter, count: int, tokens: int) -> None:
    """Rollouts that began with 100 tokens, have so many, and wait for tools."""
    for number in range(count):
        limiter.begin_turn(str(number), 100, 0.0)
        limiter.end_turn(str(number), tokens - 100, 0.0)


def test_rollouts_may_grow_to_the_longest_context_until_others_have_ended() -> None:
    assert limiter_with().update([LOAD], 0, 0.0) == 85
    assert limiter_with().update([HALF, HALF], 0, 0.0) == 85


def test_lengths_of_ended_rollouts_are_expected_of_others() -> None:
    assert limiter_with(ended=100).update([LOAD], 0, 0.0) == 171  # 85,000 tokens by 496, a bin's middle


def test_few_ended_rollouts_prove_little() -> None:
    assert [limiter_with(ended=ended).update([LOAD], 0, 0.0) for ended in (1, 4, 16)] == [106, 170, 171]


def test_rollouts_that_began_together_are_expected_to_be_long_together() -> None:
    limiter = limiter_with(ended=100)
    fly(limiter, 100, 100)
    assert limiter.update([LOAD], 100, 0.0) == 171


def test_rollouts_that_end_soon_make_room() -> None:
    limiter = limiter_with(ended=100)
    fly(limiter, 100, 450)
    assert limiter.update([LOAD], 100, 0.0) == 263


def test_rollouts_before_their_first_turn_count() -> None:
    assert limiter_with(ended=100).update([LOAD], 150, 0.0) == 171


def test_rollouts_longer_than_all_that_ended_are_expected_to_reach_the_longest_context() -> None:
    limiter = limiter_with(ended=1)
    fly(limiter, 80, 600)
    assert limiter.update([LOAD], 80, 0.0) == 85


def test_a_generation_grows_at_the_speed_of_others() -> None:
    limiter = limiter_with(ended=100)  # 399 tokens a second
    for number in range(100):
        limiter.begin_turn(str(number), 100, 0.0)
    assert limiter.update([LOAD], 100, 0.9) == 263


def test_bounds_hold_and_are_named() -> None:
    for limiter, limit, bound in (
        (limiter_with(most=50), 50, "the upper bound; "),
        (limiter_with(least=90), 90, "the lower bound; "),
        (limiter_with(), 85, ""),
    ):
        assert limiter.update([LOAD], 0, 0.0) == limit
        assert limiter.reason == (
            f"{bound}85% of 100,000 KV tokens, of which 0 rollouts hold 0; 0 requests wait, 0 were preempted"
        )


def test_callers_share_the_replicas_evenly() -> None:
    assert limiter_with().update([LOAD.model_copy(update={"callers": 2})], 0, 0.0) == 42


def test_the_limit_stays_without_an_engine_that_reports_its_kv_cache() -> None:
    limiter = limiter_with()
    limiter.update([LOAD], 0, 0.0)
    assert limiter.update([LOAD.model_copy(update={"kv_tokens": 0})], 0, 0.0) == 85
    assert limiter.reason == "no engine reports its KV cache"


def test_preemptions_lower_the_limit_and_it_recovers_slowly() -> None:
    limiter = limiter_with()
    known = limiter.update([LOAD.model_copy(update={"preemptions": 7})], 0, 0.0)  # before this caller came
    preempted = LOAD.model_copy(update={"preemptions": 8})
    assert [known, *(limiter.update([preempted], 0, 0.0) for _ in range(3))] == [85, 76, 77, 78]


def test_preemptions_lower_the_limit_to_a_half_at_most() -> None:
    limiter = limiter_with()
    for preemptions in range(20):
        limiter.update([LOAD.model_copy(update={"preemptions": preemptions})], 0, 0.0)
    assert limiter.limit == 42


@pytest.mark.parametrize(("waiting", "limit"), [(0, 180), (1, 171)])
def test_shared_prompts_make_room_as_the_engine_says(waiting: int, limit: int) -> None:
    limiter = limiter_with(ended=100)
    limiter.begin_turn("a", 100, 0.0)
    load = LOAD.model_copy(update={"running": 1, "waiting": waiting, "kv_used": 50})
    # A request that waits holds none of the 50 tokens, so with it a token of context takes a whole one of the cache.
    assert limiter.update([load], 1, 0.0) == limit


def test_the_budget_rises_while_most_prefixes_wait_for_tools() -> None:
    limits = dict[int, int]()
    for used in (10_000, 30_000):
        limiter = limiter_with(ended=100)
        fly(limiter, 160, 450)
        limits[used] = [
            limiter.update([LOAD.model_copy(update={"kv_used": used, "running": 1})], 160, 0.0) for _ in range(50)
        ][-1]
    assert limits == {10_000: 404, 30_000: 198}


def test_unknown_rollouts_are_ignored() -> None:
    limiter = limiter_with()
    limiter.end_turn("unknown", 10, 0.0)
    limiter.release("unknown")
    assert limiter.update([LOAD], 0, 0.0) == 85
