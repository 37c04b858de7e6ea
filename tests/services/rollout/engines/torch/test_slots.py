"""Where a prompt is placed: exact slots and exact counts of reused tokens."""

from trackway.rollout.engines.torch.scheduler import SlotAllocation, SlotTable

PROMPT = list(range(10, 30))


def filled(table: SlotTable, tokens: list[int]) -> int:
    """A finished request's slot that holds `tokens`."""
    allocation = table.allocate(tokens)
    assert allocation is not None
    table.commit(allocation.slot, len(tokens))
    table.release(allocation.slot, tokens)
    return allocation.slot


def test_a_prompt_that_extends_a_free_slot_takes_it_over() -> None:
    table = SlotTable(slots=3, max_len=64)
    slot = filled(table, PROMPT)
    assert table.allocate([*PROMPT, 1, 2]) == SlotAllocation(slot, cached=20, source=slot)
    assert table.free == 2


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    table = SlotTable(slots=1, max_len=64)
    slot = filled(table, PROMPT)
    assert table.allocate(PROMPT) == SlotAllocation(slot, cached=19, source=slot)


def test_a_prompt_that_shares_a_beginning_copies_it_and_leaves_the_source_alone() -> None:
    table = SlotTable(slots=2, max_len=64)
    source = filled(table, PROMPT)
    assert table.allocate([*PROMPT[:15], 1]) == SlotAllocation(1 - source, cached=15, source=source)
    assert table.allocate([*PROMPT, 1]) == SlotAllocation(source, cached=20, source=source)


def test_a_prompt_waits_while_its_beginning_is_being_computed_and_then_copies_it() -> None:
    table = SlotTable(slots=2, max_len=64)
    leader = table.allocate(PROMPT)
    assert leader is not None
    assert table.allocate(PROMPT) is None
    table.commit(leader.slot, len(PROMPT))
    assert table.allocate(PROMPT) == SlotAllocation(1 - leader.slot, cached=19, source=leader.slot)


def test_a_short_shared_beginning_is_not_waited_for() -> None:
    table = SlotTable(slots=2, max_len=64)
    table.allocate(PROMPT)
    assert table.allocate([*PROMPT[:7], 1]) is not None


def test_the_slot_released_first_is_given_away_first() -> None:
    table = SlotTable(slots=2, max_len=64)
    first = filled(table, PROMPT)
    second = filled(table, [1, 2, 3])
    assert first != second
    assert table.allocate([5, 6, 7]) == SlotAllocation(first, cached=0, source=first)
    assert table.allocate([1, 2, 3, 4]) == SlotAllocation(second, cached=3, source=second)


def test_overwriting_a_longer_slot_in_place_keeps_only_the_shared_beginning() -> None:
    table = SlotTable(slots=1, max_len=64)
    slot = filled(table, PROMPT)
    assert table.allocate([*PROMPT[:12], 1, 2, 3]) == SlotAllocation(slot, cached=12, source=slot)


def test_nothing_computed_before_forgetting_is_reused_not_even_by_a_request_that_runs_on() -> None:
    table = SlotTable(slots=3, max_len=64)
    filled(table, PROMPT)
    running = table.allocate([7, *PROMPT])
    assert running is not None
    table.commit(running.slot, 21)
    table.reset_prefix_cache()
    table.release(running.slot, [7, *PROMPT])
    for prompt in ([*PROMPT, 1], [7, *PROMPT, 1]):
        allocation = table.allocate(prompt)
        assert allocation is not None and allocation.cached == 0


def test_what_is_computed_after_forgetting_is_reused_again() -> None:
    table = SlotTable(slots=1, max_len=64)
    filled(table, PROMPT)
    table.reset_prefix_cache()
    slot = filled(table, PROMPT)
    assert table.allocate([*PROMPT, 1]) == SlotAllocation(slot, cached=20, source=slot)
