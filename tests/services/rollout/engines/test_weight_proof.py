"""One verdict from digests and answers, by numbers: who is told from whom, and with how many tokens."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from trackway.rollout.engines.weight_proof import (
    HeldDigests,
    Judgement,
    compare_digests,
    judge,
    require_accepted,
)
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import Probe, TensorDigest, Verdict, WeightProof

SIGMA = 0.02
"""What bfloat16 does to a logprob of the demo's model."""


def proof(change: Sequence[float], rounding: float | None = SIGMA, dtype: str | None = None) -> WeightProof:
    """Of a version that moved each token's logprob from -2 by so much."""
    size = len(change)
    probe = Probe(
        token_ids=[1] * (size + 1),
        positions=list(range(1, size + 1)),
        logprobs=[-2.0 + move for move in change],
        previous=[-2.0] * size,
    )
    return WeightProof(probes=[probe], previous_version=6, rounding=rounding, dtype=dtype)


def changes(size: int, delta: float, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.choice((-1, 1)) * delta for _ in range(size)]


def answers(probe: Probe, share: float, noise: float = 0.0, seed: int = 1) -> list[list[float]]:
    """An engine that went this share of the way to the new version: 1 is new, 0 old, -1 the one before that."""
    generator = random.Random(seed)
    return [
        [
            old + share * (new - old) + generator.gauss(0.0, noise)
            for new, old in zip(probe.logprobs, probe.previous, strict=True)
        ]
    ]


def verdict(published: WeightProof, share: float, noise: float = 0.0, dtype: str = "bfloat16") -> Verdict:
    return judge(published, dtype, answers(published.probes[0], share, noise)).verdict


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1.0, Verdict.ROUNDED),
        (0.9, Verdict.ROUNDED),
        (0.5, Verdict.WRONG),
        (0.1, Verdict.STALE),
        (0.0, Verdict.STALE),
        (-1.0, Verdict.WRONG),
    ],
)
def test_an_engine_is_as_new_as_its_answers(share: float, expected: Verdict) -> None:
    assert verdict(proof(changes(512, 0.1)), share, SIGMA) is expected


@pytest.mark.parametrize(
    ("size", "delta", "new", "old"),
    [
        (512, 0.02, Verdict.ROUNDED, Verdict.STALE),
        (512, 0.002, Verdict.INDISTINGUISHABLE, Verdict.INDISTINGUISHABLE),
        (8192, 0.005, Verdict.ROUNDED, Verdict.STALE),
        (64, 0.005, Verdict.INDISTINGUISHABLE, Verdict.INDISTINGUISHABLE),
        (64, 0.06, Verdict.ROUNDED, Verdict.STALE),
    ],
)
def test_n_tokens_tell_versions_apart_that_differ_by_12_roundings_over_the_root_of_n(
    size: int, delta: float, new: Verdict, old: Verdict
) -> None:
    published = proof(changes(size, delta))

    assert (verdict(published, 1.0, SIGMA), verdict(published, 0.0, SIGMA)) == (new, old)


def test_the_interval_is_right_for_all_but_few_of_many_engines() -> None:
    """Versions just far enough apart: neither is ever taken for the other."""
    published = proof(changes(512, 0.0145))
    verdicts = {
        share: {
            judge(published, "bfloat16", answers(published.probes[0], share, SIGMA, seed)).verdict
            for seed in range(500)
        }
        for share in (1.0, 0.0)
    }

    assert verdicts[1.0] <= {Verdict.ROUNDED, Verdict.INDISTINGUISHABLE}
    assert verdicts[0.0] <= {Verdict.STALE, Verdict.INDISTINGUISHABLE}


def test_however_far_off_the_nearness_of_versions_is_that_rounding_drowns_nothing_is_decided() -> None:
    published = proof(changes(512, 1e-5))
    drowned = answers(published.probes[0], -999.0)  # off by 0.01: all of it along the change

    judgement = judge(published, "bfloat16", drowned)

    assert judgement.nearness == pytest.approx(-999.0)
    assert judgement.verdict is Verdict.INDISTINGUISHABLE


@pytest.mark.parametrize(("delta", "expected"), [(4.2, Verdict.ROUNDED), (3.8, Verdict.INDISTINGUISHABLE)])
def test_an_engine_of_a_narrower_type_may_lag_behind_by_all_of_its_rounding(delta: float, expected: Verdict) -> None:
    published = proof(changes(512, delta * SIGMA), dtype="float32")

    assert verdict(published, 1.0 - 1 / delta) is expected
    assert verdict(published.model_copy(update={"dtype": "bfloat16"}), 1.0) is Verdict.ROUNDED


def test_one_token_that_changed_alone_decides_nothing() -> None:
    published = proof([0.0] * 100 + [0.3])

    assert verdict(published, 1.0) is verdict(published, 0.9, SIGMA) is Verdict.INDISTINGUISHABLE


def test_the_numbers_are_those_of_a_regression_through_the_origin() -> None:
    published = proof([0.1, -0.2, 0.2])
    got = [[-1.88, -2.15, -1.85]]  # moved by 0.12, -0.15, 0.15: slope (0.012 + 0.03 + 0.03) / 0.09

    judgement = judge(published.model_copy(update={"rounding": None}), "bfloat16", got)

    slope = 0.8
    error = 1.5 * math.hypot(0.1 * 0.04 / (1 - 1 / 9), 0.2 * -0.01 / (1 - 4 / 9), 0.2 * -0.01 / (1 - 4 / 9)) / 0.09
    assert judgement.nearness == pytest.approx(slope)
    assert judgement.error == pytest.approx(error)
    assert judgement.off == pytest.approx(math.sqrt((0.02**2 + 0.05**2 + 0.05**2) / 3))
    assert judgement.tokens == 3


def test_the_error_is_at_least_what_the_publisher_measured_as_rounding() -> None:
    judgement = judge(proof(changes(100, 0.1)), "bfloat16", answers(proof(changes(100, 0.1)).probes[0], 1.0))

    assert judgement.error == pytest.approx(1.5 * SIGMA / (0.1 * 10))
    assert judge(proof(changes(100, 0.1)), "float32", answers(proof(changes(100, 0.1)).probes[0], 1.0)).error == (
        pytest.approx(0.0, abs=1e-12)
    )


def test_versions_that_do_not_differ_are_no_failure() -> None:
    assert verdict(proof([0.0] * 50), 1.0, SIGMA) is Verdict.INDISTINGUISHABLE


@pytest.mark.parametrize(
    ("dtype", "rounding", "off", "expected"),
    [
        ("float32", SIGMA, 9e-4, Verdict.INDISTINGUISHABLE),
        ("float32", SIGMA, 1.1e-3, Verdict.WRONG),
        ("bfloat16", SIGMA, 0.079, Verdict.INDISTINGUISHABLE),
        ("bfloat16", SIGMA, 0.081, Verdict.WRONG),
        ("bfloat16", None, 0.149, Verdict.INDISTINGUISHABLE),
        ("bfloat16", None, 0.151, Verdict.WRONG),
    ],
)
def test_without_a_version_before_answers_must_fit_within_the_rounding_of_the_type(
    dtype: str, rounding: float | None, off: float, expected: Verdict
) -> None:
    published = WeightProof(
        probes=[Probe(token_ids=[1, 2, 3], positions=[1, 2], logprobs=[-1.0, -2.0])], rounding=rounding
    )

    judgement = judge(published, dtype, [[-1.0 + off, -2.0 - off]])

    assert (judgement.verdict, judgement.off) == (expected, pytest.approx(off))


@pytest.mark.parametrize("scored", [[], [[]], [[-1.0, math.nan]], [[-1.0, -math.inf]]])
@pytest.mark.parametrize("digests", [None, HeldDigests(right=("a",), published=1)])
def test_answers_that_are_missing_or_no_numbers_are_wrong(
    scored: list[list[float]], digests: HeldDigests | None
) -> None:
    published = WeightProof(probes=[Probe(token_ids=[1, 2, 3], positions=[1, 2], logprobs=[-1.0, -2.0])])

    assert judge(published, "bfloat16", scored, digests).verdict is Verdict.WRONG


@pytest.mark.parametrize("digests", [None, HeldDigests(right=("a",), published=2)], ids=["none", "one of two"])
def test_digests_that_an_engine_does_not_show_prove_nothing_without_answers(digests: HeldDigests | None) -> None:
    published = WeightProof(digests=[TensorDigest(name=name, dtype="float32", sha256={}) for name in ("a", "b")])

    judgement = judge(published, "float32", [], digests)

    shown = 0 if digests is None else 1
    assert judgement.verdict is Verdict.WRONG
    assert judgement.reason == f"it scored no token, and showed {shown} of 2 tensors by digest"


def test_infinite_answers_are_wrong_beside_a_version_before() -> None:
    published = proof([0.1, -0.1, 0.2])

    assert judge(published, "float32", [[-math.inf, -math.inf, math.inf]]).verdict is Verdict.WRONG


def test_a_publisher_whose_own_logprobs_are_no_numbers_proves_nothing() -> None:
    published = proof([math.nan] * 10)

    assert judge(published, "bfloat16", [[-2.0] * 10]).verdict is Verdict.WRONG
    assert judge(published, "bfloat16", [[-2.0] * 10], HeldDigests(("a",), published=1)).verdict is Verdict.WRONG


def test_an_engine_with_a_shorter_context_is_judged_by_what_it_can_score() -> None:
    published = proof(changes(512, 0.1))
    [scored] = answers(published.probes[0], 1.0, SIGMA)

    judgement = judge(published, "bfloat16", [scored[:200]])

    assert (judgement.verdict, judgement.tokens) == (Verdict.ROUNDED, 200)


def test_answers_that_no_bit_of_has_changed_are_stale_however_little_the_versions_differ() -> None:
    published = proof(changes(100, 1e-5), dtype="bfloat16")
    scored = answers(published.probes[0], 0.0, SIGMA)
    older = answers(proof(changes(100, 0.1)).probes[0], -1.0, SIGMA)
    changed = [[*scored[0][:-1], math.nextafter(scored[0][-1], 0.0)]]

    assert judge(published, "bfloat16", scored, before=scored).verdict is Verdict.STALE
    assert judge(published, "bfloat16", scored, before=changed).verdict is Verdict.INDISTINGUISHABLE
    assert judge(published, "bfloat16", scored).verdict is Verdict.INDISTINGUISHABLE
    coarse = proof(changes(100, 0.1), dtype="bfloat16")
    assert judge(coarse, "bfloat16", older, before=older).verdict is Verdict.STALE


def test_unchanged_answers_are_right_when_versions_are_equal_or_differ_below_the_engines_type() -> None:
    equal = proof([0.0] * 100, dtype="bfloat16")
    below = proof(changes(100, 1e-5), dtype="float32")
    for published in (equal, below):
        scored = answers(published.probes[0], 0.0, SIGMA)
        assert judge(published, "bfloat16", scored, before=scored).verdict is Verdict.INDISTINGUISHABLE


def test_digests_sort_tensors_into_right_old_and_other() -> None:
    published = {"a": "a2", "b": "b2", "c": "c2", "d": "same"}
    before = {"a": "a1", "b": "b1", "c": "c1", "d": "same"}

    held = compare_digests({"a": "a2", "b": "b1", "c": "c0", "d": "same", "unknown": "x"}, published, before)

    assert held == HeldDigests(right=["a", "d"], old=["b"], other=["c"], unchanged=1, published=4)
    assert not held.complete
    assert compare_digests(published, published, before).complete


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"a": "a2", "b": "b2", "n": "n"}, Verdict.PROVEN),
        ({"a": "a1", "b": "b1", "n": "n"}, Verdict.STALE),
        ({"a": "a2", "b": "b1", "n": "n"}, Verdict.WRONG),
        ({"a": "b2", "b": "a2", "n": "n"}, Verdict.WRONG),
        ({"a": "a0", "b": "b0", "n": "n0"}, Verdict.WRONG),
        ({"a": "a1"}, Verdict.STALE),
        ({"a": "a2", "b": "b2"}, Verdict.INDISTINGUISHABLE),
    ],
    ids=["new", "old", "one-left-out", "two-swapped", "another-run", "only-one-is-told-and-old", "not-all-are-told"],
)
def test_digests_decide_where_answers_cannot(held: dict[str, str], expected: Verdict) -> None:
    published = proof(changes(100, 1e-5))
    digests = compare_digests(held, {"a": "a2", "b": "b2", "n": "n"}, {"a": "a1", "b": "b1", "n": "n"})

    judgement = judge(published, "bfloat16", answers(published.probes[0], 1.0, SIGMA), digests)

    assert judgement.verdict is expected


def test_right_tensors_with_answers_of_another_model_are_wrong() -> None:
    published = proof(changes(100, 0.01))
    scored = [[logprob + 0.3 for logprob in answers(published.probes[0], 1.0)[0]]]

    judgement = judge(published, "bfloat16", scored, HeldDigests(("a",), published=1))

    assert judgement.verdict is Verdict.WRONG
    assert "its tensors are right, and its logprobs off by 0.3 (at most 0.08)" in judgement.reason


def test_refusals_say_which_and_name_the_version_that_still_answers() -> None:
    published = proof(changes(512, 0.1))
    folder = Path("/weights/7")

    def refused(judgement: Judgement) -> TrackwayError:
        with pytest.raises(TrackwayError) as raised:
            require_accepted(judgement, published, 7, folder)
        return raised.value

    stale = refused(judge(published, "float32", answers(published.probes[0], 0.0)))
    wrong = refused(judge(published, "float32", [], compare_digests({"a": "1", "b": "2"}, {"a": "3", "b": "4"})))

    assert (stale.code, stale.detail["verdict"]) == (ErrorCode.WEIGHTS_STALE, "stale")
    assert stale.message.startswith(
        "expected an engine with weights version 7 from /weights/7, got one that still has version 6 or an older"
    )
    assert (wrong.code, wrong.detail["verdict"]) == (ErrorCode.WEIGHTS_CORRUPT, "wrong")
    assert "got other weights: a, b: other than published; publish" in wrong.message


def test_accepted_weights_are_described_in_one_line() -> None:
    published = proof(changes(100, 0.1))
    digests = compare_digests({"a": "x"}, {"a": "x", "b": "y"})

    judgement = judge(published, "bfloat16", answers(published.probes[0], 1.0), digests)

    assert require_accepted(judgement, published, 7, Path("w")) is judgement
    assert judgement.summary() == "rounded (1 of 2 tensors by digest, 100 tokens off by 0, nearness 1 +- 0.03)"


def test_weights_of_which_a_load_changed_a_part_are_wrong_and_not_stale() -> None:
    published = proof(changes(512, 0.00004))
    scored = answers(published.probes[0], 1.0, SIGMA)

    found = [judge(published, "bfloat16", scored, HeldDigests(old=["a"], moved=moved)).verdict for moved in (0, 1)]

    assert found == [Verdict.STALE, Verdict.WRONG]
