"""KL kinds and entropy against closed forms of value and gradient, in float64.

d is log policy - log reference of the sampled token; p and q are the two distributions over a vocabulary of four.
"""

import math

import pytest
import torch

from trackway.learner.algorithm import KL_KINDS, entropy_from_logits, exact_kl, kl_penalty

F64 = torch.float64
GAPS = [-30.0, -20.0, -2.5, -0.5, 0.0, 0.5, 2.0, 30.0]
P, Q = [0.5, 0.25, 0.15, 0.1], [0.1, 0.2, 0.3, 0.4]
KL = math.fsum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))
ENTROPY = -math.fsum(p * math.log(p) for p in P)


def k3(gap: float) -> float:
    clamped = max(-20.0, min(20.0, -gap))
    return min(10.0, math.exp(clamped) - clamped - 1)


def k3_slope(gap: float) -> float:
    """1 - e^-d where k3 is below its clamp of 10, which it is from d = -2.6 to d = 11."""
    return 1 - math.exp(-gap) if -2.6 < gap < 11.0 else 0.0


VALUES = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": k3,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d) if d else 0.0,
    "k2": lambda d: d,
    "k3": k3_slope,
}
OTHER_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def penalty_and_slope(kind: str, gaps: list[float]) -> tuple[list[float], list[float]]:
    """kl_penalty and its derivative by the policy's logprob."""
    ref = torch.full((len(gaps),), -1.75, dtype=F64)
    logp = (ref + torch.tensor(gaps, dtype=F64)).requires_grad_()
    value = kl_penalty(logp, ref, kind)
    value.sum().backward()
    assert logp.grad is not None
    return value.tolist(), logp.grad.tolist()


@pytest.mark.parametrize("kind", [kind for kind in KL_KINDS if kind != "full"])
def test_value_and_gradient_of_each_kind(kind: str):
    name = OTHER_NAMES.get(kind.removesuffix("+"), kind.removesuffix("+"))

    values, slopes = penalty_and_slope(kind, GAPS)

    assert values == pytest.approx([VALUES[name](d) for d in GAPS], rel=1e-12, abs=1e-12)
    expected = GAPS if kind.endswith("+") else [SLOPES[name](d) for d in GAPS]
    assert slopes == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("kind", "value"), [("k1", KL), ("k3", KL), ("k1+", KL), ("k3+", KL)])
def test_k1_and_k3_expect_the_kl_over_the_policys_own_tokens(kind: str, value: float):
    gaps = [math.log(p / q) for p, q in zip(P, Q, strict=True)]

    values, _ = penalty_and_slope(kind, gaps)

    assert math.fsum(p * v for p, v in zip(P, values, strict=True)) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "is_the_kls"), [("k2", True), ("k1+", True), ("k3+", True), ("k1", False), ("k3", False)]
)
def test_the_expected_gradient_is_the_kls_for_k2_and_with_a_plus_alone(kind: str, is_the_kls: bool):
    gaps = [math.log(p / q) for p, q in zip(P, Q, strict=True)]

    _, slopes = penalty_and_slope(kind, gaps)

    # d log p_v / d logit_i = [v = i] - p_i, so the expectation over v of slope_v times it is:
    mean = math.fsum(p * s for p, s in zip(P, slopes, strict=True))
    expected = [p * (s - mean) for p, s in zip(P, slopes, strict=True)]
    of_kl = [p * (gap - KL) for p, gap in zip(P, gaps, strict=True)]
    assert (expected == pytest.approx(of_kl, abs=1e-12)) is is_the_kls


def test_the_full_kl_and_its_gradient_over_a_vocabulary():
    logits = torch.tensor([[math.log(p) + 3 for p in P], [0.0, 0.0, 0.0, 0.0]], dtype=F64, requires_grad=True)
    ref = torch.tensor([[math.log(q) - 5 for q in Q], [1000.0, 1000.0, 1000.0, 1000.0]], dtype=F64)

    values = exact_kl(logits, ref)
    values.sum().backward()

    assert values.tolist() == pytest.approx([KL, 0.0], abs=1e-12)
    assert logits.grad is not None
    gradient = [p * (math.log(p / q) - KL) for p, q in zip(P, Q, strict=True)]
    assert logits.grad[0].tolist() == pytest.approx(gradient, abs=1e-12)
    assert logits.grad[1].tolist() == pytest.approx([0.0] * 4, abs=1e-12)


def test_entropy_and_its_gradient():
    logits = torch.tensor([math.log(p) + 3 for p in P], dtype=F64, requires_grad=True)

    value = entropy_from_logits(logits)
    value.backward()

    assert value.item() == pytest.approx(ENTROPY, abs=1e-12)
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([-p * (math.log(p) + ENTROPY) for p in P], abs=1e-12)


def test_the_full_kl_of_sampled_logprobs_is_refused():
    with pytest.raises(ValueError, match=r"one of kl, k1, abs, .*, k3\+, got 'full'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")
