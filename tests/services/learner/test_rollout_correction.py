"""Weights, rejection and metrics of the off-policy correction, each against a loop over tokens in plain Python."""

import math
from statistics import fmean, pstdev, stdev

import pytest
import torch
from pydantic import JsonValue

from trackway.learner.rollout_correction import (
    correct,
    correction_metrics,
    loglinear_logprobs,
    loglinear_share,
    mean_weight,
)
from trackway.run_config.rollout_correction import RolloutCorrectionConfig

F64 = torch.float64
MASK = [[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]]
LOGP = [[-1.0, -0.5, 9.0, -2.0], [7.0, -0.25, -1.5, 3.0], [-0.75, 5.0, 1.0, 2.0]]
ROLLOUT = [[-1.5, -0.25, 1.0, -3.5], [2.0, -0.5, -0.25, 8.0], [-0.875, 1.0, 4.0, 6.0]]
"""Log ratios 0.5, -0.25, 1.5 | 0.25, -1.25 | 0.125; what the mask hides is absurd on purpose."""
RATIOS = [[0.5, -0.25, 1.5], [0.25, -1.25], [0.125]]


def with_guided_row() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`tensors`, and between them a row of a session whose tokens are all guided: nothing of it is trained."""
    logp, rollout, mask = tensors()
    absurd = torch.tensor([[4.0, 3.0, 2.0, 1.0]], dtype=F64)
    logp, rollout = (torch.cat([values[:1], row, values[1:]]) for values, row in ((logp, -absurd), (rollout, absurd)))
    return logp, rollout, torch.cat([mask[:1], torch.zeros_like(mask[:1]), mask[1:]])


def config(**keys: JsonValue) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig.model_validate(keys)


def tensors(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs, the sampler's and the mask; `scale` stretches the log ratios."""
    rollout = torch.tensor(ROLLOUT, dtype=F64)
    return rollout + scale * (torch.tensor(LOGP, dtype=F64) - rollout), rollout, torch.tensor(MASK, dtype=torch.bool)


def weights_of(keys: RolloutCorrectionConfig, scale: float = 1.0) -> list[list[float]]:
    """The weight of each model token, row by row; checks that all others are zero."""
    logp, rollout, mask = tensors(scale)
    weights = correct(keys, logp - rollout, mask).weights
    assert weights is not None
    assert not weights[~mask].any()
    return [row[kept].tolist() for row, kept in zip(weights, mask, strict=True)]


def kept_of(keys: RolloutCorrectionConfig) -> list[list[bool]]:
    logp, rollout, mask = tensors()
    kept = correct(keys, logp - rollout, mask).mask
    assert not kept[~mask].any()
    return [row[model].tolist() for row, model in zip(kept, mask, strict=True)]


def nested(rows: list[list[float]]) -> list[object]:
    return [pytest.approx(row, rel=1e-12) for row in rows]


def test_without_a_choice_there_are_no_weights_and_every_model_token_is_kept():
    logp, rollout, mask = tensors()

    correction = correct(config(), logp - rollout, mask)

    assert correction.weights is None
    assert torch.equal(correction.mask, mask)


@pytest.mark.parametrize(("threshold", "cap"), [(2.0, 2.0), (100.0, 100.0), (0.5, 0.5)])
def test_token_weights_are_the_ratios_truncated_from_above(threshold: float, cap: float):
    keys = config(rollout_is="token", rollout_is_threshold=threshold)

    assert weights_of(keys) == nested([[min(math.exp(d), cap) for d in row] for row in RATIOS])


@pytest.mark.parametrize(("threshold", "cap"), [(2.0, 2.0), (100.0, 100.0)])
def test_sequence_weights_are_the_product_of_the_ratios_on_every_token(threshold: float, cap: float):
    keys = config(rollout_is="sequence", rollout_is_threshold=threshold)

    assert weights_of(keys) == nested([[min(math.exp(sum(row)), cap)] * len(row) for row in RATIOS])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_icepop_sets_weights_outside_the_bounds_to_zero_and_keeps_the_tokens(level: str):
    keys = config(rollout_is=level, rollout_is_threshold="0.5_1.6")
    logs = RATIOS if level == "token" else [[sum(row)] * len(row) for row in RATIOS]

    expected = [[math.exp(d) if 0.5 <= math.exp(d) <= 1.6 else 0.0 for d in row] for row in logs]
    assert weights_of(keys) == nested(expected)
    assert all(all(row) for row in kept_of(keys))


@pytest.mark.parametrize(("scale", "log"), [(1000.0, 20.0), (-1000.0, -20.0)])
def test_log_ratios_are_clamped_at_20(scale: float, log: float):
    tokens = weights_of(config(rollout_is="token", rollout_is_threshold=1e30), scale)
    sequences = weights_of(config(rollout_is="sequence", rollout_is_threshold=1e30), scale)

    assert tokens[0][0] == pytest.approx(math.exp(log))
    assert sequences[0] == pytest.approx([math.exp(log)] * 3)


def test_normalised_token_weights_are_divided_by_their_mean_over_tokens():
    truncated = [[min(math.exp(d), 2.0) for d in row] for row in RATIOS]
    mean = fmean(value for row in truncated for value in row)

    weights = weights_of(config(rollout_is="token", rollout_is_batch_normalize=True))

    assert weights == nested([[value / mean for value in row] for row in truncated])


def test_normalised_sequence_weights_are_divided_by_their_mean_over_sequences():
    truncated = [min(math.exp(sum(row)), 2.0) for row in RATIOS]

    weights = weights_of(config(rollout_is="sequence", rollout_is_batch_normalize=True))

    assert weights == nested([[w / fmean(truncated)] * len(r) for w, r in zip(truncated, RATIOS, strict=True)])


def test_weights_that_are_all_zero_are_not_divided():
    keys = config(rollout_is="token", rollout_is_threshold="50_60", rollout_is_batch_normalize=True)

    assert weights_of(keys) == [[0.0] * len(row) for row in RATIOS]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_guided_row_does_not_count_in_the_mean_weight(level: str):
    logp, rollout, mask = with_guided_row()
    keys = config(rollout_is=level, rollout_is_batch_normalize=True)

    weights = correct(keys, logp - rollout, mask).weights

    assert weights is not None
    assert weights[1].tolist() == [0.0] * 4
    assert [row[kept].tolist() for row, kept in zip(weights, mask, strict=True) if kept.any()] == nested(
        weights_of(keys)
    )


def test_a_part_of_a_batch_has_the_weights_of_the_whole_given_its_mean():
    logp, rollout, mask = tensors()
    keys = config(rollout_is="token", rollout_is_batch_normalize=True)
    mean = mean_weight(keys, logp - rollout, mask)

    parts = [correct(keys, (logp - rollout)[row], mask[row], mean).weights for row in ([0], [1, 2])]

    whole = correct(keys, logp - rollout, mask).weights
    assert whole is not None
    assert torch.equal(torch.cat([part for part in parts if part is not None]), whole)


K = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}
OVER = {"seq_sum": sum, "seq_mean": fmean, "seq_max": max}


def measured(name: str) -> list[list[float]]:
    level, _, kind = name.rpartition("_")
    values = [[K[kind](d) for d in row] for row in RATIOS]
    return values if level == "token" else [[OVER[level](row)] * len(row) for row in values]


@pytest.mark.parametrize(
    ("name", "threshold", "low", "high"),
    [
        ("token_k1", "0.6_1.2", math.log(0.6), math.log(1.2)),
        ("token_k1", 1.4, -math.log(1.4), math.log(1.4)),
        ("token_k2", 0.1, -math.inf, 0.1),
        ("token_k3", 0.05, -math.inf, 0.05),
        ("seq_sum_k1", "0.1_2.0", math.log(0.1), math.log(2.0)),
        ("seq_sum_k2", 1.0, -math.inf, 1.0),
        ("seq_sum_k3", 1.0, -math.inf, 1.0),
        ("seq_mean_k1", "0.7_1.5", math.log(0.7), math.log(1.5)),
        ("seq_mean_k2", 0.4, -math.inf, 0.4),
        ("seq_mean_k3", 0.5, -math.inf, 0.5),
        ("seq_max_k2", 0.8, -math.inf, 0.8),
        ("seq_max_k3", 0.6, -math.inf, 0.6),
    ],
)
def test_rejection_keeps_what_is_measured_within_the_bounds(name: str, threshold: float | str, low: float, high: float):
    expected = [[low <= value <= high for value in row] for row in measured(name)]
    assert {kept for row in expected for kept in row} == {True, False}

    assert kept_of(config(rollout_rs=name, rollout_rs_threshold=threshold)) == expected


def test_k1_is_minus_log_r_so_asymmetrical_bounds_keep_the_reciprocal_ratios():
    """`lo_hi` = 0.2_1.1 keeps r in [1/1.1, 5]: not 0.29 and 0.78, which lie within 0.2 and 1.1."""
    kept = kept_of(config(rollout_rs="token_k1", rollout_rs_threshold="0.2_1.1"))

    assert kept == [[1 / 1.1 <= math.exp(d) <= 5.0 for d in row] for row in RATIOS]
    assert kept == [[True, False, True], [True, False], [True]]


def test_a_token_must_pass_every_criterion():
    names = {"token_k1": "0.2_1.3", "seq_sum_k3": "1.0"}
    keys = config(rollout_rs=",".join(names), rollout_rs_threshold=",".join(names.values()))
    alone = [kept_of(config(rollout_rs=name, rollout_rs_threshold=bound)) for name, bound in names.items()]

    kept = kept_of(keys)

    both = [[a and b for a, b in zip(*rows, strict=True)] for rows in zip(*alone, strict=True)]
    assert kept == both
    assert both not in alone


PAIRS = [[(LOGP[row][t], ROLLOUT[row][t]) for t in range(4) if MASK[row][t]] for row in range(3)]
PPL = [fmean(-p for p, _ in row) for row in PAIRS]
ROLLOUT_PPL = [fmean(-q for _, q in row) for row in PAIRS]
GAPS = [a - b for a, b in zip(PPL, ROLLOUT_PPL, strict=True)]
FLAT = [d for row in RATIOS for d in row]
ALWAYS = {
    "training_ppl": fmean(map(math.exp, PPL)),
    "training_log_ppl": fmean(PPL),
    "rollout_ppl": fmean(map(math.exp, ROLLOUT_PPL)),
    "rollout_log_ppl": fmean(ROLLOUT_PPL),
    "kl": -fmean(FLAT),
    "k3_kl": fmean(math.exp(d) - d - 1 for d in FLAT),
    "log_ppl_diff": fmean(GAPS),
    "log_ppl_abs_diff": fmean(map(abs, GAPS)),
    "log_ppl_diff_max": max(GAPS),
    "log_ppl_diff_min": min(GAPS),
    "ppl_ratio": fmean(map(math.exp, GAPS)),
    "chi2_token": fmean(math.exp(d) ** 2 for d in FLAT) - 1,
    "chi2_seq": fmean(math.exp(sum(row)) ** 2 for row in RATIOS) - 1,
}


def metrics_of(keys: RolloutCorrectionConfig) -> dict[str, float]:
    metrics = correction_metrics(keys, *tensors())
    assert all(name.startswith("rollout_corr/") for name in metrics)
    return {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


def test_the_divergences_are_always_there_and_nothing_else():
    assert metrics_of(config()) == pytest.approx(ALWAYS, rel=1e-12)


def weight_metrics(level: str, low: float, high: float, icepop: bool) -> dict[str, float]:
    """verl's `rollout_is_*`, token by token."""
    raw = [[math.exp(d) for d in row] for row in RATIOS]
    if level == "sequence":
        raw = [[math.exp(sum(row))] * len(row) for row in RATIOS]
    used = [[(w if low <= w <= high else 0.0) if icepop else min(w, high) for w in row] for row in raw]
    tokens, raw_tokens = [w for row in used for w in row], [w for row in raw for w in row]
    sequences, raw_sequences = [fmean(row) for row in used], [fmean(row) for row in raw]
    counted = raw_tokens if level == "token" else [row[0] for row in raw]
    extremes = tokens if level == "token" else counted
    metrics = {
        "mean": fmean(tokens),
        "max": max(extremes),
        "min": min(extremes),
        "std": pstdev(tokens),
        "ratio_fraction_high": fmean(w > high for w in counted),
        "ratio_fraction_low": fmean(w < low for w in counted),
        "eff_sample_size": 1 / fmean((w / fmean(tokens)) ** 2 for w in tokens),
        "seq_mean": fmean(sequences),
        "seq_std": stdev(sequences),
        "seq_max": max(sequences),
        "seq_min": min(sequences),
        "seq_max_deviation": max(abs(w - 1) for w in sequences),
        "seq_fraction_high": fmean(w > high for w in raw_sequences),
        "seq_fraction_low": fmean(w < low for w in raw_sequences),
    }
    if icepop:
        metrics["oob_ratio"] = fmean(w < low or w > high for w in raw_tokens)
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("threshold", "low", "high"), [(1.5, 1 / 1.5, 1.5), ("0.5_1.6", 0.5, 1.6)])
def test_weights_are_reported_with_verls_statistics(level: str, threshold: float | str, low: float, high: float):
    icepop = isinstance(threshold, str)

    metrics = metrics_of(config(rollout_is=level, rollout_is_threshold=threshold))

    assert metrics == pytest.approx(ALWAYS | weight_metrics(level, low, high, icepop), rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_are_reported_before_the_division_with_its_factor(level: str):
    metrics = metrics_of(config(rollout_is=level, rollout_is_batch_normalize=True))

    plain = weight_metrics(level, 0.5, 2.0, icepop=False)
    factor = plain["rollout_is_mean"] if level == "token" else plain["rollout_is_seq_mean"]
    assert metrics == pytest.approx(ALWAYS | plain | {"rollout_is_batch_norm_factor": factor}, rel=1e-12)


def test_no_weight_left_is_an_effective_sample_size_of_zero():
    metrics = metrics_of(config(rollout_is="token", rollout_is_threshold="50_60"))

    assert (metrics["rollout_is_eff_sample_size"], metrics["rollout_is_oob_ratio"]) == (0.0, 1.0)


def rejection_metrics(name: str, low: float | None, high: float) -> dict[str, float]:
    """verl's `rollout_rs_<name>_*`, token by token."""
    values, is_token = measured(name), name.startswith("token")
    tokens, sequences = [v for row in values for v in row], [fmean(row) for row in values]
    counted = tokens if is_token else sequences
    floor = -math.inf if low is None else low
    clamped = [min(max(v, 0.0 if low is None else low), high) for v in tokens]
    kept = [[floor <= v <= high for v in row] for row in values]
    metrics = {
        "mean": fmean(tokens),
        "max": max(counted),
        "min": min(counted),
        "fraction_high": fmean(v > high for v in counted),
        "fraction_low": fmean(v < floor for v in counted),
        "std": pstdev(clamped),
        "seq_mean": fmean(sequences),
        "seq_std": stdev(sequences),
        "seq_max": max(sequences),
        "seq_min": min(sequences),
        "seq_max_deviation": max(map(abs, sequences)),
        "seq_fraction_high": fmean(v > high for v in sequences),
        "masked_fraction": fmean(not k for row in kept for k in row),
        "seq_masked_fraction": fmean(not all(row) for row in kept),
    }
    if low is not None:
        metrics["seq_fraction_low"] = fmean(v < low for v in sequences)
    return {f"rollout_rs_{name}_{field}": value for field, value in metrics.items()}


@pytest.mark.parametrize(
    ("name", "threshold", "low", "high"),
    [
        ("token_k1", "0.6_1.2", math.log(0.6), math.log(1.2)),
        ("token_k3", 0.05, None, 0.05),
        ("seq_mean_k1", "0.7_1.5", math.log(0.7), math.log(1.5)),
        ("seq_sum_k2", 1.0, None, 1.0),
        ("seq_max_k3", 0.6, None, 0.6),
    ],
)
def test_rejection_is_reported_with_verls_statistics(name: str, threshold: float | str, low: float | None, high: float):
    expected = rejection_metrics(name, low, high)
    total = {
        f"rollout_rs_{share}": expected[f"rollout_rs_{name}_{share}"]
        for share in ("masked_fraction", "seq_masked_fraction")
    }

    metrics = metrics_of(config(rollout_rs=name, rollout_rs_threshold=threshold))

    assert metrics == pytest.approx(ALWAYS | expected | total, rel=1e-12)


def test_the_total_of_two_criteria_counts_each_token_once():
    metrics = metrics_of(config(rollout_rs="token_k1,seq_sum_k3", rollout_rs_threshold="0.2_1.3,1.0"))

    # token_k1 rejects -1.25, the sequence criterion the whole first row.
    assert metrics["rollout_rs_token_k1_masked_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_rs_seq_sum_k3_masked_fraction"] == pytest.approx(3 / 6)
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(4 / 6)
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)


def test_a_batch_of_one_sequence_has_no_deviation_between_sequences():
    logp, rollout, mask = (tensor[:1] for tensor in tensors())
    keys = config(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2)

    metrics = correction_metrics(keys, logp, rollout, mask)

    assert metrics["rollout_corr/rollout_is_seq_std"] == 0.0
    assert metrics["rollout_corr/rollout_rs_token_k1_seq_std"] == 0.0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k3"])
def test_a_guided_row_changes_no_metric(level: str, name: str):
    keys = config(rollout_is=level, rollout_is_batch_normalize=True, rollout_rs=name, rollout_rs_threshold=1.5)

    assert correction_metrics(keys, *with_guided_row()) == correction_metrics(keys, *tensors())


def test_a_mask_without_a_model_token_is_refused():
    logp, rollout, mask = tensors()

    with pytest.raises(ValueError, match="expected a model token in the mask, got none"):
        correction_metrics(config(), logp, rollout, torch.zeros_like(mask))


def test_the_share_of_the_trained_policy_follows_from_the_tokens_version():
    versions = torch.tensor([[7.0, 6.0, 4.0, 9.0]], dtype=F64)

    # (7 - v) / (8 - v), and none of a token that is not behind.
    assert loglinear_share(versions, 7.0).tolist() == [pytest.approx([0.0, 1 / 2, 3 / 4, 0.0])]
    assert loglinear_share(versions, 7.5).tolist() == [pytest.approx([1 / 3, 3 / 5, 7 / 9, 0.0])]


def test_estimated_logprobs_lie_between_the_samplers_and_the_trained_policys_without_a_gradient():
    logp = torch.tensor([[-1.0, -2.0, -3.0]], dtype=F64, requires_grad=True)
    rollout = torch.tensor([[-2.0, -4.0, -1.0]], dtype=F64)
    share = torch.tensor([[0.0, 0.5, 0.75]], dtype=F64)

    estimated = loglinear_logprobs(logp, rollout, share)

    assert estimated.tolist() == [[-2.0, -3.0, -2.5]]
    assert not estimated.requires_grad
