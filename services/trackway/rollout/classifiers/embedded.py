"""The embedded classifier: transformers' AutoModelForSequenceClassification, in batches of inputs of similar length.

An input's score does not depend on the batch: inputs are padded on the right and masked, and a model without a padding
token gets batches of one length. One thread computes. The queue belongs to the event loop.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from trackway.rollout.classifiers import Admission, ClassifierInfo
from trackway.rollout.engines.admission import OF_REWARD_MODEL, too_long
from trackway.rollout.engines.protocol import EngineStats
from trackway.rollout.engines.torch.weights import device_of, dtype_of
from trackway.rollout.settings import RolloutSettings
from trackway.system import indexed_files
from trackway.system.process import choose_threads, usable_cores
from trackway.wire.errors import ErrorCode, TrackwayError

_log = logging.getLogger(__name__)

_BATCH_TOKENS = {"cpu": 4096}
"""Tokens of a batch, padding included; on a GPU more."""
_BATCH_TOKENS_GPU = 32_768
_NO_PADDING = -1
"""In place of a missing padding token: transformers then takes the last token of each row, as for one row alone."""


@dataclass(eq=False)
class WaitingInput:
    """An input in the queue, and where its logit goes."""

    token_ids: list[int]
    logit: "asyncio.Future[float]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TorchClassifier:
    """A `Classifier` on torch."""

    def __init__(self, settings: RolloutSettings, info: ClassifierInfo) -> None:
        """Raises INVALID_REQUEST for a context length beyond the model's positions."""
        self._settings = settings
        self._admission = Admission(settings, info)
        if problem := too_long(self.max_len, info.max_positions, OF_REWARD_MODEL):
            raise TrackwayError(ErrorCode.INVALID_REQUEST, problem)
        self._device = device_of(settings)
        self._dtype = dtype_of(settings, self._device)
        self._waiting: list[WaitingInput] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch-classifier")
        self._model: PreTrainedModel | None = None
        self._loop: asyncio.Task[None] | None = None
        self._batch_began: float | None = None
        self._in_batch = self._steps = 0

    @property
    def max_len(self) -> int:
        """Longest input in tokens."""
        return self._admission.max_len

    async def start(self) -> None:
        """Load the weights and start to take inputs."""
        folder, positions = self._settings.model_path, self._settings.max_position_embeddings
        model = await asyncio.to_thread(load_classifier, folder, self._device, self._dtype, positions)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        on_cpu = self._device.type == "cpu"
        threads = choose_threads(parameters, usable_cores()) if on_cpu else 1
        torch.set_num_threads(self._settings.threads or threads)
        self._model = model
        self._loop = asyncio.create_task(self._run(model), name="torch-classifier")

    async def stop(self) -> None:
        """Stop after the batch in work. Inputs that wait are answered UNAVAILABLE."""
        if self._loop is not None:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop
        await asyncio.to_thread(self._thread.shutdown)
        for waiting in self._waiting:
            if not waiting.logit.done():
                waiting.logit.set_exception(_stopped())
        self._waiting.clear()

    async def classify(self, token_ids: Sequence[int]) -> float:
        """The logit of an input. See `Classifier.classify`."""
        if self._loop is None or self._loop.done():
            raise _stopped()
        with self._admission.admit(token_ids):
            waiting = WaitingInput([*token_ids])
            self._waiting.append(waiting)
            self._arrived.set()
            try:
                return await waiting.logit
            finally:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)

    def stuck_for(self) -> float:
        """Seconds since the batch in work began. Infinite when the task that computes has ended."""
        if self._loop is not None and self._loop.done():
            return math.inf
        return 0.0 if self._batch_began is None else time.monotonic() - self._batch_began

    def stats(self) -> EngineStats:
        """The counters."""
        return EngineStats(self._in_batch, len(self._waiting), self._steps, 0, self._admission.tokens, 0)

    async def _run(self, model: PreTrainedModel) -> None:
        most, tokens = self._settings.max_num_seqs, _BATCH_TOKENS.get(self._device.type, _BATCH_TOKENS_GPU)
        pads = model.config.get_text_config().pad_token_id != _NO_PADDING
        while True:
            await self._arrived.wait()
            if not self._waiting:
                self._arrived.clear()
                continue
            batch = next_batch(self._waiting, most, tokens, pads=pads)
            self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
            self._in_batch, self._batch_began = len(batch), time.monotonic()
            try:
                await self._compute(model, batch)
            finally:
                self._in_batch, self._batch_began = 0, None
                self._steps += 1

    async def _compute(self, model: PreTrainedModel, batch: Sequence[WaitingInput]) -> None:
        """Set the logits of a batch, or the error of each input."""
        ids = [waiting.token_ids for waiting in batch]
        try:
            logits = await asyncio.get_running_loop().run_in_executor(self._thread, logits_of, model, ids)
        except asyncio.CancelledError:
            _settle(batch, [_stopped()] * len(batch))
            raise
        except Exception as error:
            _log.exception("a batch of the classifier failed; its inputs are answered with engine_failed")
            message = f"the classifier failed: {type(error).__name__}: {error}; the same request would fail again"
            _settle(batch, [TrackwayError(ErrorCode.ENGINE_FAILED, message)] * len(batch))
            return
        _settle(batch, [_finite(logit) for logit in logits])


def next_batch(waiting: Sequence[WaitingInput], most: int, tokens: int, *, pads: bool) -> list[WaitingInput]:
    """The oldest input and those nearest to its length: up to `most`, padded to at most `tokens`; the oldest always.

    Without `pads`, of one length.
    """
    length = len(waiting[0].token_ids)
    nearest = sorted(waiting, key=lambda other: abs(len(other.token_ids) - length))  # stable: the oldest stays first
    batch: list[WaitingInput] = []
    longest = 0
    for other in nearest[:most]:
        longest = max(longest, len(other.token_ids))
        if batch and (longest * (len(batch) + 1) > tokens or not (pads or len(other.token_ids) == length)):
            break
        batch.append(other)
    return batch


def load_classifier(
    folder: Path, device: torch.device, dtype: torch.dtype, max_positions: int | None = None
) -> PreTrainedModel:
    """The folder's model. Raises WEIGHTS_CORRUPT when weights are missing, which transformers would make up.

    `max_positions` replaces `max_position_embeddings`. A model that learned its positions has no weights for more.
    """
    indexed_files(folder)  # transformers reads what they name
    override = {} if max_positions is None else {"max_position_embeddings": max_positions}
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder,
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, with all of their names
        **override,
    )
    lacking = sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])
    if lacking:
        message = f"expected the weights of {type(model).__name__} in {folder}, got none that fit for "
        remedy = "; take a trained classifier, not the model that it began from"
        raise TrackwayError(ErrorCode.WEIGHTS_CORRUPT, f"{message}{', '.join(lacking[:8])}{remedy}")
    config = model.config.get_text_config()
    config.pad_token_id = _NO_PADDING if config.pad_token_id is None else config.pad_token_id
    return model.to(device).eval()


def logits_of(model: PreTrainedModel, ids: Sequence[list[int]]) -> list[float]:
    """The logit of each input, padded on the right; of one length for a model without a padding token."""
    longest, padding = max(map(len, ids)), model.config.get_text_config().pad_token_id
    tokens = torch.tensor([row + [padding] * (longest - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    with torch.inference_mode():
        output = model(input_ids=tokens.to(model.device), attention_mask=mask.to(model.device))
    return output.logits[:, 0].float().tolist()


def _settle(batch: Sequence[WaitingInput], results: Sequence[float | TrackwayError]) -> None:
    for waiting, result in zip(batch, results, strict=True):
        if waiting.logit.done():  # its caller has left
            continue
        if isinstance(result, TrackwayError):
            waiting.logit.set_exception(result)
        else:
            waiting.logit.set_result(result)


def _finite(logit: float) -> float | TrackwayError:
    if math.isfinite(logit):
        return logit
    return TrackwayError(ErrorCode.ENGINE_FAILED, f"expected a finite logit, got {logit}; check the model's weights")


def _stopped() -> TrackwayError:
    message = "expected a started classifier, got one that is starting or has stopped; retry later"
    return TrackwayError(ErrorCode.UNAVAILABLE, message)
