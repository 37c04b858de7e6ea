"""Distillation losses: against values recorded from verl, closed forms, and a teacher that is the student."""

import json
import math
from dataclasses import replace

import pytest
import torch

from tests.services.learner.verl_distillation import (
    AGGREGATIONS,
    BATCHES,
    MODES,
    RECORDS,
    TOP,
    Batch,
    batch_of,
)
from tests.services.trainer.learner_settings import learner_config
from trackway.learner.algorithm import Aggregation
from trackway.learner.batch import TrainingBatch
from trackway.learner.config import LearnerConfig
from trackway.learner.distillation import distillation_metrics
from trackway.learner.head import TokenLogits
from trackway.learner.loss import MicroLoss, at_mask, measures_of, micro_loss
from trackway.run_config.distillation import DistillationLossConfig

F64 = torch.float64
VERLS = json.loads(RECORDS.read_text())


def training_batch(batch: Batch, teacher: torch.Tensor) -> TrainingBatch:
    """The batch with the logprobs of a teacher [B, T, V]."""
    mask, targets = torch.tensor(batch.mask), torch.tensor(batch.targets)
    rows = torch.zeros(len(mask), 1, dtype=torch.int64)
    top = teacher.topk(TOP, -1)
    return TrainingBatch(
        input_ids=torch.cat([rows, targets], -1),
        attention_mask=torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.bool),
        response_mask=mask,
        old_logprobs=torch.tensor(batch.old, dtype=F64) * mask,
        ref_logprobs=torch.zeros(mask.shape, dtype=F64),
        advantages=torch.ones(len(mask), dtype=F64),
        lengths=torch.full((len(mask),), mask.shape[1] + 1),
        teacher_logprobs=teacher.gather(-1, targets.unsqueeze(-1)).squeeze(-1) * mask,
        teacher_top_ids=top.indices,
        teacher_top_logprobs=top.values,
    )


def config_of(settings: dict[str, object], aggregation: str = "token-mean", **changed: object) -> LearnerConfig:
    distillation = DistillationLossConfig.model_validate({"topk": TOP, "use_task_rewards": False, **settings})
    return replace(learner_config("m", loss_agg_mode=aggregation, **changed), distillation_loss=distillation)


def loss_of(config: LearnerConfig, micro: TrainingBatch, logits: torch.Tensor) -> MicroLoss:
    mask = micro.response_mask
    tokens = TokenLogits(logits[mask], micro.input_ids[:, 1:][mask], None, micro.top_tokens)
    agg = Aggregation.over(mask, config.actor.loss_agg_mode)
    return micro_loss(config, micro, [measure(tokens) for measure in measures_of(config)], agg)


@pytest.mark.parametrize(("place", "settings"), [*enumerate(MODES)], ids=str)
def test_losses_gradients_and_metrics_are_those_of_verl(place: int, settings: dict[str, object]):
    assert len(VERLS[place]) == BATCHES
    for number, verls in enumerate(VERLS[place]):
        batch = batch_of(number)
        logits = torch.tensor(batch.logits, dtype=F64, requires_grad=True)
        micro = training_batch(batch, torch.log_softmax(torch.tensor(batch.teacher, dtype=F64), -1))
        result = loss_of(config_of(settings, batch.aggregation), micro, logits)
        (gradient,) = torch.autograd.grad(result.loss, logits)
        products = [float((gradient * torch.tensor(way, dtype=F64)).sum()) for way in batch.directions]

        assert float(result.loss.detach()) == pytest.approx(verls["loss"], rel=1e-6, abs=1e-6)
        assert products == pytest.approx(verls["products"], rel=1e-6, abs=1e-6)
        columns = [at_mask(micro.response_mask, values) for values in result.distillation]
        ours = {name: float(value.detach()) for name, value in result.metrics.items()} | distillation_metrics(
            micro, columns
        )
        for name, value in verls.get("metrics", {}).items():
            assert ours[name] == pytest.approx(value, abs=1e-6), (number, name)


@pytest.mark.parametrize("settings", [*MODES[4:7], *MODES[:4]], ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_teacher_that_is_the_student_has_no_gradient(settings: dict[str, object], aggregation: str):
    batch = batch_of(1)
    logits = torch.tensor(batch.logits, dtype=F64, requires_grad=True)
    micro = training_batch(batch, torch.log_softmax(logits.detach(), -1))
    chosen = -torch.nn.functional.cross_entropy(
        logits.detach()[micro.response_mask], micro.input_ids[:, 1:][micro.response_mask], reduction="none"
    )
    micro = TrainingBatch(**{**vars(micro), "teacher_logprobs": at_mask(micro.response_mask, chosen)})
    (gradient,) = torch.autograd.grad(loss_of(config_of(settings, aggregation), micro, logits).loss, logits)

    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_topk_of_the_student_itself_pushes_its_mass_up():
    """sum_k p (log p - log q) at q = p has the gradient of -sum_k q."""
    batch = batch_of(1)
    logits = torch.tensor(batch.logits, dtype=F64, requires_grad=True)
    logp = logits - logits.logsumexp(-1, keepdim=True)
    micro = training_batch(batch, logp.detach())
    (gradient,) = torch.autograd.grad(loss_of(config_of({"loss_mode": "forward_kl_topk"}), micro, logits).loss, logits)
    mass = logp.topk(TOP, -1).values.exp().sum(-1)
    mask = micro.response_mask
    (expected,) = torch.autograd.grad(-(mass * mask).sum() / mask.sum(), logits)

    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) + d - 1),
        ("abs", abs),
    ],
)
def test_the_estimates_in_closed_form(mode: str, loss):
    batch = batch_of(2)
    logits = torch.tensor(batch.logits, dtype=F64)
    teacher = torch.log_softmax(torch.tensor(batch.teacher, dtype=F64), -1)
    micro = training_batch(batch, teacher)
    result = loss_of(config_of({"loss_mode": mode}), micro, logits)
    logp = torch.log_softmax(logits, -1).gather(-1, torch.tensor(batch.targets).unsqueeze(-1)).squeeze(-1)
    assert micro.teacher_logprobs is not None
    differences = (logp - micro.teacher_logprobs)[micro.response_mask].tolist()

    assert float(result.loss) == pytest.approx(sum(map(loss, differences)) / len(differences), abs=1e-11)


def test_task_rewards_are_trained_beside_the_teacher():
    batch = batch_of(3)
    logits = torch.tensor(batch.logits, dtype=F64)
    micro = training_batch(batch, torch.log_softmax(torch.tensor(batch.teacher, dtype=F64), -1))
    settings = {"loss_mode": "k3", "use_task_rewards": True, "distillation_loss_coef": 0.25}
    plain = loss_of(learner_config("m", entropy_coeff=0.1), micro, logits)
    alone = loss_of(config_of({"loss_mode": "k3"}, entropy_coeff=0.1), micro, logits)
    both = loss_of(config_of(settings, entropy_coeff=0.1), micro, logits)

    assert float(both.loss) == pytest.approx(float(plain.loss) + 0.25 * float(alone.loss), abs=1e-12)


def test_rollout_correction_weighs_a_teachers_policy_gradient_and_drops_the_tokens_that_it_rejects():
    batch = batch_of(3)
    logits = torch.tensor(batch.logits, dtype=F64, requires_grad=True)
    logp = torch.log_softmax(logits, -1).gather(-1, torch.tensor(batch.targets).unsqueeze(-1)).squeeze(-1)
    micro = training_batch(batch, torch.log_softmax(torch.tensor(batch.teacher, dtype=F64), -1))
    weights = torch.linspace(0.1, 1.9, logp.numel(), dtype=F64).view_as(logp)
    kept = micro.response_mask & (weights > 0.5)
    micro = replace(micro, old_logprobs=logp.detach(), rollout_is_weights=weights, response_mask=kept)
    assert micro.teacher_logprobs is not None
    difference = logp - micro.teacher_logprobs
    expected = {
        "k1": weights * difference.detach() * logp,
        "k2": difference.square() / 2,
    }

    for mode, of_token in expected.items():
        settings = {"loss_mode": mode, "use_policy_gradient": mode == "k1"}
        loss = loss_of(config_of(settings, bypass_mode=False, rollout_is="token"), micro, logits).loss
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (closed,) = torch.autograd.grad((of_token * kept).sum() / kept.sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient, closed, rtol=0, atol=1e-11)


def test_a_batch_that_no_teacher_scored_is_refused():
    batch = batch_of(3)
    logits = torch.tensor(batch.logits, dtype=F64)
    micro = training_batch(batch, torch.log_softmax(torch.tensor(batch.teacher, dtype=F64), -1))
    micro = TrainingBatch(**{**vars(micro), "teacher_logprobs": None})

    with pytest.raises(ValueError, match="that a teacher scored"):
        loss_of(config_of({"loss_mode": "k3"}), micro, logits)
