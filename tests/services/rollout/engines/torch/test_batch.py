"""What attends together: no padding, neighbours only, and little read for nothing."""

import torch

from trackway.rollout.engines.torch.decoder import Row, cut, prepare_batch

CPU = torch.device("cpu")


def singles(*places: tuple[int, int]) -> list[Row]:
    return [Row(slot, start, [7]) for slot, start in places]


def test_neighbours_of_like_length_are_one_part() -> None:
    assert cut(singles((3, 100), (4, 120), (5, 110))) == [range(3)]


def test_a_gap_in_the_slots_cuts() -> None:
    assert cut(singles((0, 9), (1, 9), (3, 9), (4, 9))) == [range(2), range(2, 4)]


def test_a_row_that_makes_the_others_read_too_much_for_nothing_cuts() -> None:
    assert cut(singles((0, 9), (1, 520), (2, 521))) == [range(2), range(2, 3)]  # 511 wasted; with the third, 512 + 1
    assert cut(singles((0, 9), (1, 522), (2, 522))) == [range(1), range(1, 3)]


def test_nothing_is_cut_into_nothing() -> None:
    assert cut([]) == []


def test_a_flat_batch_has_every_token_with_its_slot_and_position() -> None:
    layout = prepare_batch([Row(2, 5, [11]), Row(0, 0, [12, 13]), Row(1, 3, [14, 15, 16])], 1, CPU, torch.float32)
    assert layout.token_ids.tolist() == [11, 12, 13, 14, 15, 16]
    assert layout.slots.tolist() == [2, 0, 0, 1, 1, 1]
    assert layout.positions.tolist() == [5, 0, 1, 3, 4, 5]
    assert layout.last is not None and layout.last.tolist() == [0, 2, 5]


def test_a_run_sees_each_row_up_to_its_own_end() -> None:
    (run,) = prepare_batch(singles((4, 1), (5, 2)), 2, CPU, torch.float32).runs
    assert (run.first, run.last, run.slots, run.longest) == (0, 1, slice(4, 6), 3)
    assert run.mask[:, 0].isinf().tolist() == [[False, False, True]] * 2 + [[False, False, False]] * 2


def test_a_span_sees_its_slots_beginning_and_itself_causally() -> None:
    fresh, later = prepare_batch([Row(0, 0, [1, 2]), Row(1, 2, [3, 4])], 1, CPU, torch.float32).spans
    assert (fresh.first, fresh.last, fresh.end, fresh.mask) == (0, 1, 2, None)
    assert (later.first, later.last, later.end) == (2, 3, 4)
    assert later.mask is not None and later.mask.tolist() == [[True, True, True, False], [True, True, True, True]]
