"""The clipped value loss, its gradient and its statistics by hand."""

import pytest
import torch

from trackway.learner.algorithm import Aggregation
from trackway.learner.critic import value_loss

pytestmark = pytest.mark.slow

F64 = torch.float64
# Two rows; the third token of the first is an observation. The values before the update are 1, and clipped at 1/2.
# (V - R)^2 and (clip(V) - R)^2: 1, 1 | 4, 9/4 | - | 0, 1/4 | 0, 1/4 | 9/4, 1.
PREDICTED = torch.tensor([[1.0, 2.0, 7.0, 2.0], [0.0, -0.5, 7.0, 7.0]], dtype=F64)
RETURNS = torch.tensor([[2.0, 0.0, 7.0, 2.0], [0.0, 1.0, 0.0, 0.0]], dtype=F64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
HALF_LOSSES = [1 / 2, 4 / 2, 1 / 8, 1 / 8, 9 / 8]


def loss_of(
    mode: str, predicted: torch.Tensor = PREDICTED, scale: float = 1.0
) -> tuple[torch.Tensor, dict[str, float]]:
    agg = Aggregation.over(MASK, mode, scale)
    loss, stats = value_loss(predicted, torch.ones_like(predicted), RETURNS, MASK, 0.5, agg)
    return loss, {name: float(value) for name, value in stats._asdict().items()}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", sum(HALF_LOSSES) / 5),
        ("token-sum", sum(HALF_LOSSES)),
        ("seq-mean-token-sum", sum(HALF_LOSSES) / 2),
        ("seq-mean-token-sum-norm", sum(HALF_LOSSES) / 2 / 4),
        ("seq-mean-token-mean", (sum(HALF_LOSSES[:3]) / 3 + sum(HALF_LOSSES[3:]) / 2) / 2),
    ],
)
def test_the_loss_is_half_the_larger_square_aggregated(mode: str, expected: float):
    loss, stats = loss_of(mode, scale=4.0)

    assert float(loss) == pytest.approx(expected, rel=1e-12)
    # A value that moved to its return has a clipped loss above its own: one above the range, and one below.
    assert stats == {"vf_clipfrac": 2 / 5, "vpred_mean": pytest.approx((1 + 2 + 2 + 0 - 0.5) / 5)}


def test_a_clipped_token_and_an_observation_have_no_gradient():
    predicted = PREDICTED.clone().requires_grad_()

    loss_of("token-mean", predicted)[0].backward()

    # (V - R) / 5 where the own square is the larger one.
    expected = torch.tensor([[-1 / 5, 2 / 5, 0, 0], [0, -3 / 10, 0, 0]], dtype=F64)
    torch.testing.assert_close(predicted.grad, expected, rtol=0, atol=1e-12)


def test_micro_batches_add_up_to_the_loss_and_statistics_of_the_mini_batch():
    agg, ones = Aggregation.over(MASK, "seq-mean-token-mean"), torch.ones(1, 4, dtype=F64)
    parts = [value_loss(PREDICTED[[r]], ones, RETURNS[[r]], MASK[[r]], 0.5, agg) for r in range(2)]

    whole, stats = loss_of("seq-mean-token-mean")

    assert float(sum(part[0] for part in parts)) == pytest.approx(float(whole), rel=1e-12)
    assert float(sum(part[1].vf_clipfrac for part in parts)) == pytest.approx(stats["vf_clipfrac"], rel=1e-12)
    assert float(sum(part[1].vpred_mean for part in parts)) == pytest.approx(stats["vpred_mean"], rel=1e-12)
