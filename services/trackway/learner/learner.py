"""The learner: trajectories in, updated weights and verl's metrics out.

One update: rewards of tokens, less the KL penalty if there is one; advantages (advantages.py), for some of them with
the values of a value model (critic.py), which is trained too; then for each mini-batch one policy-gradient step
(policy_losses.py), its gradient summed over micro-batches. Samples of older weights or of other arithmetic are
corrected as `algorithm.rollout_correction` says (rollout_correction.py). A wrong mask or temperature shows in
`training/rollout_logprob_diff_max`.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import set_seed

from trackway.learner import optimizer as adamw
from trackway.learner.advantages import (
    AdvantageInputs,
    estimate,
    estimator_of,
    per_trajectory,
    token_returns,
    token_rewards,
)
from trackway.learner.algorithm import Aggregation, by_token, entropy_from_logits, kl_penalty, mean_kl, next_coefficient
from trackway.learner.batch import (
    MaskedTokens,
    ResponseColumns,
    TokenRecord,
    TokenValues,
    TrainingBatch,
    mini_batches,
    placed_scores,
    rows_of,
    token_versions,
)
from trackway.learner.config import LearnerConfig
from trackway.learner.critic import Critic
from trackway.learner.distillation import distillation_metrics
from trackway.learner.finite import require_finite_logprobs
from trackway.learner.head import Measure, compiled_entropy, sum_pi_squared, token_logprobs
from trackway.learner.loss import (
    MicroLoss,
    at_mask,
    clipped_and_kept,
    measures_of,
    micro_loss,
    of_kept_tokens,
    proximal_logprobs,
)
from trackway.learner.measuring import Clock, Metrics
from trackway.learner.metrics import batch_metrics, drift_metrics, mean_metrics, scores_of, value_metrics
from trackway.learner.policy import BasePolicy, MicroBatch, Policy
from trackway.learner.policy_losses import SELECTIONS, LossInputs, policy_loss_of
from trackway.learner.ranks.publication import Work, own_files
from trackway.learner.ranks.sharding import ALONE, Ranks, require_finite_shards
from trackway.learner.ranks.snapshot import FILES, Publish, Snapshot, to_load, write_state
from trackway.learner.rollout_correction import correct, correction_metrics, loglinear_share, mean_weight
from trackway.learner.weight_proof import (
    ScoredSequence,
    choose_sequences,
    probes_of,
    rounding_of,
    tensor_digests,
)
from trackway.learner.weights.offload import CpuOffload
from trackway.learner.weights.sharded_files import is_saved, read_whole
from trackway.system.process import choose_threads, usable_cores
from trackway.wire.trajectory import Trajectory
from trackway.wire.weights import TensorDigest, WeightProof


def make_deterministic(seed: int) -> None:
    """Seeds the generators of Python, NumPy and PyTorch, and takes PyTorch's deterministic kernels, in this process.

    As verl's `enable_full_determinism` does, an operation without such a kernel is warned of. Call it before the first
    computation on a GPU, which reads the environment.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    set_seed(seed % 2**32)  # NumPy's range
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


PROBE_LENGTH = 16
"""Tokens of the fixed sequence."""

T = TypeVar("T")
RowsLoss: TypeAlias = Callable[[TrainingBatch, Tensor, Sequence[Tensor]], MicroLoss]
"""Returns the loss of some rows of a batch, given the rows, their places [b], and the measured values, [N] each."""
REFERENCE = "reference"
"""Name of the reference model's weights in a checkpoint."""
BASE_TOLERANCE = 1e-2
"""Largest difference of one model's logprobs between devices. An adapter on another model would train and publish
something else, without an error."""

logger = logging.getLogger("trackway.trainer")


class EmptyBatchError(ValueError):
    """The batch is empty. The weights are as before."""


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
    """One optimizer step on b trajectories."""

    metrics: dict[str, float]
    mini: TrainingBatch
    """The trajectories with a model token to train on."""
    logp: Tensor
    """[b, T - 1]: the trainer's logprobs before the step, zeros outside the response mask."""
    entropies: Tensor | None
    """[b, T - 1]: the entropies in the same places, or None unless the configuration asks for the values of tokens."""


class UpdateResult(NamedTuple):
    """The outcome of one update."""

    metrics: Metrics
    """Metrics by verl's names."""
    advantages: list[float]
    """Advantage of each trajectory that was trained on, in the batch's order."""
    tokens: TokenValues | None = None
    """Values of the rows of these trajectories, in their order, or None unless the configuration asks for them."""
    seconds: Mapping[str, float] = {}
    """Seconds of the value model's parts of the update: `values` and `update_critic`."""


class Prepared(NamedTuple):
    """B trajectories in N rows of tokens, ready for the optimizer steps of an update."""

    batch: TrainingBatch
    """The N rows."""
    logprobs: Tensor | None
    """[N, T - 1]: the policy's logprobs before the update, of rejected tokens too, or None without a pass for them."""
    mismatch: Metrics
    """Metrics of recomputed old logprobs against the sampler's. Empty without them."""
    kl_metrics: Metrics
    """Metrics of the KL penalty in the reward. Empty without it."""
    advantages: list[float]
    """Advantage of each trajectory; where tokens have their own, their mean."""
    rewards: Tensor
    """[B]: the scores, less the KL penalty."""
    returns: Tensor
    """[N]: the advantages, as in verl; or [N, T - 1] where tokens have their own: their returns."""


class Learner:
    """A policy, its optimizer, and the reference model if the loss needs one. Not thread-safe.

    Learners of adapters of one model share its `policy`, each with an adapter of its own; `activate` attaches it.

    Among several ranks each has a learner. Every method is a collective, which all of them call with the same
    arguments, and gives each of them the same result. Checkpoints and what is published have files of each rank. Other
    files are the first one's.
    """

    def __init__(self, config: LearnerConfig, ranks: Ranks = ALONE, policy: Policy | None = None) -> None:
        self.config = config
        self.ranks = ranks = ranks.dividing_sequences(config.sequence_parallel_size)
        fsdp = config.actor.fsdp_config
        if config.is_deterministic:
            make_deterministic(fsdp.seed)
        # Own ones that cannot be loaded are errors before the model loads.
        estimator_of(config.algorithm.adv_estimator)
        policy_loss_of(config.loss_mode)
        self.updates = 0
        if policy is not None and config.lora is not None:
            policy.add_adapter(config.lora)
        self.policy = policy or Policy(config.policy_settings(), ranks.sharing_weights(fsdp.fsdp_size))
        self._adapter = self.policy.adapter
        self.threads = config.threads or self._choose_threads()
        """CPU threads of torch in this process."""
        torch.set_num_threads(self.threads)
        self._entropy = self._entropy_function()
        self.reference = self._reference() if config.uses_reference else None
        self.reward_kl_coef = config.algorithm.kl_ctrl.kl_coef
        """Coefficient of the KL penalty in the reward of the next update."""
        self.optimizer = adamw.new_optimizer(self.policy.model, config.actor.optim)
        self.moments = CpuOffload(
            lambda: adamw.state_tensors(self.optimizer),
            self.policy.device,
            offload=(fsdp.optimizer_offload or fsdp.offload_policy) and not self.policy.is_offloaded_by_fsdp,
        )
        self.critic = self._critic()
        self._clock = Clock()
        self._shuffler = torch.Generator().manual_seed(config.shuffle_seed)
        base = [] if self.policy.adapter is None else self.policy.base_logprobs(self._fixed_tokens())
        self._base_logprobs = torch.tensor(base, dtype=torch.float64)
        """Logprobs of the model below an adapter. A checkpoint is written while engines may have the GPU."""
        self._before: list[ScoredSequence] | None = None
        """Sequences of the last batch as the weights before its update scored them."""

    def activate(self) -> None:
        """Attach this learner's adapter to the policy that it shares with others."""
        self.policy.attach(self._adapter)

    def _reference(self) -> Policy | BasePolicy:
        if self.policy.adapter is not None:
            return BasePolicy(self.policy)
        return Policy(self.config.reference_settings(), self.policy.ranks)

    def _entropy_function(self) -> Callable[[Tensor], Tensor]:
        if not self.config.compiles_entropy:
            return entropy_from_logits
        logits = torch.empty(self._vocabulary, dtype=self.policy.master_dtype, device=self.policy.device)
        return compiled_entropy(logits, with_gradient=self.config.trains_entropy)

    def _critic(self) -> Critic | None:
        settings = self.config.value_model
        if settings is None:
            return None
        critic = Critic(settings, self.config.total_steps, self.ranks)
        if critic.vocabulary < self._vocabulary:
            raise ValueError(
                f"critic.model.path: expected a model that knows the policy's {self._vocabulary} token ids, got "
                f"{critic.vocabulary}; give one of the same family"
            )
        return critic

    @property
    def _vocabulary(self) -> int:
        return self.policy.model.config.get_text_config().vocab_size

    def _choose_threads(self) -> int:
        if self.policy.device.type != "cpu":
            return 1
        parameters = sum(parameter.numel() for parameter in self.policy.model.parameters())
        return max(1, choose_threads(parameters, usable_cores(), self.config.engine_threads) // self.ranks.per_node)

    def update(
        self, used: Sequence[Trajectory], version: float | None = None, observe: StepObserver = unobserved
    ) -> UpdateResult:
        """Trains on the trajectories that `filter_trajectories` lets through. Returns their metrics and advantages.

        `observe` is entered around each optimizer step, with its trajectories. `version` names the
        weights before the update, with a fraction if several updates make a version. `proximal_logprobs=loglinear`
        measures staleness against it, and takes the newest sampled version for None. A mini-batch of which rejection
        leaves no token is not trained on and counts as a skipped step. Offloaded weights stay on the device until
        `release_memory`, for the proof of their next version. In the updates before `critic_warmup` the value
        model alone is trained. Raises EmptyBatchError for no trajectories, and ValueError for one without a reward or a
        prompt.
        """
        if not used:
            raise EmptyBatchError(
                "expected a trajectory to train on, got none; look at their errors, nothing was updated"
            )
        rows, owners = rows_of(used)
        if self.critic is None:  # its training needs the memory itself
            self.policy.cpu_offload.load()
        prepared = self._prepared(used, rows, owners, version)
        batch, mismatch = prepared.batch, prepared.mismatch
        sequences = choose_sequences(rows, by_token(batch.advantages).abs().amax(-1).tolist())
        metrics = {**batch_metrics(used, batch, prepared.rewards, prepared.returns), **prepared.kl_metrics}
        if self.critic is not None:
            with self._clock("update_critic"):
                trained = self.critic.update(batch, owners)
            metrics |= {**value_metrics(batch), **trained}
        record = TokenRecord(batch, prepared.logprobs) if self.config.save_token_values else None
        policy_updates = self.updates - self.config.updates_without_policy
        self.policy.cpu_offload.load()
        self._before = self.policy.published_logprobs([self._fixed_tokens(), *sequences])
        if policy_updates >= 0:
            lr = adamw.learning_rate(self.config.actor.optim, self.config.total_steps, policy_updates)
            metrics |= self._update_policy(batch, used, owners, lr, observe, mismatch, record)
        else:
            metrics |= mismatch
        self.updates += 1
        tokens = None if record is None else record.of(rows)
        return UpdateResult(metrics, prepared.advantages, tokens, self._clock.take_seconds())

    def _update_policy(
        self,
        batch: TrainingBatch,
        used: Sequence[Trajectory],
        owners: Sequence[int],
        lr: float,
        observe: StepObserver,
        mismatch: Metrics,
        record: TokenRecord | None,
    ) -> Metrics:
        """Takes the optimizer steps of an update and returns their metrics, including the mismatch's.

        `record` gets the values of the tokens that they train.
        """
        adamw.set_options(self.optimizer, lr=lr)
        actor, steps, emptied = self.config.actor, list[StepOutcome](), 0.0
        shuffler = self._shuffler if actor.shuffle else None
        with self._exact_reference():
            for index in mini_batches(owners, self.config.mini_batch_size, actor.ppo_epochs, shuffler):
                trainable = index[batch.response_mask[index].any(-1)]  # rejection may leave rows without a token
                if not len(trainable):
                    emptied += 1
                    continue
                with observe([used[owner] for owner in dict.fromkeys(owners[row] for row in index.tolist())]) as report:
                    steps.append(self._step(batch.rows(trainable)))
                    report({**steps[-1].metrics, "actor/lr": lr})
                if record is not None:
                    self._record(record, trainable, steps[-1])
        return {
            **(mismatch or self._mismatch(steps)),
            **mean_metrics([step.metrics for step in steps]),
            "actor/skipped_steps": emptied + sum(step.metrics["actor/skipped_steps"] for step in steps),
            "actor/lr": lr,
            **({"actor/kl_coef": actor.kl_loss_coef} if actor.use_kl_loss else {}),
        }

    def forward_backward(
        self, batch: TrainingBatch, measures: Sequence[Measure], loss: RowsLoss
    ) -> tuple[list[MicroBatch], list[MicroLoss]]:
        """Add the gradient of a batch to the policy's. Returns its micro-batches and the loss of each.

        `loss` gets what the measures make of the policy's logits at the response mask. Under `torch.no_grad` the losses
        are computed alone.
        """
        passes: list[MicroBatch] = []
        parts: list[MicroLoss] = []
        for micro_batch in self.policy.micro_batches(batch, self.config.update_limit):
            parts.append(self._backward(micro_batch, measures, loss))
            passes.append(micro_batch)
        return passes, parts

    def optim_step(self, clip_grad: float) -> tuple[float, bool]:
        """Take AdamW's step with the gradient since the last one, scaled down to the norm `clip_grad`, and clear it.

        Returns the norm before, and whether it stepped: a gradient that is not finite is dropped.
        """
        with self.moments.on_device():
            return adamw.step(self.optimizer, self.policy.model, clip_grad)

    def supervise(self, rows: Sequence[MaskedTokens]) -> Metrics:
        """Take an optimizer step on these rows. Returns its metrics by the names of verl's SFT trainer.

        The loss is the mean of -log p over the trained tokens of the rows, whatever the micro-batches and ranks
        (verl/workers/utils/losses.py, `sft_loss`, release 0.9.1).
        """
        lr = adamw.learning_rate(self.config.actor.optim, self.config.total_steps, self.updates)
        adamw.set_options(self.optimizer, lr=lr)
        self.policy.cpu_offload.load()
        loss, tokens = self._supervised(rows)
        norm, stepped = self.optim_step(self.config.clip_grad)
        self.updates += 1
        return {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/skipped_steps": float(not stepped),
            "train/trained_tokens": tokens,
            "train/global_tokens": float(sum(len(ids) for ids, _ in rows)),
        }

    def supervised_loss(self, rows: Sequence[MaskedTokens]) -> tuple[float, float]:
        """The loss of `supervise` under the current weights, without a step, and the number of trained tokens."""
        with self.policy.inference():
            return self._supervised(rows)

    def _supervised(self, rows: Sequence[MaskedTokens]) -> tuple[float, float]:
        """The loss of these rows and the number of trained tokens. Adds the gradient unless gradients are off."""
        batch = TrainingBatch.of_tokens(rows, self.policy.master_dtype)
        totals = Aggregation.over(batch.response_mask, "token-mean")

        def loss(micro: TrainingBatch, _: Tensor, values: Sequence[Tensor]) -> MicroLoss:
            logp, mask = at_mask(micro.response_mask, values[0]), micro.response_mask
            inputs = LossInputs(logp, micro.old_logprobs, by_token(micro.advantages), mask, totals, None)
            return MicroLoss(policy_loss_of("gpg")(self.config, inputs)[0], {}, values[0].detach(), values[0].detach())

        passes, parts = self.forward_backward(batch, [token_logprobs], loss)
        own = sum(float(part.loss) for micro, part in zip(passes, parts, strict=True) if micro.reports)
        return float(self.ranks.summed(torch.tensor(own, dtype=torch.float64))), totals.tokens

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
        """Writes everything that a new learner of the same configuration, on any number of ranks, needs to continue.

        Of a model with an adapter only the adapter is written, and by what its base model can be told from others. A
        value model has a folder of its own beside this one. Raises NotFiniteError, with nothing written, for weights
        that are NaN or infinite.
        """
        write_state(folder, self._state(), self.ranks, self.policy.export if self._saves_whole_model else None)

    def snapshot(self) -> Snapshot:
        """A copy of what `save` writes, to be written later by the first rank."""
        publish: Publish | None = None
        if self._saves_whole_model:
            weights = self.policy.published_copy()
            publish = partial(self.policy.write_published, state=weights)
        return Snapshot.of(self._state(), publish, self.ranks)

    @property
    def _saves_whole_model(self) -> bool:
        return "hf_model" in self.config.actor.checkpoint.save_contents

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """Contents of a checkpoint, by file."""
        progress = {
            "updates": torch.tensor(self.updates),
            "shuffler": self._shuffler.get_state(),
            "published": torch.zeros(1, dtype=self.policy.published_dtype),
        }
        if self.config.algorithm.kl_ctrl.type == "adaptive":
            progress["reward_kl_coef"] = torch.tensor(self.reward_kl_coef, dtype=torch.float64)
        if self.policy.adapter is not None:
            progress["base_logprobs"] = self._base_logprobs
        weights = self.policy.tensors()
        require_finite_shards(weights, self.policy.ranks)
        parts = {
            "model": weights,
            "optimizer": adamw.named_state(self.optimizer, self.policy.model),
            "extra": progress,
        }
        state = {FILES[part]: parts[part] for part in FILES if part in self.config.actor.checkpoint.save_contents}
        if isinstance(self.reference, Policy):
            state[REFERENCE] = self.reference.tensors()
        if self.critic is not None:
            state |= self.critic.state()
        return state

    def load(self, folder: Path) -> None:
        """Restores what save() wrote. A saved reference replaces the model of `model_path`.

        Raises ValueError when the checkpoint belongs to another model, or lacks one of the `load_contents`.
        """
        contents = to_load(folder, self.config.actor.checkpoint)
        if "model" in contents:
            self.policy.load(folder / FILES["model"])
        progress = read_whole(folder / FILES["extra"]) if is_saved(folder / FILES["extra"]) else {}
        if "base_logprobs" in progress:
            self._check_base(progress["base_logprobs"])
        if "optimizer" in contents:
            adamw.load_optimizer(self.optimizer, self.policy.model, folder / FILES["optimizer"])
            self.moments.offload()
        if "extra" in contents:
            self.updates = int(progress["updates"])
            self._shuffler.set_state(progress["shuffler"])
            if self.config.algorithm.kl_ctrl.type == "adaptive" and "reward_kl_coef" in progress:
                self.reward_kl_coef = float(progress["reward_kl_coef"])
        reference = folder / REFERENCE
        if isinstance(self.reference, Policy) and is_saved(reference):
            self.reference.load(reference)
        if self.critic is not None and not self.critic.load(folder.parent):
            start = self.critic.settings.model.path
            logger.warning("the checkpoint %s has no value model; its training starts from %s", folder.parent, start)

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face folder of the current weights, with an explicit `lm_head.weight`."""
        self.policy.export(folder)

    def export_to_engines(self, folder: Path) -> None:
        """Writes what is published: the adapter as PEFT does, where it is published alone, else as `export`.

        Of several ranks each writes its share of the weights.
        """
        if self.config.publishes_adapter:
            self.policy.export_adapter(folder)
        else:
            self.policy.export_shares(folder)

    def published(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """A context with the weights that `export` writes, where and as the model has them; for one process."""
        return self.policy.published()

    def publish_share(self, work: Work[T]) -> list[T]:
        """Return what a part of a publication gives in each rank. An OSError of any rank is raised in all."""
        return self.ranks.of_each(lambda: work.run(self.ranks), work.result)

    def proof(self, folder: Path, previous_version: int | None) -> WeightProof:
        """A proof by which an engine can check that it holds the weights that `export_to_engines` wrote to `folder`.

        `previous_version` is the version before the last update, None when it was not published. Of an adapter there
        are no digests: what an engine makes of it depends on the engine. Raises NotFiniteError when the model computes
        NaN or infinities.
        """
        before = self._before if previous_version is not None else None
        sequences = [self._fixed_tokens()] if before is None else [sequence.token_ids for sequence in before]
        with self.policy.cpu_offload.on_device():
            now = self.policy.published_logprobs(sequences)
            require_finite_logprobs([logprob for sequence in now for logprob in sequence.logprobs])
            coarse = self.policy.published_logprobs(sequences, torch.bfloat16)
        probes = probes_of(now, before)
        return WeightProof(
            digests=[] if self.config.publishes_adapter else self._tensor_digests(folder),
            probes=probes,
            previous_version=None if before is None else previous_version,
            dtype=str(self.policy.published_dtype).removeprefix("torch."),
            rounding=rounding_of(probes, coarse),
        )

    def _tensor_digests(self, folder: Path) -> list[TensorDigest]:
        def own() -> list[TensorDigest]:
            return tensor_digests(folder, own_files(folder.glob("*.safetensors"), self.ranks))

        return sorted(chain(*self.ranks.of_each(own, TypeAdapter(list[TensorDigest]))), key=lambda digest: digest.name)

    def _check_base(self, saved: Tensor) -> None:
        difference = float((self._base_logprobs - saved).abs().max())
        if difference > BASE_TOLERANCE:
            raise ValueError(
                f"expected the base model that the adapter was trained on, got {self.config.model_path}, whose "
                f"logprobs differ by {difference:.2g}; resume with that model"
            )

    def _fixed_tokens(self) -> list[int]:
        # Low ids exist in every tokenizer, while a model's vocabulary is often padded beyond its tokenizer.
        vocabulary = min(256, self._vocabulary)
        return [(37 * i + 11) % vocabulary for i in range(PROBE_LENGTH)]

    def release_memory(self) -> None:
        """Give the GPU of each rank the memory of offloaded weights, and of freed tensors, which PyTorch keeps."""
        self.policy.cpu_offload.offload()
        gc.collect()
        torch.cuda.empty_cache()

    def free_memory(self) -> list[int]:
        """Return the free bytes of each rank's GPU; nothing on CPUs."""
        if self.policy.device.type != "cuda":
            return []
        return self.ranks.of_each(lambda: torch.cuda.mem_get_info()[0], TypeAdapter(int))

    def close(self) -> None:
        """Release memory. The learner is of no further use."""
        self.release_memory()

    def _with_shares(self, batch: TrainingBatch, used: Sequence[Trajectory], version: float | None) -> TrainingBatch:
        """The batch, ready for `proximal_logprobs=loglinear` if that is configured."""
        if self.config.proximal_logprobs != "loglinear":
            return batch
        if version is None:
            version = max((span.version for t in used for span in t.weight_versions), default=0)
        versions = token_versions(used, batch.response_mask.shape[1], version)
        return replace(batch, loglinear_share=loglinear_share(versions, version).to(batch.old_logprobs.dtype))

    def _prepared(
        self, used: Sequence[Trajectory], rows: Sequence[Trajectory], owners: Sequence[int], version: float | None
    ) -> Prepared:
        """The batch with what stays fixed during the update: old logprobs, the correction, the reference's, advantages.

        The rewards and the KL penalty cover rejected tokens too. Advantages are normalised over those that are trained.
        """
        sampled = TrainingBatch.of(rows, [0.0] * len(rows), self.policy.master_dtype)
        batch, mismatch = self._with_shares(sampled, rows, version), Metrics()
        measured = self._measured(batch)
        if self.config.recompute_old_logprobs:
            batch, mismatch = self._corrected(batch, measured[0])
        if self._needs_ref_logprobs:
            assert self.reference is not None
            ref_logprobs = self.reference.logprobs(sampled, self.config.rollout.temperature, self.config.ref_limit)
            batch = replace(batch, ref_logprobs=ref_logprobs)
        columns = ResponseColumns(rows, owners, sampled.response_mask.shape[1])
        mask, kl_metrics = columns.response(sampled.response_mask), Metrics()
        rewards = token_rewards(scores_of(used), mask, placed_scores(used, mask.shape[1]))
        if self.config.algorithm.use_kl_in_reward:
            old = measured[0] if self.config.recompute_old_logprobs else sampled.old_logprobs
            kl = kl_penalty(old, batch.ref_logprobs, self.config.algorithm.kl_penalty)
            penalty, kl_metrics = self._kl_penalty(columns.response(kl), mask)
            rewards = rewards - penalty
        values = None
        if self.critic is not None:
            with self._clock("values"):
                values = self.critic.values(batch)
        distribution = [columns.response(measure) for measure in measured] if len(measured) > 1 else [None, None]
        inputs = AdvantageInputs(
            rewards=rewards,
            mask=columns.response(batch.response_mask),
            groups=[f"{t.tags.step}/{t.tags.sample_index}" for t in used],
            components=[{"score": t.reward.score, **t.reward.components} for t in used if t.reward is not None],
            logp=distribution[0],
            sum_pi_squared=distribution[1],
            weights=None if batch.rollout_is_weights is None else columns.response(batch.rollout_is_weights),
            values=None if values is None else columns.response(values),
        )
        advantages = estimate(self.config.algorithm, inputs)
        by_trajectory = per_trajectory(advantages, inputs.mask).tolist()
        if values is not None:
            towards = columns.columns(token_returns(self.config.algorithm, inputs)).to(values.dtype)
            batch = replace(batch, values=values, returns=towards)
        if advantages.dim() == 2:
            advantages = columns.columns(advantages)
            returns = columns.columns(token_returns(self.config.algorithm, inputs))
        else:
            advantages = returns = advantages[torch.tensor(owners)]
        batch = replace(batch, advantages=advantages.to(self.policy.master_dtype))
        if len(rows) > len(used):
            batch = replace(batch, owners=torch.tensor(owners))
        logprobs = measured[0] if self.config.recompute_old_logprobs else None
        return Prepared(batch, logprobs, mismatch, kl_metrics, by_trajectory, inputs.scores, returns)

    def _kl_penalty(self, kl: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
        """KL penalty on the reward of each token, all [B, R], and its metrics. Moves the coefficient on."""
        coefficient, mean = self.reward_kl_coef, mean_kl(kl, mask)
        self.reward_kl_coef = next_coefficient(self.config.algorithm.kl_ctrl, coefficient, mean, len(mask))
        return coefficient * kl * mask, {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coefficient}

    def _measured(self, batch: TrainingBatch) -> list[Tensor]:
        """Measures of the policy before the update, [B, T - 1] each: logprobs, and squared probabilities."""
        measures = (
            *((token_logprobs,) if self.config.recompute_old_logprobs or self.config.measures_distribution else ()),
            *((sum_pi_squared,) if self.config.measures_distribution else ()),
        )
        if not measures:
            return []
        return self.policy.measured(batch, self.config.rollout.temperature, self.config.log_prob_limit, *measures)

    def _corrected(self, sampled: TrainingBatch, old: Tensor) -> tuple[TrainingBatch, Metrics]:
        """The batch with these old logprobs, importance weights and only the tokens that are not rejected.

        A rejected token counts in no total of the mini-batch, and is left out of the KL and the entropy too. Also the
        metrics of the old logprobs against the sampler's.
        """
        rollout, mask = sampled.old_logprobs, sampled.response_mask
        weights, kept = correct(self.config.algorithm.rollout_correction, old - rollout, mask)
        batch = replace(sampled, old_logprobs=old * kept, response_mask=kept, rollout_is_weights=weights)
        drift = drift_metrics(old[mask], rollout[mask])
        return batch, drift | correction_metrics(self.config.algorithm.rollout_correction, old, rollout, mask)

    def _mismatch(self, steps: Sequence[StepOutcome]) -> Metrics:
        """The same metrics of an update without recomputed old logprobs.

        The drift is the first mini-batch's, since later ones see changed weights. The correction's metrics are
        means over the mini-batches, each under the weights that its loss was computed with.
        """
        correction, first = self.config.algorithm.rollout_correction, steps[0]
        corrections: list[Metrics] = []
        for step in steps:
            mini, logp = step.mini, step.logp
            now = logp if correction.bypass_mode else proximal_logprobs(mini, logp)
            corrections.append(correction_metrics(correction, now, mini.old_logprobs, mini.response_mask))
        mask = first.mini.response_mask
        return drift_metrics(first.logp[mask], first.mini.old_logprobs[mask]) | mean_metrics(corrections)

    def _old_logprobs(self, batch: TrainingBatch) -> Tensor:
        return self.policy.logprobs(batch, self.config.rollout.temperature, self.config.log_prob_limit)

    @property
    def _needs_ref_logprobs(self) -> bool:
        return self.config.algorithm.use_kl_in_reward or (
            self.config.actor.use_kl_loss and not self.config.uses_full_kl
        )

    def _exact_reference(self) -> AbstractContextManager[None]:
        """Keeps the reference on the device for the full KL, which needs it in each micro-batch."""
        if self.reference is None or not self.config.uses_full_kl:
            return nullcontext()
        return self.reference.cpu_offload.on_device()

    def _step(self, mini: TrainingBatch) -> StepOutcome:
        actor = self.config.actor
        agg = Aggregation.over(mini.response_mask, actor.loss_agg_mode, self.config.loss_scale_factor, mini.owners)
        weights_mean, mini = self._weights_mean(mini), self._with_selection(mini, agg)

        def loss(micro: TrainingBatch, rows: Tensor, values: Sequence[Tensor]) -> MicroLoss:
            return micro_loss(self.config, micro, values, agg.of_rows(rows), weights_mean)

        passes, parts = self.forward_backward(mini, measures_of(self.config, self._entropy), loss)
        norm, stepped = self.optim_step(self.config.clip_grad)
        own = [float(sum(part.metrics[name] for part in parts)) for name in parts[0].metrics]
        sums = self.ranks.summed(torch.tensor(own, dtype=torch.float64)).tolist()
        metrics = of_kept_tokens(dict(zip(parts[0].metrics, sums, strict=True)))
        metrics |= {"actor/grad_norm": norm, "actor/skipped_steps": float(not stepped)}
        distilled = [
            self._in_columns(mini, passes, values)
            for values in zip(*(part.distillation for part in parts), strict=True)
        ]
        metrics |= distillation_metrics(mini, distilled)
        logp = self._in_columns(mini, passes, [part.logp for part in parts])
        entropies = None
        if self.config.save_token_values:
            entropies = self._in_columns(mini, passes, [part.entropies for part in parts])
        return StepOutcome(metrics, mini, logp, entropies)

    def _in_columns(self, mini: TrainingBatch, passes: Sequence[MicroBatch], values: Sequence[Tensor]) -> Tensor:
        """[b, T - 1] of the values at the response masks of the passes; zeros elsewhere."""
        columns = torch.zeros_like(mini.old_logprobs)
        parts = torch.cat(list(values)).cpu().split([len(part) for part in values])
        for (rows, micro, _, reports), part in zip(passes, parts, strict=True):
            if reports:
                mask = micro.response_mask
                columns[rows, : mask.shape[1]] = at_mask(mask, part).to(columns.dtype)
        return self.ranks.summed(columns)

    def _record(self, record: TokenRecord, index: Tensor, step: StepOutcome) -> None:
        assert step.entropies is not None
        record.add(index, step.logp, step.entropies, *clipped_and_kept(self.config, step.mini, step.logp))

    def _with_selection(self, mini: TrainingBatch, agg: Aggregation) -> TrainingBatch:
        """The mini-batch with the tokens that its loss treats apart. It takes a pass of the current weights.

        verl selects in each micro-batch instead.
        """
        select = SELECTIONS.get(self.config.loss_mode)
        if select is None:
            return mini
        logp = self._old_logprobs(mini)
        old_logp, advantages = proximal_logprobs(mini, logp), by_token(mini.advantages)
        inputs = LossInputs(logp, old_logp, advantages, mini.response_mask, agg, None)
        return replace(mini, selected=select(self.config, inputs, self._shuffler))

    def _weights_mean(self, mini: TrainingBatch) -> float | None:
        """The mean of the importance weights of a mini-batch whose loss computes and normalises them, else None.

        It takes a pass over the mini-batch before its losses. verl divides by the mean of each micro-batch instead.
        """
        config, correction = self.config, self.config.algorithm.rollout_correction
        if config.recompute_old_logprobs or not (config.uses_weights and correction.rollout_is_batch_normalize):
            return None
        logp = self._old_logprobs(mini)
        now = logp if correction.bypass_mode else proximal_logprobs(mini, logp)
        return mean_weight(correction, now - mini.old_logprobs, mini.response_mask)

    def _backward(self, micro_batch: MicroBatch, measures: Sequence[Measure], loss: RowsLoss) -> MicroLoss:
        """Adds the gradient of the micro-batch, zeros unless it counts. Its logits are freed on return."""
        micro = micro_batch.batch.to(self.policy.device)
        temperature, ref = self.config.rollout.temperature, None
        if self.reference is not None and self.config.uses_full_kl:
            ref = self.reference.ref_inputs(micro, temperature)
        part = loss(micro, micro_batch.rows, self.policy.token_values(micro, temperature, *measures, ref=ref))
        if torch.is_grad_enabled():
            (part.loss if micro_batch.counts else part.loss * 0).backward()
        metrics = part.metrics if micro_batch.reports else {name: torch.zeros(()) for name in part.metrics}
        return part._replace(loss=part.loss.detach(), metrics=metrics)
