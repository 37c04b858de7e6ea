"""Each policy loss, its gradient and its statistics against a loop over tokens in plain Python."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch

from tests.services.learner.test_off_policy_update import sampled, weights
from tests.services.trainer.learner_settings import learner_config
from trackway.learner.algorithm import Aggregation
from trackway.learner.learner import Learner
from trackway.learner.policy_losses import POLICY_LOSSES, SELECTIONS, LossInputs
from trackway.run_config import resolve
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import Trajectory

Rollout = Callable[..., Trajectory]

LOW, HIGH, BETA, TAU_POS, TAU_NEG = 0.2, 0.3, 0.4, 1.5, 2.5
MASK = [[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]]
LOGP = [[-1.0, -0.5, 9.0, -2.0], [7.0, -0.25, -1.5, 3.0], [-0.75, 5.0, 1.0, -3.0]]
OLD = [[-1.1, -0.4, 1.0, -2.5], [2.0, -0.5, -0.25, 8.0], [-0.875, 1.0, 4.0, -4.0]]
"""Log ratios 0.1, -0.1, 0.5 | 0.25, -1.25 | 0.125, 1; what the mask hides is absurd on purpose."""
A = [0.5, -2.0, 1.5]
DUAL, KL_COEF = 1.5, 0.25
SELECTED = [[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
"""What clip_cov and kl_cov treat apart; a place that the mask hides is among them."""
WEIGHTS = [[0.5, 2.0, 3.0, 1.5], [9.0, 0.25, 1.25, 9.0], [0.75, 9.0, 9.0, 1.0]]

Token = tuple[float, float, float]
"""The loss of a token, its derivative by the token's logprob, and whether it is clipped."""


def ppo_like(advantage: float, ratio: float) -> Token:
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    plain, clipped = -advantage * ratio, -advantage * bounded
    return (clipped, 0.0, 1.0) if clipped > plain else (plain, plain, 0.0)


def gspo(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    return [ppo_like(a, math.exp(fmean(logs))) for _ in logs]


def sapo(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    tau = TAU_POS if a > 0 else TAU_NEG
    gates = [1 / (1 + math.exp(-tau * (math.exp(d) - 1))) for d in logs]
    return [(-a * 4 / tau * g, -a * 4 * g * (1 - g) * math.exp(d), 0.0) for g, d in zip(gates, logs, strict=True)]


def cispo(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    factors = [min(max(math.exp(d), 1 - LOW), 1 + HIGH) for d in logs]
    pairs = zip(factors, logp, logs, strict=True)
    return [(-f * a * p, -f * a, float(not 1 - LOW <= math.exp(d) <= 1 + HIGH)) for f, p, d in pairs]


def gpg(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    return [(-a * p, -a, 0.0) for p in logp]


def dro(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    return [(-(a * p - BETA / 2 * d**2), -(a - BETA * d), 0.0) for p, d in zip(logp, logs, strict=True)]


def truncated(a: float, d: float, p: float, *, trusted: bool) -> Token:
    ratio = min(math.exp(d), DUAL)
    return (-a * ratio * p, -a * ratio, 0.0) if trusted else (0.0, 0.0, 1.0)


def dppo_tv(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    tokens = []
    for d, p in zip(logs, logp, strict=True):
        change = math.exp(p) - math.exp(p - d)
        tokens.append(truncated(a, d, p, trusted=change <= HIGH / 4 if a > 0 else change >= -LOW / 4))
    return tokens


def dppo_kl(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    tokens = []
    for d, p in zip(logs, logp, strict=True):
        new, old = math.exp(p), math.exp(p - d)
        kl = old * math.log(old / new) + (1 - old) * math.log((1 - old + 1e-8) / (1 - new + 1e-8))
        moves_as_wished = new > old if a > 0 else new < old
        tokens.append(truncated(a, d, p, trusted=not (moves_as_wished and kl > (HIGH / 60 if a > 0 else LOW / 20))))
    return tokens


RANGE = {"dppo_tv": (LOW / 4, HIGH / 4), "dppo_kl": (LOW / 20, HIGH / 60)}
"""Clip ranges of losses whose unit is not the ratio; each leaves some tokens out."""


def rows() -> list[tuple[float, list[float], list[float], list[float], list[int]]]:
    """Of each trajectory: advantage, log ratios, logprobs and weights of its model tokens, and their columns."""
    result = []
    for row in range(3):
        columns = [t for t in range(4) if MASK[row][t]]
        logs = [LOGP[row][t] - OLD[row][t] for t in columns]
        result.append((A[row], logs, [LOGP[row][t] for t in columns], [WEIGHTS[row][t] for t in columns], columns))
    return result


def computed(mode: str, agg_mode: str, *, weighted: bool) -> tuple[float, list[list[float]], dict[str, float]]:
    low, high = RANGE.get(mode, (LOW, HIGH))
    config = learner_config(
        "m",
        **{"bypass_mode": False, "loss_mode": mode, "dro_beta": BETA, "tau_pos": TAU_POS, "tau_neg": TAU_NEG},
        **{"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": DUAL, "ppo_kl_coef": KL_COEF},
    )
    mask = torch.tensor(MASK, dtype=torch.bool)
    logp = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logp,
        torch.tensor(OLD, dtype=torch.float64),
        torch.tensor(A, dtype=torch.float64).unsqueeze(-1),
        mask,
        Aggregation.over(mask, agg_mode),
        torch.tensor(WEIGHTS, dtype=torch.float64) if weighted else None,
        torch.tensor(SELECTED, dtype=torch.bool) if mode in SELECTIONS else None,
    )
    loss, stats = POLICY_LOSSES[mode](config, inputs)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert not any(value.requires_grad for value in stats.values())
    return float(loss.detach()), gradient.tolist(), {name: float(value) for name, value in stats.items()}


def nested(values: list[list[float]]) -> list[object]:
    return [pytest.approx(row, rel=1e-12, abs=1e-15) for row in values]


KL = -fmean(d for _, logs, *_ in rows() for d in logs)
BY_TOKEN = {
    **{"gspo": gspo, "sapo": sapo, "cispo": cispo, "gpg": gpg, "dro": dro},
    **{"dppo_tv": dppo_tv, "dppo_kl": dppo_kl},
}
PER_SEQUENCE = ("sapo",)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("agg_mode", ["token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("mode", BY_TOKEN)
def test_a_loss_of_tokens_and_its_gradient(mode: str, agg_mode: str, weighted: bool):
    loss, gradient, stats = computed(mode, agg_mode, weighted=weighted)

    expected, slopes, clipped = 0.0, [[0.0] * 4 for _ in MASK], []
    for row, (a, logs, logp, factors, columns) in enumerate(rows()):
        share = 1 / 7 if agg_mode == "token-mean" else 1 / 3
        share = 1 / 3 / len(logs) if mode in PER_SEQUENCE else share
        for (value, slope, clip), factor, column in zip(BY_TOKEN[mode](a, logs, logp), factors, columns, strict=True):
            scale = share * (factor if weighted else 1.0)
            expected += scale * value
            slopes[row][column] = scale * slope
            clipped.append(clip)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert gradient == nested(slopes)
    assert stats["ppo_kl"] == pytest.approx(KL)
    assert stats.get("pg_clipfrac", 0.0) == pytest.approx(fmean(clipped))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("agg_mode", ["token-mean", "seq-mean-token-sum"])
def test_the_geometric_mean_is_over_sequences_whatever_the_aggregation(agg_mode: str, weighted: bool):
    loss, gradient, stats = computed("geo_mean", agg_mode, weighted=weighted)

    expected, slopes = 0.0, [[0.0] * 4 for _ in MASK]
    above, below = [], []
    for row, (a, logs, _, factors, columns) in enumerate(rows()):
        bounded = [min(d, HIGH) if a > 0 else max(d, -LOW) for d in logs]
        weight = math.exp(fmean(map(math.log, factors))) if weighted else 1.0
        value = -a * math.exp(fmean(bounded)) * weight / 3
        expected += value
        for d, kept, column in zip(logs, bounded, columns, strict=True):
            slopes[row][column] = value / len(logs) if d == kept else 0.0
            outside = not -LOW <= d <= HIGH
            above.append(outside and a > 0)
            below.append(outside and a < 0)
    assert loss == pytest.approx(expected, rel=1e-9)
    assert gradient == [pytest.approx(row, rel=1e-9, abs=1e-15) for row in slopes]
    assert stats == pytest.approx(
        {"pg_clipfrac": fmean(above), "pg_clipfrac_lower": fmean(below), "ppo_kl": KL}, rel=1e-12
    )


def of_tokens(logp: list[list[float]], old: list[list[float]], advantages: list[list[float]]) -> LossInputs:
    """Rows of which all tokens are trained."""
    now, before, gains = (torch.tensor(values, dtype=torch.float64) for values in (logp, old, advantages))
    mask = torch.ones(now.shape, dtype=torch.bool)
    return LossInputs(now, before, gains, mask, Aggregation.over(mask, "token-mean"), None)


def test_the_mean_of_a_sequence_is_over_its_tokens_and_0_without_any():
    zeros = [[0.0, 0.0]] * 3
    inputs = of_tokens(zeros, zeros, zeros)._replace(mask=torch.tensor([[1, 1], [0, 1], [0, 0]], dtype=torch.bool))

    assert inputs.over_tokens(torch.tensor([[4.0, 9.0], [9.0, 4.0], [5.0, 5.0]])).tolist() == [[6.5], [4], [0]]
    assert inputs.over_tokens(torch.tensor([[4.0], [9.0], [5.0]])).tolist() == [[4], [9], [0]]


def test_the_geometric_mean_takes_the_mean_of_the_advantages_of_tokens():
    config = learner_config("m", bypass_mode=False, loss_mode="geo_mean")
    inputs = of_tokens([[-1.0, -1.0]], [[-1.0, -1.0]], [[3.0, 0.5]])

    assert float(POLICY_LOSSES["geo_mean"](config, inputs)[0]) == -1.75


def test_the_log_ratio_of_a_token_without_an_advantage_counts_as_0_in_the_geometric_mean():
    config = learner_config("m", bypass_mode=False, loss_mode="geo_mean")
    inputs = of_tokens([[-1.0, -1.0]], [[-1.5, -1.125]], [[0.0, 2.0]])
    inputs.logp.requires_grad_()

    loss, _ = POLICY_LOSSES["geo_mean"](config, inputs)
    loss.backward()

    assert loss.item() == pytest.approx(-math.exp(0.125 / 2), rel=1e-12)
    assert inputs.logp.grad is not None
    assert inputs.logp.grad.tolist() == [[0.0, pytest.approx(-math.exp(0.125 / 2) / 2, rel=1e-12)]]


def test_the_geometric_mean_of_weights_of_0_is_a_number():
    config = learner_config("m", bypass_mode=False, loss_mode="geo_mean")
    inputs = of_tokens([[-1.0, -1.0]], [[-1.0, -1.0]], [[3.0]])

    loss, _ = POLICY_LOSSES["geo_mean"](config, inputs._replace(weights=torch.zeros(1, 2, dtype=torch.float64)))

    assert float(loss) == pytest.approx(-3e-10)


def test_a_row_counts_in_the_geometric_mean_by_its_share_of_the_trajectory():
    config = learner_config("m", bypass_mode=False, loss_mode="geo_mean")
    inputs = of_tokens([[-1.0, -1.0]] * 2, [[-1.0, -1.0]] * 2, [[1.0]] * 2)
    parts = inputs._replace(agg=inputs.agg._replace(trajectory_tokens=torch.tensor([8, 2])))

    assert float(POLICY_LOSSES["geo_mean"](config, parts)[0]) == -(2 / 8 + 2 / 2) / 2


def test_a_small_negative_advantage_is_negative():
    inputs = of_tokens([[-10.0]], [[-1.0]], [[-0.5]])
    same = inputs._replace(old_logp=inputs.logp)
    config = learner_config("m", bypass_mode=False, clip_ratio=LOW, tau_pos=TAU_POS, tau_neg=TAU_NEG)

    loss, stats = POLICY_LOSSES["geo_mean"](config, inputs)

    assert float(loss) == pytest.approx(0.5 * math.exp(-LOW))
    assert (float(stats["pg_clipfrac"]), float(stats["pg_clipfrac_lower"])) == (0, 1)
    assert float(POLICY_LOSSES["sapo"](config, same)[0]) == pytest.approx(0.5 * 4 / TAU_NEG / 2)


def test_a_token_without_an_advantage_counts_as_clipped_on_neither_side():
    config = learner_config("m", bypass_mode=False, loss_mode="geo_mean")

    loss, stats = POLICY_LOSSES["geo_mean"](config, of_tokens([[0.0, 0.0]], [[-9.0, 9.0]], [[0.0]]))

    assert (float(loss), float(stats["pg_clipfrac"]), float(stats["pg_clipfrac_lower"])) == (0, 0, 0)


@pytest.mark.parametrize(
    ("logp", "old", "advantage", "bound"),
    [(0.0, math.log(0.5), 1.0, {"clip_ratio_high": 0.5}), (math.log(0.5), 0.0, -1.0, {"clip_ratio_low": 0.5})],
)
def test_a_token_whose_probability_moved_as_far_as_the_bound_is_trusted(
    logp: float, old: float, advantage: float, bound: dict[str, float]
):
    inputs = of_tokens([[logp]], [[old]], [[advantage]])
    beyond = {name: math.nextafter(value, 0) for name, value in bound.items()}

    clipped = [dppo("dppo_tv", inputs, keys)["pg_clipfrac"] for keys in (bound, beyond)]

    assert (math.exp(math.log(0.5)), clipped) == (0.5, [0.0, 1.0])


@pytest.mark.parametrize(("logp", "old", "advantage"), [(-0.5, -1.0, 1.0), (-1.0, -0.5, -1.0)])
def test_a_token_whose_kl_is_as_large_as_the_bound_is_trusted(logp: float, old: float, advantage: float):
    inputs = of_tokens([[logp]], [[old]], [[advantage]])
    new, before = inputs.logp.exp(), inputs.old_logp.exp()
    others = ((1 - before + 1e-8) / (1 - new + 1e-8)).log()
    kl = float(before * (inputs.old_logp - inputs.logp) + (1 - before) * others)
    name = "clip_ratio_high" if advantage > 0 else "clip_ratio_low"

    clipped = [dppo("dppo_kl", inputs, {name: bound})["pg_clipfrac"] for bound in (kl, math.nextafter(kl, 0))]

    assert clipped == [0.0, 1.0]


@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl"])
def test_a_token_without_an_advantage_is_bounded_as_one_of_a_negative_advantage(mode: str):
    keys = {"clip_ratio_low": 9.0, "clip_ratio_high": 0.01}

    assert dppo(mode, of_tokens([[-0.5]], [[-2.0]], [[0.0]]), keys)["pg_clipfrac"] == 0.0


def test_a_ratio_at_the_bound_does_not_count_as_above_it():
    ratio = float(torch.tensor(0.5, dtype=torch.float64).exp())
    keys = {"clip_ratio_high": 9.0, "clip_ratio_low": 9.0}
    inputs = of_tokens([[-0.5]], [[-1.0]], [[1.0]])

    told = [dppo("dppo_tv", inputs, {**keys, "clip_ratio_c": c}) for c in (ratio, math.nextafter(ratio, 0))]

    assert [stats["pg_clipfrac_lower"] for stats in told] == [0.0, 1.0]


def dppo(mode: str, inputs: LossInputs, keys: dict[str, float]) -> dict[str, float]:
    """Its statistics."""
    config = learner_config("m", bypass_mode=False, loss_mode=mode, **keys)
    return {name: float(value) for name, value in POLICY_LOSSES[mode](config, inputs)[1].items()}


def test_the_sequence_ratio_of_gspo_is_clamped_at_exp_10():
    config = learner_config("m", bypass_mode=False, loss_mode="gspo")
    mask, zeros = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    inputs = LossInputs(zeros + 50, zeros, torch.tensor([[-1.0]]), mask, Aggregation.over(mask, "token-mean"), None)

    loss, _ = POLICY_LOSSES["gspo"](config, inputs)

    assert float(loss) == pytest.approx(math.exp(10))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_a_loss_that_treats_selected_tokens_apart(mode: str, weighted: bool):
    loss, gradient, stats = computed(mode, "token-mean", weighted=weighted)

    expected, slopes, left_out, moved = 0.0, [[0.0] * 4 for _ in MASK], [], []
    for row, (a, logs, _, factors, columns) in enumerate(rows()):
        for d, factor, column in zip(logs, factors, columns, strict=True):
            is_selected, ratio = bool(SELECTED[row][column]), math.exp(d)
            if mode == "clip_cov":
                value, slope, _ = ppo_like(a, ratio)
                value, slope = (0.0, 0.0) if is_selected else (value, slope)
            else:
                value = -a * ratio + KL_COEF * abs(d) * is_selected
                slope = -a * ratio + KL_COEF * math.copysign(1, d) * is_selected
            scale = (factor if weighted else 1.0) / 7
            expected += scale * value
            slopes[row][column] = scale * slope
            left_out.append(is_selected)
            moved.append(abs(d))
    assert loss == pytest.approx(expected, rel=1e-12)
    assert gradient == nested(slopes)
    means = {"ppo_kl": KL, "pg_clipfrac": fmean(left_out)} if mode == "clip_cov" else {"ppo_kl": fmean(moved)}
    assert stats == pytest.approx(means)


def test_clip_cov_clips_a_small_ratio_of_a_negative_advantage():
    config = learner_config("m", bypass_mode=False, loss_mode="clip_cov", clip_ratio_low=LOW, clip_ratio_high=HIGH)
    inputs = of_tokens([[-2.25]], [[-1.0]], [[-2.0]])._replace(selected=torch.tensor([[False]]))

    assert float(POLICY_LOSSES["clip_cov"](config, inputs)[0]) == pytest.approx(2 * (1 - LOW))


def test_a_ratio_above_the_bound_counts_where_the_token_is_trusted():
    _, _, stats = computed("dppo_tv", "token-mean", weighted=False)

    # Ratios above 1.5 are exp(0.5) of the first row and exp(1) of the last; only the second keeps its probability.
    assert stats["pg_clipfrac_lower"] == pytest.approx(2 / 7)


def selection(mode: str, **keys: float) -> list[list[int]]:
    config = learner_config("m", bypass_mode=False, loss_mode=mode, clip_ratio=LOW, **keys)
    mask = torch.tensor(MASK, dtype=torch.bool)
    logp, old, a = (torch.tensor(values, dtype=torch.float64) for values in (LOGP, OLD, A))
    inputs = LossInputs(logp, old, a.unsqueeze(-1), mask, Aggregation.over(mask, "token-mean"), None)
    return SELECTIONS[mode](config, inputs, torch.Generator().manual_seed(0)).int().tolist()


# Over the 7 tokens the mean advantage is (3 x 0.5 - 2 x 2 + 2 x 1.5) / 7 = 1/14, the mean logprob -9/7. Covariances:
# 0.12, 0.34, -0.31 | -2.15, 0.44 | 0.77, -2.45; clipped are the tokens 0.5 and 1 above with A > 0 and -1.25 with A < 0.
@pytest.mark.parametrize(
    ("mode", "keys", "expected"),
    [
        ("kl_cov", {"kl_cov_ratio": 0.0002}, [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]),
        ("kl_cov", {"kl_cov_ratio": 0.43}, [[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]),
        (
            "clip_cov",
            {"clip_cov_ratio": 1, "clip_cov_lb": 0.2, "clip_cov_ub": 9},
            [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
        ),
        ("clip_cov", {"clip_cov_ratio": 1, "clip_cov_lb": 0.2, "clip_cov_ub": 0.5}, [[0, 1, 0, 0], [0] * 4, [0] * 4]),
        ("clip_cov", {"clip_cov_ratio": 1}, [[0] * 4] * 3),
    ],
)
def test_tokens_are_selected_by_the_covariance_of_advantage_and_logprob(
    mode: str, keys: dict[str, float], expected: list[list[int]]
):
    assert selection(mode, **keys) == expected


def test_a_covariance_at_a_bound_is_not_within_it():
    inputs = of_tokens([[-1.0, -3.0]], [[-1.0, -3.0]], [[4.0, 0.0]])  # about the means 2 and -2: 2 x 1 and -2 x -1
    draw, chosen = torch.Generator(), []
    for low, high in ((1.0, 3.0), (2.0, 3.0), (1.0, 2.0)):
        keys = {"clip_cov_ratio": 1.0, "clip_cov_lb": low, "clip_cov_ub": high}
        config = learner_config("m", bypass_mode=False, loss_mode="clip_cov", **keys)
        chosen.append(int(SELECTIONS["clip_cov"](config, inputs, draw).sum()))

    assert chosen == [2, 0, 0]


def test_a_ratio_of_1_is_not_clipped_whatever_the_advantage():
    config = learner_config(
        "m", bypass_mode=False, loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=-9.0, clip_cov_ub=9.0
    )
    inputs = of_tokens([[-1.0, -3.0]], [[-1.0, -3.0]], [[-4.0, 2.0]])

    assert SELECTIONS["clip_cov"](config, inputs, torch.Generator()).tolist() == [[True, True]]


def test_a_share_of_the_eligible_tokens_is_drawn_and_at_least_one():
    all_eligible = {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0}

    # Four tokens are not clipped, of seven.
    assert sum(map(sum, selection("clip_cov", clip_cov_ratio=1.0, **all_eligible))) == 4
    assert sum(map(sum, selection("clip_cov", clip_cov_ratio=0.43, **all_eligible))) == 3
    assert sum(map(sum, selection("clip_cov", clip_cov_ratio=0.0002, **all_eligible))) == 1


def test_bypass_mode_is_the_loss_of_its_loss_type():
    mask = torch.tensor(MASK, dtype=torch.bool)
    logp, old, a, weights = (torch.tensor(values, dtype=torch.float64) for values in (LOGP, OLD, A, WEIGHTS))
    inputs = LossInputs(logp, old, a.unsqueeze(-1), mask, Aggregation.over(mask, "token-mean"), weights)

    clipped, _ = POLICY_LOSSES["bypass_mode"](learner_config("m"), inputs)
    reinforced, stats = POLICY_LOSSES["bypass_mode"](learner_config("m", loss_type="reinforce"), inputs)

    expected = sum(-a * f * p for a, _, logp, factors, _ in rows() for p, f in zip(logp, factors, strict=True)) / 7
    assert float(reinforced) == pytest.approx(expected)
    assert float(stats["ppo_kl"]) == pytest.approx(KL)
    assert float(clipped) == float(POLICY_LOSSES["vanilla"](learner_config("m"), inputs)[0])


OWN = """
def squared(config, inputs):
    squares = (inputs.logp - inputs.old_logp) ** 2
    return inputs.total(config.actor.kl_loss_coef * squares), {"mine": inputs.token_mean(inputs.logp)}
"""


def test_an_own_function_is_a_loss(tmp_path: Path, tiny_model: Path, rollout: Rollout, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_losses.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    learner = Learner(learner_config(tiny_model, bypass_mode=False, loss_mode="own_losses:squared", kl_loss_coef=2.0))

    metrics = learner.update(sampled(rollout)).metrics

    assert metrics["actor/pg_loss"] == 0.0
    assert metrics["actor/mine"] < 0


def test_an_own_loss_that_cannot_be_loaded_is_an_error_before_the_model_loads():
    with pytest.raises(ValueError, match=r"loss_mode=no_such_module:f: .*No module named 'no_such_module'"):
        Learner(learner_config("no_such_model", bypass_mode=False, loss_mode="no_such_module:f"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", POLICY_LOSSES)
def test_an_update_does_not_depend_on_the_micro_batch_size(tiny_model: Path, rollout: Rollout, mode: str):
    outcomes = []
    for size in (1, 6):
        keys = {"loss_mode": mode, "dro_beta": BETA, "rollout_is": "token", "lr": 1e-3, "ppo_epochs": 2}
        keys |= {"bypass_mode": mode == "bypass_mode", "kl_cov_ratio": 0.2, "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}
        learner = Learner(learner_config(tiny_model, dtype="float64", micro_batch_size=size, **keys))
        metrics = learner.update(sampled(rollout)).metrics
        outcomes.append((metrics["actor/pg_loss"], weights(learner)))

    assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-9)
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "dro"}, "dro_beta: expected a positive number with loss_mo"),
        (
            {"actor_rollout_ref.actor.policy_loss.loss_mode": "vanila"},
            "loss_mode: expected one of vanilla, dppo_tv",
        ),
        (
            {"actor_rollout_ref.actor.policy_loss.loss_mode": "bypass_mode"},
            "loss_mode: expected another loss without algorithm.rollout_correction.bypass_mode, got bypass_mode",
        ),
        (
            {
                "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
                "algorithm.rollout_correction.bypass_mode": True,
            },
            "loss_mode: expected vanilla with algorithm.rollout_correction.bypass_mode=true, where loss_type is",
        ),
    ],
)
def test_a_loss_that_would_not_be_what_is_trained_is_refused(keys: dict[str, str | bool], problem: str):
    with pytest.raises(TrackwayError) as caught:
        resolve({**keys})

    assert problem in caught.value.message
