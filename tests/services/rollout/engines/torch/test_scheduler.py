"""Who is admitted, in which order, and which requests are computed together."""

from rollout_models import continuation

from trackway.rollout.engines.torch.scheduler import Continuation, Scheduler
from trackway.wire.rollout import SamplingParams

SHARED = list(range(20))


def waiting(scheduler: Scheduler, *prompts: list[int]) -> list[Continuation]:
    requests = [continuation(prompt, SamplingParams(max_tokens=9)) for prompt in prompts]
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
    scheduler.leave(first)
    scheduler.admit()
    assert scheduler.running == [second, third]


def test_prefills_join_the_decoding_requests_as_far_as_the_budget_reaches() -> None:
    scheduler = Scheduler(slots=8, max_len=64, group_tokens=50)
    prompts = [[10 * n + i for i in range(length)] for n, length in enumerate((21, 3, 22, 25, 60))]
    long, short, longer, other, longest = waiting(scheduler, *prompts)
    one, two = waiting(scheduler, [99], [98])
    scheduler.admit()
    assert scheduler.groups() == [[one, two, long, short, longer], [other], [longest]]


def test_a_token_extends_the_span_of_its_version_or_opens_one() -> None:
    request = continuation([1, 2, 3], SamplingParams(max_tokens=3))
    reasons = [request.accept(token, -1.0, version) for token, version in ((5, 1), (6, 1), (7, 2))]
    assert reasons == [None, None, "length"]
    assert [(s.version, s.start, s.end) for s in request.spans] == [(1, 0, 2), (2, 2, 3)]
    assert (request.cached, request.pending_ids) == (5, [7])
