"""What a person types finds the one trace that is meant, or says why it does not."""

import pytest

from tests.traces.example_trace import ExampleTrace, MemoryStore
from trackway.system.process import UserError
from trackway.traces.refs import CompareOptions, resolve

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
    assert CompareOptions(sample_index=index, steps="3,4").references([]) == [f"s3/i{index}/n0", f"s4/i{index}/n0"]


def test_an_index_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="--sample-index: expected a whole number or 1 to 128 printable characters"):
        CompareOptions(sample_index="", steps="3,4").references([])


def test_a_name_that_two_runs_share_asks_for_the_run() -> None:
    other_example = ExampleTrace(rollout_n=0, trace_id="tr-" + "b" * 32)
    other_example.tags["experiment_name"] = "other"
    shelf = MemoryStore(FIRST, other_example)
    with pytest.raises(UserError, match="s3/i17/n0 exists in several runs: other, tiny; add --run"):
        resolve(shelf, "s3/i17/n0")
    assert resolve(shelf, "s3/i17/n0", "other").trace_id == other_example.trace_id


def test_a_step_that_was_done_again_means_its_newest_trace() -> None:
    again = ExampleTrace(rollout_n=0, trace_id="tr-" + "c" * 32)
    assert resolve(MemoryStore(again, FIRST), "s3/i17/n0").trace_id == again.trace_id


@pytest.mark.parametrize(
    ("choice", "given", "references"),
    [
        (CompareOptions(), ["x", "y"], ["x", "y"]),
        (CompareOptions(), ["x", "y", "z"], ["x", "y", "z"]),
        (CompareOptions(sample_index=7, steps="1,10"), [], ["s1/i7/n0", "s10/i7/n0"]),
        (CompareOptions(sample_index=7, steps="1, 10", rollout_n=2), [], ["s1/i7/n2", "s10/i7/n2"]),
        (CompareOptions(sample_index=7, steps="1-2,10,2"), [], ["s1/i7/n0", "s2/i7/n0", "s10/i7/n0"]),
        (CompareOptions(sample_index=7, step=3, rollouts="0-7"), [], [f"s3/i7/n{n}" for n in range(8)]),
        (CompareOptions(sample_index=0, steps="0,30", validate=True), [], ["val0/i0/n0", "val30/i0/n0"]),
    ],
)
def test_trajectories_are_chosen_by_id_or_by_place(
    choice: CompareOptions, given: list[str], references: list[str]
) -> None:
    assert choice.references(given) == references


@pytest.mark.parametrize(
    ("choice", "given"),
    [
        (CompareOptions(), []),
        (CompareOptions(), ["x"]),
        (CompareOptions(sample_index=7), []),
        (CompareOptions(sample_index=7), ["x", "y"]),
        (CompareOptions(steps="1,2"), ["x", "y"]),
        (CompareOptions(steps="1,2"), []),
        (CompareOptions(sample_index=7, step=3), []),
        (CompareOptions(sample_index=7, step=3, steps="1,2", rollouts="0,1"), []),
    ],
)
def test_any_other_choice_says_how_to_choose(choice: CompareOptions, given: list[str]) -> None:
    with pytest.raises(UserError, match=r"expected two traces or more, or --sample-index 7 --steps 1,10"):
        choice.references(given)


@pytest.mark.parametrize("steps", ["1,x", "1-", "-3", "a-b", ""])
def test_steps_are_numbers_and_ranges(steps: str) -> None:
    with pytest.raises(UserError, match=f"--steps: expected numbers such as 1,10 or 0-7, got '{steps}'"):
        CompareOptions(sample_index=7, steps=steps).references([])


@pytest.mark.parametrize(
    ("steps", "got"), [("1", "1"), ("1,1", "1"), ("0-16", "more than"), ("0-999999999999", "more")]
)
def test_a_page_has_two_to_sixteen_trajectories(steps: str, got: str) -> None:
    with pytest.raises(UserError, match=f"expected 2 to 16 trajectories to compare, got {got}"):
        CompareOptions(sample_index=7, steps=steps).references([])
    with pytest.raises(UserError, match="expected 2 to 16 trajectories to compare, got more than 16; name others"):
        CompareOptions().references(["x"] * 17)
