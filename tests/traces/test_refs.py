"""What a person types finds the one trace that is meant, or says why it does not."""

import pytest

from tests.traces.example_trace import ExampleTrace, MemoryStore
from trackway.system.user_error import UserError
from trackway.traces.refs import Choice, resolve

FIRST = ExampleTrace(rollout_n=0, trace_id="tr-" + "abcdef01" * 4)
SECOND = ExampleTrace(rollout_n=1, trace_id="tr-" + "abcdef02" * 4)
VALIDATION = ExampleTrace(rollout_n=0, validate=True, trace_id="tr-" + "0" * 32)
SHELF = MemoryStore(FIRST, SECOND, VALIDATION)


@pytest.mark.parametrize(
    ("ref", "example"),
    [
        ("tr-" + "abcdef01" * 4, FIRST),
        ("abcdef02" * 4, SECOND),
        ("ABCDEF02" * 4, SECOND),
        ("tr-abcdef01", FIRST),
        ("abcdef02", SECOND),
        ("000000", VALIDATION),
        ("s3/i17/n0", FIRST),
        ("s3/i17/n1", SECOND),
        ("val3/i17/n0", VALIDATION),
    ],
)
def test_ids_beginnings_of_ids_and_names_find_their_trace(ref: str, example: ExampleTrace) -> None:
    assert resolve(SHELF, ref).trace_id == example.trace_id


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("abcdef", "'abcdef' begins several trace ids: abcdef01.*, abcdef02.*; give more digits"),
        ("abcde", "expected a trace id .* got 'abcde'"),
        ("s3/i17", "expected a trace id .* got 's3/i17'"),
        ("123456", "no trace whose id begins with '123456'"),
        ("f" * 32, "no trace whose id begins with 'ffff"),
        ("s9/i17/n0", "no trace of s9/i17/n0; `trackway traces list --step 9`"),
    ],
)
def test_a_reference_without_one_trace_says_why(ref: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(SHELF, ref)


@pytest.mark.parametrize("index", ["django__django-11099", "hotpot/5a8b/n3", "007", "東京 1"])
def test_a_row_whose_index_is_text_is_found_by_it(index: str) -> None:
    example = ExampleTrace(rollout_n=2, trace_id="tr-" + "d" * 32)
    example.tags["sample_index"] = index
    shelf = MemoryStore(FIRST, example)

    assert resolve(shelf, f"s3/i{index}/n2").trace_id == example.trace_id
    assert Choice(sample_index=index, steps="3,4").pair(None, None) == (f"s3/i{index}/n0", f"s4/i{index}/n0")


def test_an_index_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="--sample-index: expected a whole number or 1 to 128 printable characters"):
        Choice(sample_index="", steps="3,4").pair(None, None)


def test_a_name_that_two_runs_share_asks_for_the_run() -> None:
    other_example = ExampleTrace(rollout_n=0, trace_id="tr-" + "b" * 32)
    other_example.tags["experiment_name"] = "other"
    shelf = MemoryStore(FIRST, other_example)
    with pytest.raises(UserError, match="s3/i17/n0 exists in several runs: other, tiny; add --experiment-name"):
        resolve(shelf, "s3/i17/n0")
    assert resolve(shelf, "s3/i17/n0", "other").trace_id == other_example.trace_id


def test_a_step_that_was_done_again_means_its_newest_trace() -> None:
    again = ExampleTrace(rollout_n=0, trace_id="tr-" + "c" * 32)
    assert resolve(MemoryStore(again, FIRST), "s3/i17/n0").trace_id == again.trace_id


@pytest.mark.parametrize(
    ("choice", "given", "pair"),
    [
        (Choice(), ("x", "y"), ("x", "y")),
        (Choice(sample_index=7, steps="1,10"), (None, None), ("s1/i7/n0", "s10/i7/n0")),
        (Choice(sample_index=7, steps="1, 10", rollout_n=2), (None, None), ("s1/i7/n2", "s10/i7/n2")),
        (Choice(sample_index=7, step=3, rollouts="0,2"), (None, None), ("s3/i7/n0", "s3/i7/n2")),
        (Choice(sample_index=0, steps="0,30", validate=True), (None, None), ("val0/i0/n0", "val30/i0/n0")),
    ],
)
def test_two_trajectories_can_be_chosen_by_id_or_by_place(
    choice: Choice, given: tuple[str | None, str | None], pair: tuple[str, str]
) -> None:
    assert choice.pair(*given) == pair


@pytest.mark.parametrize(
    ("choice", "given"),
    [
        (Choice(), (None, None)),
        (Choice(), ("x", None)),
        (Choice(sample_index=7), (None, None)),
        (Choice(sample_index=7), ("x", "y")),
        (Choice(steps="1,2"), ("x", "y")),
        (Choice(steps="1,2"), (None, None)),
        (Choice(sample_index=7, step=3), (None, None)),
        (Choice(sample_index=7, step=3, steps="1,2", rollouts="0,1"), (None, None)),
    ],
)
def test_any_other_choice_says_how_to_choose(choice: Choice, given: tuple[str | None, str | None]) -> None:
    with pytest.raises(UserError, match=r"expected two traces \(A B\), or --sample-index 7 --steps 1,10"):
        choice.pair(*given)


@pytest.mark.parametrize("steps", ["1", "1,2,3", "1,x"])
def test_a_choice_of_steps_is_two_numbers(steps: str) -> None:
    with pytest.raises(UserError, match="--steps: expected two numbers such as 1,10"):
        Choice(sample_index=7, steps=steps).pair(None, None)
