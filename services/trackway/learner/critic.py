"""The critic: values in, an update of the value model and verl's metrics out.

The value model is a language model whose head gives one number for each position: the value of the text so far.
Position t belongs to the token at t + 1, as in a policy, so its value is known before that token is written.

The values of a batch are computed before its update. Each mini-batch then takes one step of PPO's clipped value loss
(arXiv:1707.06347; verl's `compute_value_loss` in verl/trainer/ppo/core_algos.py) towards the returns that the
advantages came from, its gradient summed over micro-batches.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from trackway.learner import optimizer as adamw
from trackway.learner.algorithm import Aggregation, aggregate
from trackway.learner.batch import TrainingBatch, mini_batches
from trackway.learner.config import CriticSettings
from trackway.learner.head import TokenLogits, head_of
from trackway.learner.loss import at_mask
from trackway.learner.measuring import Metrics
from trackway.learner.metrics import mean_metrics
from trackway.learner.policy import MicroBatch, Policy
from trackway.learner.ranks.sharding import ALONE, Ranks
from trackway.learner.ranks.snapshot import FILES, to_load
from trackway.learner.weights.offload import CpuOffload
from trackway.learner.weights.sharded_files import read_whole

WEIGHT, BIAS = "score.weight", "score.bias"
"""The head in a folder's safetensors: transformers' name in models for token classification, which verl's are."""


def exchange_head(model: PreTrainedModel, folder: Path) -> None:
    """Gives the model of a folder a head of one number, [N, H] -> [N, 1], in place of its vocabulary head.

    If the folder has no head, as a policy's folder, the head is zero: values start at 0, and the first advantages equal
    the rewards to go. Raises ValueError for a head of another size.
    """
    vocabulary_head = head_of(model).get_parameter("weight")
    head = nn.Linear(vocabulary_head.shape[1], 1, dtype=vocabulary_head.dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    _read(folder, dict(zip((WEIGHT, BIAS), head.parameters(), strict=True)))
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)


def _read(folder: Path, head: dict[str, nn.Parameter]) -> None:
    """Copies the tensors that the folder's files have."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in head.keys() & set(file.keys()):
                saved, parameter = file.get_tensor(name), head[name]
                if saved.shape != parameter.shape:
                    raise ValueError(
                        f"critic.model.path: expected {name} of shape {list(parameter.shape)}, got {list(saved.shape)} "
                        f"in {path}; give a model with one label"
                    )
                with torch.no_grad():
                    parameter.copy_(saved)


class ValueStats(NamedTuple):
    """Means over the model tokens of the mini-batch. The stats of its micro-batches add up."""

    vf_clipfrac: Tensor
    """Share of tokens whose clipped loss exceeds the unclipped one."""
    vpred_mean: Tensor
    """Mean of the predicted values."""


def value_loss(
    predicted: Tensor, values: Tensor, returns: Tensor, mask: Tensor, cliprange: float, agg: Aggregation
) -> tuple[Tensor, ValueStats]:
    """Half the aggregate of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), and its statistics.

    predicted (V), values (V_old), returns (R), mask: [B, T]; cliprange (c): positive. The clip bounds how far one
    update moves a value: beyond it, a token's loss has no gradient that would move it further away from V_old.
    """
    clipped = predicted.clamp(values - cliprange, values + cliprange)
    losses, clipped_losses = (predicted - returns).square(), (clipped - returns).square()
    loss = 0.5 * aggregate(torch.maximum(losses, clipped_losses), mask, agg)
    by_tokens = agg._replace(mode="token-mean")
    with torch.no_grad():
        stats = ValueStats(
            vf_clipfrac=aggregate((clipped_losses > losses).to(losses.dtype), mask, by_tokens),
            vpred_mean=aggregate(predicted, mask, by_tokens),
        )
    return loss, stats


FOLDER = "critic"
"""Name of the folder beside the policy's in a checkpoint, as in verl's."""


class Critic:
    """A value model and its optimizer. Not thread-safe. Among several ranks every method is a collective."""

    def __init__(self, settings: CriticSettings, total_updates: int, ranks: Ranks = ALONE) -> None:
        self.settings = settings
        self.ranks = ranks
        self.updates = 0
        fsdp = settings.model.sharding
        self.model = Policy(settings.model, ranks.sharing_weights(fsdp.fsdp_size), exchange_head)
        """The value model. Its logits are values, [N, 1]."""
        self.optimizer = adamw.new_optimizer(self.model.model, settings.optim)
        self.moments = CpuOffload(
            lambda: adamw.state_tensors(self.optimizer),
            self.model.device,
            offload=(fsdp.optimizer_offload or fsdp.offload_policy) and not self.model.is_offloaded_by_fsdp,
        )
        self._total_updates = total_updates
        self._shuffler = torch.Generator().manual_seed(settings.shuffle_seed)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the value model knows."""
        return self.model.model.config.get_text_config().vocab_size

    def values(self, batch: TrainingBatch) -> Tensor:
        """[N, T - 1] on the CPU: the value before each predicted token, zeros outside the response mask."""
        return self.model.measured(batch, 1.0, self.settings.forward_limit, _value)[0]

    def update(self, batch: TrainingBatch, owners: Sequence[int]) -> Metrics:
        """Trains the values of a batch towards its returns. `owners` is the trajectory of each row.

        A mini-batch of which rejection leaves no token is not trained on.
        """
        settings = self.settings
        rate = adamw.learning_rate(settings.optim, self._total_updates, self.updates)
        adamw.set_options(self.optimizer, lr=rate)
        shuffler = self._shuffler if settings.shuffle else None
        with self.model.cpu_offload.on_device():
            steps = [
                self._step(batch.rows(index).trainable())
                for index in mini_batches(owners, settings.mini_batch_size, settings.epochs, shuffler)
                if batch.response_mask[index].any()
            ]
        self.updates += 1
        skipped = sum(step["critic/skipped_steps"] for step in steps)
        return {**mean_metrics(steps), "critic/skipped_steps": skipped, "critic/lr": rate}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """State that continues the training, by file: the `save_contents`."""
        progress = {"updates": torch.tensor(self.updates), "shuffler": self._shuffler.get_state()}
        parts = {
            "model": self.model.tensors(),
            "optimizer": adamw.named_state(self.optimizer, self.model.model),
            "extra": progress,
        }
        return {
            f"{FOLDER}/{FILES[part]}": parts[part] for part in FILES if part in self.settings.contents.save_contents
        }

    def load(self, checkpoint: Path) -> bool:
        """Restores `state`. False, with nothing changed, for the checkpoint of a run without a critic.

        Raises ValueError when the checkpoint belongs to another model, or lacks one of the `load_contents`.
        """
        folder = checkpoint / FOLDER
        if not folder.is_dir():
            return False
        contents = to_load(folder, self.settings.contents)
        if "model" in contents:
            self.model.load(folder / FILES["model"])
        if "optimizer" in contents:
            adamw.load_optimizer(self.optimizer, self.model.model, folder / FILES["optimizer"])
            self.moments.offload()
        if "extra" in contents:
            progress = read_whole(folder / FILES["extra"])
            self.updates = int(progress["updates"])
            self._shuffler.set_state(progress["shuffler"])
        return True

    def _step(self, mini: TrainingBatch) -> Metrics:
        settings, sums = self.settings, dict[str, float]()
        agg = Aggregation.over(mini.response_mask, settings.loss_agg_mode, settings.loss_scale_factor, mini.owners)
        for micro_batch in self.model.micro_batches(mini, settings.limit):
            for name, value in self._backward(micro_batch, agg.of_rows(micro_batch.rows)).items():
                sums[name] = sums.get(name, 0.0) + value * micro_batch.reports
        with self.moments.on_device():
            norm, stepped = adamw.step(self.optimizer, self.model.model, settings.clip_grad)
        totals = self.ranks.summed(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
        metrics = dict(zip(sums, totals, strict=True))
        return {**metrics, "critic/grad_norm": norm, "critic/skipped_steps": float(not stepped)}

    def _backward(self, micro_batch: MicroBatch, agg: Aggregation) -> Metrics:
        """Adds the gradient of the micro-batch, zeros unless it counts."""
        micro = micro_batch.batch.to(self.model.device)
        assert micro.values is not None and micro.returns is not None
        mask = micro.response_mask
        predicted = at_mask(mask, self.model.token_values(micro, 1.0, _value)[0])
        loss, stats = value_loss(predicted, micro.values, micro.returns, mask, self.settings.cliprange, agg)
        (loss if micro_batch.counts else loss * 0).backward()
        return {
            "critic/vf_loss": float(loss.detach()),
            **{f"critic/{name}": float(value) for name, value in stats._asdict().items()},
        }


def _value(tokens: TokenLogits) -> Tensor:
    """[n]: the values before n tokens, of which the value model's logits are [n, 1]."""
    return tokens.logits.squeeze(-1)
