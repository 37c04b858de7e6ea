"""A micro-batch's loss, gradient and metrics against numbers worked out by hand."""

import math

import pytest
import torch

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.algorithm import Aggregation
from trackway.learner.batch import TrainingBatch
from trackway.learner.config import LearnerConfig
from trackway.learner.head import TokenLogits
from trackway.learner.loss import MicroLoss, at_mask, clipped_and_kept, measures_of, micro_loss

F64 = torch.float64
LN3 = math.log(3)
LOGITS = [[0.0, LN3], [0.0, 0.0], [LN3, 0.0], [0.0, 0.0]]
"""Probabilities 1/4 3/4, 1/2 1/2, 3/4 1/4, 1/2 1/2; the tokens are 1 0, 0 1."""
LOGP = [math.log(3 / 4), math.log(1 / 2), math.log(3 / 4), math.log(1 / 2)]
OLD_LOGP = [math.log(1 / 2), math.log(1 / 2), math.log(1 / 4), 0.0]
"""Ratios 3/2, 1, 3, 1/2 under the advantages 1 1, -1 -1: -1.3 clipped, -1, 2.5 by the dual clip, 0.9 clipped."""
PG_LOSS = (-1.3 - 1.0 + 2.5 + 0.9) / 4
ENTROPY = (math.log(4) - 0.75 * LN3 + math.log(2)) / 2
AGG = Aggregation("token-mean", tokens=4.0, sequences=2.0)


def batch(ref_logprobs: float = 0.0) -> TrainingBatch:
    mask = torch.tensor([[False, True, True], [True, False, True]])
    return TrainingBatch(
        input_ids=torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1]]),
        attention_mask=torch.ones(2, 4, dtype=torch.bool),
        response_mask=mask,
        old_logprobs=at_mask(mask, torch.tensor(OLD_LOGP, dtype=F64)),
        ref_logprobs=at_mask(mask, torch.full((4,), ref_logprobs, dtype=F64)),
        advantages=torch.tensor([1.0, -1.0], dtype=F64),
        lengths=torch.tensor([4, 4]),
    )


def config(**changed: object) -> LearnerConfig:
    return learner_config("m", **{"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 2.5, **changed})


def values_of(
    config: LearnerConfig, micro: TrainingBatch, logits: torch.Tensor, ref_logits: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """What the loss needs of these logits."""
    tokens = TokenLogits(logits, micro.input_ids[:, 1:][micro.response_mask], ref_logits)
    return [measure(tokens) for measure in measures_of(config)]


def loss_of(
    config: LearnerConfig, ref_logits: torch.Tensor | None = None, ref_logprobs: float = 0.0
) -> tuple[MicroLoss, torch.Tensor]:
    """The loss of the batch, and its gradient with respect to the logits."""
    logits = torch.tensor(LOGITS, dtype=F64, requires_grad=True)
    micro = batch(ref_logprobs)
    result = micro_loss(config, micro, values_of(config, micro, logits, ref_logits), AGG)
    (gradient,) = torch.autograd.grad(result.loss, logits, retain_graph=True)
    return result, gradient


def metrics_of(result: MicroLoss) -> dict[str, float]:
    assert not any(value.requires_grad for value in result.metrics.values())
    return {name: float(value) for name, value in result.metrics.items()}


PLAIN = {
    "actor/pg_clipfrac": 0.5,
    "actor/pg_clipfrac_lower": 0.25,
    "actor/ppo_kl": -(math.log(3 / 2) + LN3 - math.log(2)) / 4,
    "actor/pg_loss": PG_LOSS,
    "actor/entropy": ENTROPY,
}


def test_the_policy_loss_has_its_clips_and_reports_the_entropy():
    result, gradient = loss_of(config())

    assert float(result.loss.detach()) == pytest.approx(PG_LOSS, rel=1e-12)
    assert metrics_of(result) == pytest.approx(PLAIN, rel=1e-12)
    # Only the second token is not clipped: -A r (1 - p) / 4 at its token, and the opposite at the other.
    assert gradient.tolist() == [pytest.approx(row) for row in ([0, 0], [-0.125, 0.125], [0, 0], [0, 0])]


def test_a_token_is_clipped_where_its_ratio_leaves_the_range_in_the_direction_of_its_advantage():
    ratios = torch.tensor([[1.4, 1.25, 0.5, 1.4], [0.8, 0.95, 2.0, 0.8], [2.0, 0.5, 1.0, 1.0]], dtype=F64)
    mask = torch.tensor([[True, True, True, False], [True, True, True, False], [True, True, True, True]])
    old_logp = torch.full((3, 4), -0.7, dtype=F64)
    mini = TrainingBatch(
        input_ids=torch.ones(3, 5, dtype=torch.long),
        attention_mask=torch.ones(3, 5, dtype=torch.bool),
        response_mask=mask,
        old_logprobs=old_logp,
        ref_logprobs=torch.zeros(3, 4, dtype=F64),
        advantages=torch.tensor([0.5, -0.5, 0.0], dtype=F64),
        lengths=torch.tensor([5, 5, 5]),
    )

    clipped, kept = clipped_and_kept(config(), mini, old_logp + ratios.log())
    at_bound, _ = clipped_and_kept(config(clip_ratio_low=0.0, clip_ratio_high=0.0), mini, old_logp)

    assert clipped.tolist() == [[True, False, False, False], [True, False, False, False], [False] * 4]
    assert kept.tolist() == mask.tolist()
    assert not at_bound.any(), "a ratio at the bound is within it"


def test_the_logprobs_of_the_model_tokens_come_without_a_gradient():
    result, _ = loss_of(config())

    assert result.logp.tolist() == pytest.approx(LOGP)
    assert not result.logp.requires_grad


@pytest.mark.parametrize("coefficient", [1.0, -1.0, 0.5])
def test_the_entropy_bonus_is_taken_off_the_loss(coefficient: float):
    result, gradient = loss_of(config(entropy_coeff=coefficient))

    assert float(result.loss.detach()) == pytest.approx(PG_LOSS - coefficient * ENTROPY, rel=1e-12)
    assert metrics_of(result) == pytest.approx({**PLAIN, "actor/entropy_loss": ENTROPY}, rel=1e-12)
    # dH/dlogit_i = -p_i (ln p_i + H), a fourth of it for each token; 3/16 ln 3 where the odds are 3 : 1.
    tilt = coefficient * 3 / 16 * LN3 / 4
    expected = [[-tilt, tilt], [-0.125, 0.125], [tilt, -tilt], [0, 0]]
    assert gradient.tolist() == [pytest.approx(row) for row in expected]


def test_without_a_bonus_nothing_of_the_entropy_is_kept_for_the_backward_pass():
    def kept(coefficient: float) -> int:
        sizes: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_of(config(entropy_coeff=coefficient))
        return sum(sizes)

    assert kept(0.0) < kept(1.0)


@pytest.mark.parametrize(("kind", "kl"), [("k1", 1.0), ("k2", 0.5)])
def test_the_kl_to_the_references_logprobs_is_added_with_its_weight(kind: str, kl: float):
    logits = torch.zeros(4, 2, dtype=F64, requires_grad=True)

    # Every token has ln 1/2, the reference 1 less.
    with_kl, micro = config(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type=kind), batch(math.log(1 / 2) - 1)
    result = micro_loss(with_kl, micro, values_of(with_kl, micro, logits), AGG)

    plain = micro_loss(config(), batch(), values_of(config(), batch(), logits), AGG)
    assert float(result.metrics["actor/kl_loss"]) == pytest.approx(kl, rel=1e-12)
    assert float((result.loss - plain.loss).detach()) == pytest.approx(0.3 * kl, rel=1e-12)
    assert set(result.metrics) - set(plain.metrics) == {"actor/kl_loss"}
    assert not result.metrics["actor/kl_loss"].requires_grad


def test_the_full_kl_is_taken_over_the_vocabulary_at_the_model_tokens():
    even = torch.zeros(4, 2, dtype=F64)

    result, _ = loss_of(config(use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type="full"), even)

    # ln 2 - H for each token; those with even odds have none.
    kl = math.log(2) - ENTROPY
    assert float(result.metrics["actor/kl_loss"]) == pytest.approx(kl, rel=1e-12)
    assert float(result.loss.detach()) == pytest.approx(PG_LOSS + 2.0 * kl, rel=1e-12)


def test_the_full_kl_without_the_references_logits_is_refused():
    with pytest.raises(ValueError, match="expected the reference's logits for the full KL, got none"):
        loss_of(config(use_kl_loss=True, kl_loss_type="full"))


def test_a_token_has_the_logprob_of_the_distribution_before_it():
    logprobs, _ = values_of(config(), batch(), torch.tensor(LOGITS, dtype=F64))

    assert logprobs.tolist() == pytest.approx(LOGP)


def test_values_are_put_where_the_mask_is_set_row_by_row():
    mask = torch.tensor([[True, False, True], [False, True, False]])

    placed = at_mask(mask, torch.tensor([1.5, 2.5, 3.5], dtype=F64))

    assert (placed.tolist(), placed.dtype) == ([[1.5, 0.0, 2.5], [0.0, 3.5, 0.0]], F64)
