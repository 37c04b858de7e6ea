"""Who is admitted, in which order, and which requests are computed together."""

import pytest
import torch

from tests.services.rollout.rollout_models import sequence
from trackway.rollout.engines.protocol import Generation, Piece
from trackway.rollout.engines.torch.scheduler import Scheduler, Sequence
from trackway.wire.rollout import SamplingParams

SHARED = list(range(20))


def waiting(scheduler: Scheduler, *prompts: list[int]) -> list[Sequence]:
    requests = [sequence(prompt, SamplingParams(max_tokens=9)) for prompt in prompts]
    scheduler.waiting.extend(requests)
    return requests


def test_a_request_that_waits_for_a_shared_beginning_keeps_its_place_in_the_queue() -> None:
    scheduler = Scheduler(slots=2, max_len=64)
    first, sibling, third, fourth = waiting(scheduler, SHARED, SHARED, [50, 51], [60, 61])
    scheduler.admit()
    assert scheduler.running == [first, third]
    assert list(scheduler.waiting) == [sibling, fourth]


def test_requests_are_admitted_in_order_of_arrival_as_far_as_slots_reach() -> None:
    scheduler = Scheduler(slots=2, max_len=64)
    first, second, third = waiting(scheduler, [1], [2], [3])
    scheduler.admit()
    assert (scheduler.running, list(scheduler.waiting)) == ([first, second], [third])
    scheduler.finish(first)
    scheduler.admit()
    assert scheduler.running == [second, third]


def test_prefills_join_the_decoding_requests_as_far_as_the_budget_reaches() -> None:
    scheduler = Scheduler(slots=8, max_len=64, group_tokens=50)
    prompts = [[10 * n + i for i in range(length)] for n, length in enumerate((21, 3, 22, 25, 60))]
    long, short, longer, too_long, longest = waiting(scheduler, *prompts)
    decoding, too = waiting(scheduler, [99], [98])
    scheduler.admit()
    assert scheduler.groups() == [[decoding, too, long, short, longer], [too_long], [longest]]


def test_a_token_extends_the_span_of_its_version_or_opens_one() -> None:
    request = sequence([1, 2, 3], SamplingParams(max_tokens=3))
    reasons = [request.accept(token, -1.0, version) for token, version in ((5, 1), (6, 1), (7, 2))]
    assert reasons == [None, None, "length"]
    assert [(s.version, s.start, s.end, s.kv_version) for s in request.spans] == [(1, 0, 2, None), (2, 2, 3, 1)]
    assert (request.cached, request.pending_ids) == (5, [7])


def test_decoding_requests_come_before_a_prefill_of_two_tokens() -> None:
    scheduler = Scheduler(slots=2, max_len=64)
    prefill, decoding = waiting(scheduler, [4, 5], [1])
    scheduler.admit()
    assert scheduler.groups() == [[decoding, prefill]]


def test_a_prefill_joins_a_group_that_it_fills_exactly() -> None:
    scheduler = Scheduler(slots=2, max_len=64, group_tokens=10)
    first, second = waiting(scheduler, [1, 2, 3, 4], [11, 12, 13, 14, 15, 16])
    scheduler.admit()
    assert scheduler.groups() == [[first, second]]


def test_decoding_requests_are_one_group_whatever_the_budget_and_a_prefill_finds_it_used_up() -> None:
    scheduler = Scheduler(slots=4, max_len=64, group_tokens=2)
    first, second, third, prefill = waiting(scheduler, [1], [2], [3], [4, 5])
    scheduler.admit()
    assert scheduler.groups() == [[first, second, third], [prefill]]


@pytest.mark.parametrize(("tokens", "groups"), [(24, 1), (25, 2)])
def test_a_group_takes_1024_tokens_unless_told_otherwise(tokens: int, groups: int) -> None:
    scheduler = Scheduler(slots=2, max_len=1100)
    waiting(scheduler, [1] * 1000, [2] * tokens)
    scheduler.admit()
    assert len(scheduler.groups()) == groups


def test_a_prompt_is_shared_once_it_is_computed() -> None:
    scheduler = Scheduler(slots=2, max_len=64)
    first, sibling = waiting(scheduler, SHARED, SHARED)
    scheduler.admit()
    scheduler.mark_computed([first])
    (place,) = scheduler.admit()
    assert (place.source, place.cached) == (first.slot, 19)
    assert (sibling.slot, sibling.cached, sibling.pending, sibling.pending_ids) == (place.slot, 19, 1, [19])


def test_a_request_that_goes_on_after_the_weights_changed_shares_nothing_of_its_prompt() -> None:
    scheduler = Scheduler(slots=2, max_len=64)
    (first,) = waiting(scheduler, SHARED)
    scheduler.admit()
    scheduler.mark_computed([first])
    first.accept(50, -1.0, version=1)
    scheduler.slots.reset_prefix_cache()
    scheduler.mark_computed([first])
    waiting(scheduler, SHARED)
    assert [place.cached for place in scheduler.admit()] == [0]


def test_a_request_that_leaves_hands_over_what_was_computed_and_one_that_waits_leaves_the_queue() -> None:
    scheduler = Scheduler(slots=1, max_len=64)
    first, second, third = waiting(scheduler, SHARED, [50], [*SHARED, 60, 61, 62])
    scheduler.admit()
    scheduler.mark_computed([first])
    first.accept(60, -1.0, version=1)
    first.accept(61, -1.0, version=1)
    scheduler.finish(second)
    scheduler.finish(first)
    assert (scheduler.running, list(scheduler.waiting)) == ([], [third])
    # 61 was sampled and never computed.
    assert [place.cached for place in scheduler.admit()] == [21]


def test_a_scheduler_is_busy_while_a_request_waits_or_runs() -> None:
    scheduler = Scheduler(slots=1, max_len=64)
    states = [scheduler.busy]
    (request,) = waiting(scheduler, [1])
    states.append(scheduler.busy)
    scheduler.admit()
    states.append(scheduler.busy)
    scheduler.finish(request)
    assert [*states, scheduler.busy] == [False, True, True, False]


def test_clearing_ends_those_that_run_then_those_that_wait_and_shares_nothing_afterwards() -> None:
    scheduler = Scheduler(slots=1, max_len=64)
    first, second = waiting(scheduler, SHARED, [50])
    scheduler.admit()
    scheduler.mark_computed([first])
    assert scheduler.clear() == [first, second]
    assert (scheduler.busy, scheduler.slots.free) == (False, 1)
    waiting(scheduler, SHARED)
    assert [place.cached for place in scheduler.admit()] == [0]


def test_a_stop_token_ends_before_the_limit_does_and_each_token_is_told() -> None:
    heard: list[Piece] = []
    request = Sequence("r", [1, 2], SamplingParams(), frozenset([9]), limit=2, on_token=heard.append)
    assert (request.length, request.pending, request.pending_ids) == (2, 2, [1, 2])
    assert [request.accept(5, -0.5, version=3), request.accept(9, -0.25, version=3)] == [None, "stop"]
    assert heard == [Piece([5], [-0.5], 3), Piece([9], [-0.25], 3)]
    assert (request.length, request.cached, request.pending) == (4, 3, 1)
    assert request.result("stop") == Generation([5, 9], [-0.5, -0.25], "stop", request.spans)


def test_the_draws_of_a_request_follow_from_its_seed() -> None:
    numbers = torch.rand(2, generator=torch.Generator().manual_seed(7)).tolist()
    request = sequence([1], SamplingParams(seed=7))
    assert [next(request.uniforms), next(request.uniforms)] == numbers


def test_requests_of_the_same_content_are_still_two() -> None:
    first, second = (Sequence("r", [1], SamplingParams(), frozenset(), limit=1) for _ in range(2))
    assert {first: "first", second: "second"}[second] == "second"
