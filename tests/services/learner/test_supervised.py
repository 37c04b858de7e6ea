"""Supervised steps of the learner: the loss and the gradient against a plain computation in torch."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from trackway.learner.batch import MaskedTokens
from trackway.learner.learner import Learner

LENGTHS = (5, 23, 9, 40, 2, 17)


def ragged_rows(seed: int = 0) -> list[MaskedTokens]:
    """Rows of several lengths, about half of whose tokens are trained; the last token of each is."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[MaskedTokens] = []
    for length in LENGTHS:
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        mask = torch.randint(0, 2, (length,), generator=generator).tolist()
        rows.append((ids, [*mask[:-1], 1]))
    return rows


def plain_loss(model: torch.nn.Module, rows: list[MaskedTokens]) -> torch.Tensor:
    """The mean of -log p over the trained tokens of all rows, computed row by row."""
    losses = []
    for ids, mask in rows:
        logp = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        taken = logp.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        losses.append(-taken[torch.tensor(mask[1:], dtype=torch.bool)])
    return torch.cat(losses).mean()


PASSES = {
    "whole": {},
    "micro batches": {"micro_batch_size": 2},
    "packed by tokens": {"remove_padding": True, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 30},
    "chunks of the head": {"use_fused_kernels": True, "chunk_size": 7},
}


@pytest.mark.parametrize("settings", PASSES.values(), ids=PASSES)
def test_the_gradient_is_that_of_the_mean_over_all_trained_tokens(tiny_model: Path, settings: dict[str, object]):
    rows = ragged_rows()
    learner = Learner(learner_config(tiny_model, dtype="float64", **settings))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    expected = plain_loss(model, rows)
    expected.backward()

    loss, tokens = learner._supervised(rows)

    assert (loss, tokens) == (pytest.approx(expected.item(), abs=1e-12), float(sum(sum(mask[1:]) for _, mask in rows)))
    plain = dict(model.named_parameters())
    for name, parameter in learner.policy.model.named_parameters():
        assert parameter.grad is not None and plain[name].grad is not None
        torch.testing.assert_close(parameter.grad, plain[name].grad, rtol=0, atol=1e-6)


def test_a_step_moves_the_weights_towards_the_rows_and_reports_verls_metrics(tiny_model: Path):
    rows = ragged_rows()
    learner = Learner(learner_config(tiny_model, lr=1e-2, lr_warmup_steps=2, total_steps=4))
    before, weights = learner.supervised_loss(rows), logprobs_of(learner)

    first, second = learner.supervise(rows), learner.supervise(rows)

    assert before == (pytest.approx(first["train/loss"]), first["train/trained_tokens"])
    assert (first["train/lr"], second["train/lr"]) == (5e-3, 1e-2)
    assert (first["train/global_tokens"], first["train/skipped_steps"]) == (float(sum(LENGTHS)), 0.0)
    assert learner.supervised_loss(rows)[0] < second["train/loss"] < first["train/loss"]
    assert learner.updates == 2 and logprobs_of(learner) != weights


def test_a_loss_alone_leaves_weights_gradient_and_updates_as_they_are(tiny_model: Path):
    learner = Learner(learner_config(tiny_model, lr=1e-2))
    weights = logprobs_of(learner)

    learner.supervised_loss(ragged_rows())

    assert logprobs_of(learner) == weights and learner.updates == 0
    assert {parameter.grad for parameter in learner.policy.model.parameters()} == {None}


def test_an_adapter_alone_is_trained(tiny_model: Path):
    learner = Learner(learner_config(tiny_model, lr=1e-2, lora_rank=4, target_modules="all-linear"))

    before = learner.supervise(ragged_rows())["train/loss"]

    trained = {name for name, parameter in learner.policy.model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert learner.supervised_loss(ragged_rows())[0] < before


def test_no_rows_are_refused(tiny_model: Path):
    with pytest.raises(ValueError, match="expected at least one row, got none"):
        Learner(learner_config(tiny_model)).supervise([])
