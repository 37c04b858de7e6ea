"""Supervised training: the steps of its loop, over rows whose answers are given (trackway.trainer.data.conversations).

It asks no other service. It shares checkpoints, metrics, traces and resume with reinforcement learning.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from trackway.chat.tokens import ChatTokens
from trackway.learner.batch import MaskedTokens
from trackway.run_config import RunConfig
from trackway.trainer.data.conversations import EncodedRow, rows_to_train
from trackway.trainer.data.dataset import Prompts
from trackway.trainer.loop.base import BaseTraining, StopRequested
from trackway.trainer.loop.schedule import Progress
from trackway.trainer.metrics import Metrics
from trackway.trainer.traces.run import shown_metrics
from trackway.wire.errors import ErrorCode, TrackwayError


@dataclass(kw_only=True)
class SupervisedTraining(BaseTraining):
    """A run of supervised training. The methods are the steps of `fit_rows`."""

    batches: Prompts[EncodedRow]
    held_out: Sequence[EncodedRow] = field(default_factory=list)
    """Rows whose loss is validated. Without them no validation takes place."""
    batch_size: int = 1
    """Rows of a validation's pass."""

    async def update(self) -> Metrics:
        """One optimizer step on the next batch. Ends the step."""
        position = self.progress.position
        batch, after = self.batches.take(position)
        with self._part("update_actor"):
            metrics = await asyncio.to_thread(self._learn, _tokens(batch))
        self.progress = Progress(step=self.step + 1, position=after)
        self.traces.own.note(**shown_metrics(metrics))
        return metrics | {
            "training/global_step": float(self.step),
            "training/epoch": float(position.epoch),
            "perf/total_num_tokens": metrics["train/global_tokens"],
        }

    async def validate(self, metrics: Metrics) -> Metrics:
        """`metrics` of the newest step, with the mean loss over all trained tokens of the held-out rows, if any.

        Raises StopRequested when a stop is requested meanwhile. A resumed run then validates the step first.
        """
        self.progress = self.progress.model_copy(update={"unvalidated": {}})
        if not self.held_out:
            return metrics
        total = count = 0.0
        with self._part("testing") as waiting:
            for start in range(0, len(self.held_out), self.batch_size):
                waiting.progress = lambda done=start: f"{done} of {len(self.held_out)} rows"
                if self.stop.is_set():
                    unvalidated = metrics or {"training/global_step": float(self.step)}
                    self.progress = self.progress.model_copy(update={"unvalidated": unvalidated})
                    raise StopRequested
                rows = _tokens(self.held_out[start : start + self.batch_size])
                loss, tokens = await asyncio.to_thread(self.learner.supervised_loss, rows)
                total, count = total + loss * tokens, count + tokens
        return metrics | {"val/loss": total / count}

    def _learn(self, rows: Sequence[MaskedTokens]) -> Metrics:
        with contextlib.nullcontext() if self.profiler is None else self.profiler.step(self.step + 1):
            return self.learner.supervise(rows)

    async def log(self, metrics: Metrics) -> None:
        """Write the row of the newest step, with the timings of the clock. Does nothing without metrics."""
        if not metrics:
            return
        data = metrics | self.clock.take() | self.traces.metrics()
        seconds = data.get("timing_s/step")
        if seconds and "train/global_tokens" in data:
            data["perf/throughput"] = data["train/global_tokens"] / (seconds * self.plan.gpus)
        await self.write_row(self.row(data))
        await self._show(data)


def load_supervised(config: RunConfig) -> tuple[list[EncodedRow], list[EncodedRow]]:
    """The rows to train on and the rows to validate on, encoded. Raises TrackwayError for rows that cannot be."""
    data = config.data
    model = str(config.actor_rollout_ref.model.path)
    try:
        tokens = ChatTokens.load(model, data.apply_chat_template_kwargs)
    except (OSError, ValueError) as error:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"no tokenizer for the model {model!r}: {error}") from error
    train = rows_to_train(config, data.train_max_samples, data.train_files, tokens)
    return train, rows_to_train(config, data.val_max_samples, data.val_files, tokens)


def _tokens(rows: Sequence[EncodedRow]) -> list[MaskedTokens]:
    return [(list(row.ids), list(row.mask)) for row in rows]
