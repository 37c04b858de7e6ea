"""The learner: trajectories in, updated weights and verl's metrics out.

One update is GRPO's: advantages per group, then for each mini-batch one clipped policy-gradient step, its gradient
summed over micro-batches. The old logprobs are the sampler's own, so the clipped ratio also corrects for stale or
differently computed sampling, and a wrong mask or temperature shows in `training/rollout_logprob_diff_max`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import AdamW

from trackway.trainer.learner import optimizer as adamw
from trackway.trainer.learner.algorithm import EXACT_KL, Aggregation, grpo_advantages
from trackway.trainer.learner.batch import TrainingBatch
from trackway.trainer.learner.config import LearnerConfig
from trackway.trainer.learner.finite import require_finite_logprobs
from trackway.trainer.learner.loss import MicroLoss, micro_loss
from trackway.trainer.learner.metrics import batch_metrics, drift_metrics, scores_of
from trackway.trainer.learner.offload import CpuOffload
from trackway.trainer.learner.policy import Policy
from trackway.trainer.learner.weight_proof import (
    ScoredSequence,
    choose_sequences,
    probes_of,
    rounding_of,
    tensor_digests,
)
from trackway.trainer.metrics.rollout import Metrics
from trackway.wire.trajectory import Trajectory
from trackway.wire.weights import Canary, WeightProof

__all__ = ["EmptyBatchError", "Learner", "LearnerConfig", "UpdateResult"]

CANARY_LENGTH = 16
CANARY_TOLERANCE = {"bfloat16": 0.25}
"""By compute dtype, else the wire's default; a bfloat16 sampler was up to 0.054 from a float32 trainer."""


class EmptyBatchError(ValueError):
    """The batch is empty; the weights are as before."""


class StepObserver(Protocol):
    """Observes each optimizer step while it runs."""

    def __call__(self, used: Sequence[Trajectory], /) -> AbstractContextManager[Callable[[dict[str, float]], None]]:
        """A context for the step on these trajectories; it yields a callback for the step's metrics."""
        ...


@contextmanager
def unobserved(used: Sequence[Trajectory]) -> Iterator[Callable[[dict[str, float]], None]]:
    """The StepObserver that does nothing."""
    yield lambda metrics: None


class StepOutcome(NamedTuple):
    """One optimizer step on N model tokens."""

    metrics: dict[str, float]
    logp: Tensor
    """[N]: the trainer's logprobs before the step."""
    old_logp: Tensor
    """[N]: the old logprobs of the batch."""


class UpdateResult(NamedTuple):
    """The outcome of one update."""

    metrics: Metrics
    """By verl's names."""
    advantages: list[float]
    """Of each trajectory that was trained on, in the batch's order."""


class Learner:
    """A policy, its optimizer, and the reference model if the loss needs one. Not thread-safe."""

    def __init__(self, config: LearnerConfig) -> None:
        torch.set_num_threads(config.threads)
        self.config = config
        self.updates = 0
        self.policy = Policy(
            config.model_path,
            config.dtype,
            config.device,
            gradient_checkpointing=config.gradient_checkpointing,
            remove_padding=config.remove_padding,
            offload=config.param_offload,
        )
        self.reference = _reference(config) if config.use_kl_loss else None
        self.optimizer = AdamW(
            self.policy.model.parameters(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.moments = CpuOffload(
            lambda: adamw.state_tensors(self.optimizer), self.policy.device, offload=config.optimizer_offload
        )
        self._shuffler = torch.Generator().manual_seed(config.seed)
        self._before: list[ScoredSequence] | None = None
        """Sequences of the last batch as the weights before its update scored them."""

    def update(self, used: Sequence[Trajectory], observe: StepObserver = unobserved) -> UpdateResult:
        """Trains on the trajectories that `filter_trajectories` lets through; returns their metrics and advantages.

        `observe` is entered around each optimizer step, with the trajectories of that step. Raises EmptyBatchError for
        no trajectories, and ValueError for one without a reward or a prompt.
        """
        if not used:
            raise EmptyBatchError(
                "expected a trajectory to train on, got none; look at their errors, nothing was updated"
            )
        advantages = self.advantages(used)
        sampled = TrainingBatch.of(used, advantages, self.policy.master_dtype)
        batch = self._with_references(sampled)
        sequences = choose_sequences(used, batch.advantages.tolist())
        self._before = self.policy.published_logprobs([self._canary_tokens(), *sequences])
        lr = adamw.learning_rate(self.config, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        steps: list[StepOutcome] = []
        with self.policy.cpu_offload.on_device(), self._exact_reference():
            for rows in self._mini_batches(batch):
                with observe([used[row] for row in rows.tolist()]) as report:
                    steps.append(self._step(batch.rows(rows)))
                    report({**steps[-1].metrics, "actor/lr": lr})
        self.updates += 1
        metrics = {
            **batch_metrics(used, batch),
            **self._drift(sampled, batch, steps[0]),
            **{name: sum(s.metrics[name] for s in steps) / len(steps) for name in steps[0].metrics},
            "actor/skipped_steps": sum(s.metrics["actor/skipped_steps"] for s in steps),
            "actor/lr": lr,
            **({"actor/kl_coef": self.config.kl_loss_coef} if self.reference is not None else {}),
        }
        return UpdateResult(metrics, advantages)

    def advantages(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """The advantage of each trajectory within its prompt's group. Raises ValueError for one without a reward."""
        groups = [f"{t.tags.step}/{t.tags.sample_index}" for t in trajectories]
        scores = torch.tensor(scores_of(trajectories), dtype=torch.float64)
        return grpo_advantages(scores, groups, self.config.norm_adv_by_std).tolist()

    def log_probs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The current policy's logprob of each response token, 0.0 where the model did not write it."""
        result = [[0.0] * len(t.response_ids) for t in trajectories]
        rows = [row for row, t in enumerate(trajectories) if t.prompt_ids and any(t.response_mask)]
        if not rows:
            return result
        kept = [trajectories[row] for row in rows]
        logprobs = self._old_logprobs(TrainingBatch.of(kept, [0.0] * len(kept), self.policy.master_dtype))
        for row, trajectory, values in zip(rows, kept, logprobs, strict=True):
            first = len(trajectory.prompt_ids) - 1
            result[row] = values[first : first + len(trajectory.response_ids)].tolist()
        return result

    def save(self, folder: Path) -> None:
        """Writes everything that a new learner of the same configuration needs to continue exactly."""
        folder.mkdir(parents=True, exist_ok=True)
        self.policy.save(folder / "model.safetensors")
        adamw.save_optimizer(self.optimizer, self.policy.model, folder / "optim.safetensors")
        progress = {"updates": torch.tensor(self.updates), "shuffler": self._shuffler.get_state()}
        save_file(progress, folder / "extra_state.safetensors")
        if self.reference is not None:
            self.reference.save(folder / "reference.safetensors")

    def load(self, folder: Path) -> None:
        """Restores what save() wrote; a saved reference replaces the model of `model_path`.

        Raises ValueError when the checkpoint belongs to another model.
        """
        self.policy.load(folder / "model.safetensors")
        adamw.load_optimizer(self.optimizer, self.policy.model, folder / "optim.safetensors")
        self.moments.offload()
        progress = load_file(folder / "extra_state.safetensors")
        self.updates = int(progress["updates"])
        self._shuffler.set_state(progress["shuffler"])
        reference = folder / "reference.safetensors"
        if self.reference is not None and reference.exists():
            self.reference.load(reference)

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face folder of the current weights, with an explicit `lm_head.weight`."""
        self.policy.export(folder)

    def proof(self, folder: Path, previous_version: int | None) -> WeightProof:
        """A proof by which an engine can check that it holds the weights that `export` wrote to `folder`.

        `previous_version` is the version before the last update, None when it was not published. Raises NotFiniteError
        when the model computes NaN or infinities.
        """
        before = self._before if previous_version is not None else None
        sequences = [self._canary_tokens()] if before is None else [sequence.token_ids for sequence in before]
        now = self.policy.published_logprobs(sequences)
        require_finite_logprobs([logprob for sequence in now for logprob in sequence.logprobs])
        probes = probes_of(now, before)
        return WeightProof(
            digests=tensor_digests(folder),
            probes=probes,
            previous_version=None if before is None else previous_version,
            dtype=str(self.policy.published_dtype).removeprefix("torch."),
            rounding=rounding_of(probes, self.policy.published_logprobs(sequences, torch.bfloat16)),
        )

    def _canary_tokens(self) -> list[int]:
        # Low ids exist in every tokenizer, while a model's vocabulary is often padded beyond its tokenizer.
        vocabulary = min(256, self.policy.model.config.get_text_config().vocab_size)
        return [(37 * i + 11) % vocabulary for i in range(CANARY_LENGTH)]

    def canary(self) -> Canary:
        """A fixed sequence and its logprobs under the current weights, for engines older than `proof`."""
        token_ids = self._canary_tokens()
        logprobs = self.policy.sequence_logprobs(token_ids)
        require_finite_logprobs(logprobs)
        canary = Canary(token_ids=token_ids, logprobs=logprobs)
        tolerance = CANARY_TOLERANCE.get(self.config.dtype, canary.tolerance)
        return canary.model_copy(update={"tolerance": tolerance})

    def _with_references(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with the logprobs that stay fixed during the update: recomputed old ones and the reference's."""
        if self.config.recompute_old_logprobs:
            batch = replace(batch, old_logprobs=self._old_logprobs(batch))
        if self.reference is not None and not self._exact_kl:
            size = self.config.ref_micro_batch_size or self._log_prob_size
            batch = replace(batch, ref_logprobs=self.reference.logprobs(batch, self.config.temperature, size))
        return batch

    def _old_logprobs(self, batch: TrainingBatch) -> Tensor:
        return self.policy.logprobs(batch, self.config.temperature, self._log_prob_size)

    @property
    def _log_prob_size(self) -> int | None:
        return self.config.log_prob_micro_batch_size or self.config.micro_batch_size

    @property
    def _exact_kl(self) -> bool:
        return self.config.use_kl_loss and self.config.kl_loss_type == EXACT_KL

    def _exact_reference(self) -> AbstractContextManager[None]:
        """Keeps the reference on the device for the full KL, which needs it in each micro-batch."""
        if self.reference is None or not self._exact_kl:
            return nullcontext()
        return self.reference.cpu_offload.on_device()

    def _drift(self, sampled: TrainingBatch, batch: TrainingBatch, first: StepOutcome) -> dict[str, float]:
        """Metrics of the trainer's logprobs against the sampler's, under the weights before the update.

        From the recomputed old logprobs if there are any, else from the forward of the first mini-batch: later
        mini-batches see changed weights.
        """
        if self.config.recompute_old_logprobs:
            mask = batch.response_mask
            return drift_metrics(batch.old_logprobs[mask], sampled.old_logprobs[mask])
        return drift_metrics(first.logp, first.old_logp)

    def _mini_batches(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """Row indices of each optimizer step, over all epochs."""
        for _ in range(self.config.ppo_epochs):
            order = torch.arange(len(batch))
            if self.config.shuffle:
                order = torch.randperm(len(batch), generator=self._shuffler)
            yield from order.split(self.config.mini_batch_size or len(batch))

    def _step(self, mini: TrainingBatch) -> StepOutcome:
        agg = Aggregation.over(mini.response_mask, self.config.loss_agg_mode, self.config.loss_scale_factor)
        parts: list[MicroLoss] = []
        old_logps: list[Tensor] = []
        for _, rows in mini.micro_batches(self.config.micro_batch_size):
            parts.append(self._backward(rows.to(self.policy.device), agg))
            old_logps.append(rows.old_logprobs[rows.response_mask])
        with self.moments.on_device():
            norm, stepped = adamw.step(self.optimizer, self.policy.model, self.config.clip_grad)
        metrics = {name: float(sum(part.metrics[name] for part in parts)) for name in parts[0].metrics}
        metrics |= {"actor/grad_norm": norm, "actor/skipped_steps": float(not stepped)}
        return StepOutcome(metrics, torch.cat([part.logp for part in parts]).cpu(), torch.cat(old_logps))

    def _backward(self, micro: TrainingBatch, agg: Aggregation) -> MicroLoss:
        """Adds the gradient of the micro-batch; its logits are freed on return."""
        ref_logits = None
        if self.reference is not None and self._exact_kl:
            with torch.no_grad():
                ref_logits = self.reference.logits(micro, self.config.temperature)
        part = micro_loss(self.config, micro, self.policy.logits(micro, self.config.temperature), ref_logits, agg)
        part.loss.backward()
        return part._replace(loss=part.loss.detach())


def _reference(config: LearnerConfig) -> Policy:
    return Policy(
        config.model_path,
        config.dtype,
        config.device,
        remove_padding=config.remove_padding,
        offload=config.ref_param_offload,
        frozen=True,
    )
