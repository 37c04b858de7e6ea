"""Each estimator against fractions worked out by hand, or a loop over tokens in plain Python."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from trackway.learner.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    estimate,
    generalized_advantages,
    per_trajectory,
    rewards_to_go,
    token_returns,
    token_rewards,
)
from trackway.learner.policy_losses import POLICY_LOSSES
from trackway.run_config import algorithm as algorithm_config
from trackway.run_config import policy as policy_config
from trackway.run_config import resolve
from trackway.run_config.algorithm import AlgorithmConfig
from trackway.wire.errors import TrackwayError

ROOT = Path(__file__).parents[3]
F64 = torch.float64
GROUPS = ["a", "b", "a", "c", "c", "a"]
"""A group of three between others, a group of one, and a pair of equal scores."""
SCORES = [2.0, 5.0, 1.0, 3.0, 3.0, 0.0]
MASK = [
    [1, 0, 0, 0, 0],
    [0, 0, 1, 0, 0],
    [1, 0, 1, 0, 0],
    [1, 1, 0, 0, 0],
    [1, 0, 1, 1, 1],
    [1, 1, 0, 1, 0],
]
"""1, 1, 2, 2, 4 and 3 tokens of the model, with observations between and before them; 13 in all."""
EPS = 1e-6


def tensor(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def inputs(
    scores: list[float] = SCORES,
    groups: list[str] = GROUPS,
    mask: list[list[int]] = MASK,
    components: Sequence[Mapping[str, float]] | None = None,
    **distribution: Any,
) -> AdvantageInputs:
    where = torch.tensor(mask, dtype=torch.bool)
    return AdvantageInputs(
        token_rewards(scores, where), where, groups, components or [{}] * len(scores), **distribution
    )


def advantages(name: str, given: AdvantageInputs | None = None, **keys: Any) -> torch.Tensor:
    return estimate(AlgorithmConfig.model_validate({"adv_estimator": name, **keys}), given or inputs())


def close(actual: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-12)


def whitened(values: list[float]) -> list[float]:
    """Values of the 13 tokens, less their mean, over the root of their unbiased variance + 1e-8."""
    scale = math.sqrt(stdev(values) ** 2 + 1e-8)
    return [(value - fmean(values)) / scale for value in values]


# Group a has the mean 1 and the unbiased standard deviation 1; by tokens its mean is (2 x 1 + 1 x 2 + 0 x 3) / 6 = 2/3.
BY_HAND: list[tuple[str, Mapping[str, bool], list[float]]] = [
    ("grpo", {}, [1 / (1 + EPS), 5 / (1 + EPS), 0, 0, 0, -1 / (1 + EPS)]),
    ("grpo", {"norm_adv_by_std_in_grpo": False}, [1, 5, 0, 0, 0, -1]),
    ("grpo_vectorized", {}, [1 / (1 + EPS), 5 / (1 + EPS), 0, 0, 0, -1 / (1 + EPS)]),
    ("grpo_vectorized", {"norm_adv_by_std_in_grpo": False}, [1, 5, 0, 0, 0, -1]),
    ("grpo_passk", {}, [1 / (1 + EPS), 0, 0, 0, 0, 0]),
    ("grpo_passk", {"norm_adv_by_std_in_grpo": False}, [1, 0, 0, 0, 0, 0]),
    ("rloo", {}, [3 / 2, 5, 0, 0, 0, -3 / 2]),
    ("rloo_vectorized", {}, [3 / 2, 0, 0, 0, 0, -3 / 2]),
    ("opo", {}, [4 / 3, 5, 1 / 3, 0, 0, -2 / 3]),
    ("gpg", {}, [6 / 5, 6, 0, 0, 0, -6 / 5]),
]


@pytest.mark.parametrize(("name", "keys", "expected"), BY_HAND)
def test_advantages_of_trajectories_worked_out_by_hand(name: str, keys: Mapping[str, bool], expected: list[float]):
    close(advantages(name, None, **keys), expected)


def test_pass_at_k_takes_the_lead_over_the_second_wherever_both_are():
    group = inputs([1.0, 7.0, 4.0, 4.0], ["a"] * 4, [[1]] * 4)

    # Squared distances from the mean 4 sum to 18, so the variance is 6.
    close(advantages("grpo_passk", group), [0, 3 / (math.sqrt(6) + EPS), 0, 0])


def test_a_group_of_one_leaves_those_after_it_their_advantages():
    given = inputs(
        [5.0, 1.0, 0.0], ["b", "a", "a"], [[1]] * 3, logp=torch.zeros(3, 1), sum_pi_squared=torch.full((3, 1), 2.0)
    )

    close(advantages("grpo_passk", given, norm_adv_by_std_in_grpo=False), [0, 1, 0])
    close(advantages("rloo_vectorized", given), [0, 1, -1])
    half = 1 / (2 + 1e-8)  # the weights are 1 - 2 + 2 = 1
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        close(advantages(name, given), [[5], [1 - half], [-half]])


def test_gpg_without_any_reward_is_all_zero_and_one_reward_counts_for_the_whole_batch():
    close(advantages("gpg", inputs([0.0, 0.0], ["a", "a"], [[1], [1]])), [0, 0])
    close(advantages("gpg", inputs([1.0, 0.0], ["a", "a"], [[1], [1]])), [1, -1])


def test_opo_of_a_group_whose_tokens_are_all_rejected_is_finite():
    given = inputs([1.0, 2.0], ["a", "a"], [[1], [1]])

    close(advantages("opo", given._replace(mask=torch.zeros(2, 1, dtype=torch.bool))), [1, 2])
    close(advantages("opo", given._replace(mask=torch.tensor([[False], [True]]))), [-1, 0])


def test_reinforce_plus_plus_with_a_baseline_is_whitened_over_tokens():
    # Centred scores 1, 5, 0, 0, 0, -1 on 1, 1, 2, 2, 4 and 3 tokens: mean 3/13, sum of squares 29.
    scale = math.sqrt((29 - 9 / 13) / 12 + 1e-8)

    close(advantages("reinforce_plus_plus_baseline"), [(x - 3 / 13) / scale for x in (1, 5, 0, 0, 0, -1)])


def test_whitening_one_token_or_none_divides_by_nothing():
    single_token = inputs([4.0], ["a"], [[0, 1]])

    close(advantages("reinforce_plus_plus_baseline", single_token), [0])
    pair = inputs([1.0, 0.0], ["a", "a"], [[1], [1]])  # centred to +-1/2, of variance 1/2
    close(advantages("reinforce_plus_plus_baseline", pair), [0.5 / math.sqrt(0.5 + 1e-8), -0.5 / math.sqrt(0.5 + 1e-8)])
    close(advantages("reinforce_plus_plus", single_token._replace(mask=torch.zeros(1, 2, dtype=torch.bool))), [[0, 0]])


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_reinforce_plus_plus_discounts_by_tokens_of_the_model_and_whitens(gamma: float):
    actual = advantages("reinforce_plus_plus", gamma=gamma)

    to_go = [score * gamma**left for score, row in zip(SCORES, MASK, strict=True) for left in reversed(range(sum(row)))]
    close(actual[torch.tensor(MASK, dtype=torch.bool)], whitened(to_go))


VALUED = inputs(
    [1.0, 2.0, -1.0],
    ["a", "b", "c"],
    [[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]],
    values=tensor([1 / 2, 9, 1 / 4, 1], [9, 0, 1, 9], [9, 9, 9, 1 / 2]),
)
"""Three, two and one token of the model with their values; observations between, before and after have the value 9."""


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        # From the right: 1 - 1 = 0; 1/2 - 1/4 + 1/4 x 0 = 1/4; 1/2 x 1/4 - 1/2 + 1/4 x 1/4 = -5/16.
        # Then 2 - 1 = 1 and 1/2 x 1 - 0 + 1/4 x 1 = 3/4; and -1 - 1/2.
        (0.5, 0.5, [[-5 / 16, 0, 1 / 4, 0], [0, 3 / 4, 1, 0], [0, 0, 0, -3 / 2]]),
        (1.0, 0.5, [[1 / 4 - 1 / 2 + 3 / 8, 0, 3 / 4, 0], [0, 1 + 1 / 2, 1, 0], [0, 0, 0, -3 / 2]]),
        # lam = 0: the reward and the next value less the own one; lam = 1: the rewards to go less the value.
        (1.0, 0.0, [[-1 / 4, 0, 3 / 4, 0], [0, 1, 1, 0], [0, 0, 0, -3 / 2]]),
        (1.0, 1.0, [[1 / 2, 0, 3 / 4, 0], [0, 2, 1, 0], [0, 0, 0, -3 / 2]]),
        (0.5, 1.0, [[1 / 4 - 1 / 2, 0, 1 / 4, 0], [0, 1, 1, 0], [0, 0, 0, -3 / 2]]),
        # gamma = 0: each token for itself.
        (0.0, 1.0, [[-1 / 2, 0, -1 / 4, 0], [0, 0, 1, 0], [0, 0, 0, -3 / 2]]),
    ],
)
def test_generalized_advantages_pass_over_observations(gamma: float, lam: float, expected: list[list[float]]):
    raw = generalized_advantages(VALUED, gamma, lam)
    config = AlgorithmConfig(adv_estimator="gae", gamma=gamma, lam=lam)

    close(raw, expected)
    values = [[1 / 2, 0, 1 / 4, 1], [0, 0, 1, 0], [0, 0, 0, 1 / 2]]
    returns = [[a + v for a, v in zip(*rows, strict=True)] for rows in zip(expected, values, strict=True)]
    close(token_returns(config, VALUED), returns)
    flat = [expected[0][0], *expected[0][2:], *expected[1][1:3], expected[2][3]]
    close(estimate(config, VALUED)[VALUED.mask], whitened(flat))


def test_with_a_weight_of_one_the_returns_of_gae_are_the_rewards_to_go_whatever_the_values():
    torch.manual_seed(0)
    mask = torch.rand(5, 9) < 0.6
    # Rewards outside the mask too, as at rejected tokens.
    given = inputs()._replace(rewards=torch.randn(5, 9, dtype=F64), mask=mask, values=torch.randn(5, 9))

    returns = token_returns(AlgorithmConfig(adv_estimator="gae", gamma=0.9), given)

    torch.testing.assert_close(returns, rewards_to_go(given.rewards, mask, 0.9), rtol=0, atol=1e-12)


def test_gae_of_a_single_token_and_of_none_is_zero_once_it_is_whitened():
    single_token = inputs([4.0], ["a"], [[0, 1]], values=tensor([0.0, 1.0]))

    close(advantages("gae", single_token), [[0, 0]])
    close(advantages("gae", single_token._replace(mask=torch.zeros(1, 2, dtype=torch.bool))), [[0, 0]])


def test_gae_without_a_value_model_says_what_it_needs():
    with pytest.raises(ValueError, match=r"expected the values of a value model for gae, .* critic\.enable=true"):
        advantages("gae")


def test_an_estimator_without_values_trains_them_towards_the_rewards_to_go():
    config = AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.5, lam=0.5)

    close(token_returns(config, VALUED), [[1 / 4, 0, 1 / 2, 1], [0, 1, 2, 0], [0, 0, 0, -1]])


def test_remax_takes_the_greedy_score_off_each_token_of_the_model():
    given = inputs(
        [2.0, 0.5], ["a", "a"], [[1, 0, 1], [0, 1, 0]], [{"reward_baseline": 0.75}, {"reward_baseline": 2.0}]
    )

    close(advantages("remax", given), [[1.25, 0, 1.25], [0, -1.5, 0]])
    # With a KL penalty of 1/4 at the first token, the tokens after it have the rewards that are still to come.
    penalised = given._replace(rewards=given.rewards - tensor([0.25, 0, 0], [0, 0, 0]))
    close(advantages("remax", penalised), [[1.0, 0, 1.25], [0, -1.5, 0]])


def test_remax_without_the_greedy_score_says_so():
    with pytest.raises(ValueError, match="expected the component 'reward_baseline' of each reward"):
        advantages("remax", inputs([1.0, 2.0], ["a", "a"], [[1], [1]], [{"reward_baseline": 1.0}, {}]))


def test_rewards_to_go_carry_what_stands_outside_the_mask_to_the_tokens_before_it():
    rewards = tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    mask = torch.tensor([[1, 0, 1, 1, 0]], dtype=torch.bool)

    # Backwards: 8 + 16 / 2 = 16, then 4 + 16 / 2 = 12, then 2 + 12 outside the mask, then 1 + 14 / 2.
    close(rewards_to_go(rewards, mask, 0.5), [[8, 0, 12, 16, 0]])


@pytest.mark.parametrize("by_std", [True, False])
def test_gdpo_normalises_each_reward_in_its_group_before_their_weighted_sum_is_whitened(by_std: bool):
    components = [{"acc": a, "form": f} for a, f in ((1, 0), (0, 9), (0, 0), (0, 5), (0, 7), (-1, 3))]
    given = inputs(components=components)
    keys = {"gdpo_reward_keys": ["acc", "form"], "gdpo_reward_weights": [2.0, 0.5], "norm_adv_by_std_in_grpo": by_std}

    # acc in group a: 1, 0, -1 with deviation 1; form there: 0, 0, 3 with deviation sqrt(3), in c: 5, 7 with sqrt(2).
    acc = [1 / (1 + EPS), 0, 0, 0, 0, -1 / (1 + EPS)]
    third, half = math.sqrt(3) + EPS, math.sqrt(2) + EPS
    form = [-1 / third, 9 / (1 + EPS), -1 / third, -1 / half, 1 / half, 2 / third]
    if not by_std:
        acc, form = [1, 0, 0, 0, 0, -1], [-1, 9, -1, -1, 1, 2]
    sums = [2 * a + f / 2 for a, f in zip(acc, form, strict=True)]
    by_token = whitened([value for value, row in zip(sums, MASK, strict=True) for _ in range(sum(row))])
    firsts = [sum(map(sum, MASK[:row])) for row in range(6)]
    close(advantages("gdpo", given, **keys), [by_token[first] for first in firsts])


def test_gdpo_weighs_all_rewards_alike_and_takes_the_score_by_its_name():
    given = inputs(components=[{"score": score, "zero": 0.0} for score in SCORES])

    alone = advantages("gdpo", given, gdpo_reward_keys=["score"])
    both = advantages("gdpo", given, gdpo_reward_keys=["zero", "score"])

    assert float(alone.abs().max()) > 1
    close(both, alone.tolist())
    close(advantages("gdpo", given, gdpo_reward_keys=["score"], gdpo_reward_weights=[1.0]), alone.tolist())


def test_gdpo_without_one_of_its_rewards_names_it():
    with pytest.raises(ValueError, match="expected 'acc' among the reward components of each trajectory, got form"):
        advantages("gdpo", inputs(components=[{"form": 1.0}] * 6), gdpo_reward_keys=["acc"])


LOGP = [
    [math.log(p) for p in row]
    for row in ([0.5] * 5, [0.25] * 5, [0.5, 1, 0.1, 1, 1], [0.2] * 5, [0.3] * 5, [0.6, 0.7, 1, 0.8, 1])
]
SQUARES = [[0.3] * 5, [0.4] * 5, [0.5] * 5, [0.1] * 5, [0.2] * 5, [0.4, 0.6, 0.9, 0.7, 0.9]]
WEIGHTS = [[1.5] * 5, [1.0] * 5, [0.5, 9, 2.0, 9, 9], [1.0] * 5, [0.0] * 5, [1.0, 0.5, 9, 2.0, 9]]


def by_optimal_baseline(*, weighted: bool, packed: bool) -> list[list[float]]:
    """Advantages of the tokens of the model, row by row, in plain Python."""
    result: list[list[float]] = [[] for _ in GROUPS]
    for group in set(GROUPS):
        rows = [row for row, key in enumerate(GROUPS) if key == group]
        variance: dict[tuple[int, int], float] = {}
        for row in rows:
            total, position = 0.0, 0
            for column in range(5):
                if MASK[row][column]:
                    factor = WEIGHTS[row][column] ** 2 if weighted else 1.0
                    total += (1 - 2 * math.exp(LOGP[row][column]) + SQUARES[row][column]) * factor
                    variance[row, position if packed else column] = total
                    position += 1
        ends = sorted((max(place for other, place in variance if other == row) + 1, row) for row in rows)
        for row in rows:
            for place in sorted(place for other, place in variance if other == row):
                own = {other: variance.get((other, place), 0.0) for other in rows}
                baseline = sum(SCORES[other] * w for other, w in own.items()) / (sum(own.values()) + 1e-8)
                beyond = len(rows) == 1 or (row == ends[-1][1] and place >= ends[-2][0])
                result[row].append(SCORES[row] - (0.0 if beyond else baseline))
    return result


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_optimal_baseline_is_the_mean_by_path_variance_at_each_position(name: str, weighted: bool):
    given = inputs(logp=tensor(*LOGP), sum_pi_squared=tensor(*SQUARES))
    given = given._replace(weights=tensor(*WEIGHTS) if weighted else None)

    actual = advantages(name, given)

    expected = by_optimal_baseline(weighted=weighted, packed=name.startswith("tir"))
    for row, values in enumerate(expected):
        close(actual[row][torch.tensor(MASK[row], dtype=torch.bool)], values)


def test_the_tokens_that_only_the_longest_trajectory_has_get_no_baseline():
    given = inputs(
        [1.0, 0.0],
        ["a", "a"],
        [[1, 1, 1], [1, 0, 0]],
        logp=torch.zeros(2, 3, dtype=F64),
        sum_pi_squared=torch.full((2, 3), 2.0, dtype=F64),
    )

    # Every step adds 1 - 2 + 2 = 1, so the first position has the weights 1 and 1.
    close(advantages("optimal_token_baseline", given)[0], [1 - 1 / (2 + 1e-8), 1, 1])


@pytest.mark.parametrize("missing", [{"logp": None}, {"sum_pi_squared": None}, {"logp": None, "sum_pi_squared": None}])
def test_an_optimal_baseline_without_the_distribution_names_the_key(missing: dict[str, None]):
    given = inputs(logp=tensor(*LOGP), sum_pi_squared=tensor(*SQUARES))._replace(**missing)
    with pytest.raises(ValueError, match=r"set actor_rollout_ref\.actor\.calculate_sum_pi_squared=true"):
        advantages("optimal_token_baseline", given)


def test_a_score_stands_at_the_last_token_of_the_model():
    rewards = token_rewards([3.0, -1.0, 2.0], torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool))

    assert rewards.tolist() == [[3, 0, 0], [0, -1, 0], [0, 0, 2]]


def test_parts_of_a_score_at_their_tokens_leave_the_rest_to_the_last_token_of_the_model():
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)

    rewards = token_rewards([3.0, 0.5], mask, tensor([1.0, 0, 0.5, 4], [0, 2.0, 0, 0]))

    assert rewards.tolist() == [[1, 0, -2, 4], [0, 0.5, 0, 0]]


def test_a_trajectorys_advantage_is_the_mean_over_its_trained_tokens():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)

    assert per_trajectory(tensor([1.0, 100.0, 2.0], [7.0] * 3, [7.0, 7.0, 3.0]), mask).tolist() == [1.5, 0.0, 3.0]
    assert per_trajectory(tensor(5.0, 6.0), mask).tolist() == [5.0, 6.0]


def test_a_configuration_names_the_estimators_and_losses_that_are_registered_and_the_page_has_a_row_for_each():
    assert (set(ESTIMATORS), set(POLICY_LOSSES)) == (set(algorithm_config.ESTIMATORS), set(policy_config.LOSSES))

    page = (ROOT / "docs/concepts/algorithms.md").read_text()
    rows = {heading: page.split(f"\n## {heading}\n")[1].split("\n## ")[0] for heading in ("Advantages", "Loss")}
    first = {heading: " ".join(re.findall(r"^\| ([^|]*)", text, re.MULTILINE)) for heading, text in rows.items()}
    assert [name for name in ESTIMATORS if f"`{name}`" not in first["Advantages"]] == []
    assert [name for name in POLICY_LOSSES if f"`{name}`" not in first["Loss"]] == []


def test_equal_scores_have_no_advantage_in_any_estimator_with_a_group():
    equal = inputs([0.1] * 3, ["a"] * 3, [[1, 1]] * 3, components=[{"score": 0.1, "reward_baseline": 0.1}] * 3)
    equal = equal._replace(values=torch.zeros(3, 2))
    equal = equal._replace(logp=torch.full((3, 2), -1.0, dtype=F64), sum_pi_squared=torch.full((3, 2), 0.5, dtype=F64))

    for name in ESTIMATORS:
        actual = advantages(name, equal, gdpo_reward_keys=["score"])
        torch.testing.assert_close(actual, torch.zeros_like(actual), rtol=0, atol=1e-8, msg=name)


OWN = """
import torch

def double(config, inputs):
    return 2 * inputs.scores * config.gamma

def wrong(config, inputs):
    return torch.zeros(7)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_estimators.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_estimators"


def test_an_own_function_is_an_estimator(own_module: str):
    close(advantages(f"{own_module}:double", gamma=0.5), SCORES)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_estimators:wrong", r"expected advantages of shape \[6\] or \[6, 5\], got \[7\]"),
        ("own_estimators:absent", "expected a function 'absent' in own_estimators, found none"),
        ("no_such_module:f", "algorithm.adv_estimator=no_such_module:f: .*No module named 'no_such_module'"),
    ],
)
def test_an_own_function_that_does_not_do_is_named(own_module: str, name: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        advantages(name)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"lam": 1.5}, "algorithm.lam: Input should be less than or equal to 1, got 1.5"),
        ({"adv_estimator": "grop"}, "adv_estimator: expected one of grpo, grpo_vectorized"),
        ({"adv_estimator": "gdpo"}, "gdpo_reward_keys: expected reward components with adv_estimator=gdpo, got none"),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0]},
            "gdpo_reward_weights: expected one for each of the 2 gdpo_reward_keys, got 1",
        ),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "use_kl_in_reward": True},
            "use_kl_in_reward: expected false with adv_estimator=gdpo",
        ),
        ({"adv_estimator": "grpo_passk"}, "rollout.n: expected at least 2 with algorithm.adv_estimator=grpo_passk"),
    ],
)
def test_an_estimator_that_cannot_do_what_is_asked_is_refused(keys: dict[str, str], problem: str):
    with pytest.raises(TrackwayError) as caught:
        resolve({f"algorithm.{key}": value for key, value in keys.items()})

    assert problem in caught.value.message


def test_the_smallest_groups_and_batches_are_divided_by_what_they_have():
    after_a_group_of_one = inputs([3.0, 1.0, 0.5], ["c", "a", "a"], [[1]] * 3)
    close(advantages("grpo_passk", after_a_group_of_one, norm_adv_by_std_in_grpo=False), [0, 0.5, 0])
    close(advantages("gpg", inputs([1.0, 0.0], ["a", "a"], [[1], [1]])), [1, -1])
    rejected = inputs([4.0, 2.0], ["a", "a"], [[1], [1]])._replace(mask=torch.tensor([[True], [False]]))
    close(advantages("opo", rejected), [0, -2])
    close(per_trajectory(tensor([3.0, 9.0]), torch.tensor([[True, False]])), [3])
    scale = math.sqrt(0.5 + 1e-8)  # two tokens: the variance of 1 and 0 is 1/2
    pair = inputs([1.0, 0.0], ["a", "b"], [[1], [1]])
    close(advantages("reinforce_plus_plus_baseline", pair), [0.5 / scale, -0.5 / scale])


def test_an_optimal_baseline_needs_both_parts_of_the_distribution():
    with pytest.raises(ValueError, match="calculate_sum_pi_squared=true"):
        advantages("optimal_token_baseline", inputs(logp=torch.zeros(6, 5)))
