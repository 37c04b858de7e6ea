"""A model in training by calls: an adapter of the session's base model, its AdamW and its files (paths.py).

A file has the adapter, AdamW's moments and an AdapterHeader. It is replaced whole.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, Field, JsonValue, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trackway.learner import optimizer as adamw
from trackway.learner.config import LearnerConfig
from trackway.learner.learner import Learner
from trackway.learner.policy import Policy
from trackway.system import replacing, writing
from trackway.trainer.calls.losses import LossOutput, TrainedDatum, forward_backward, trained_data
from trackway.trainer.calls.protobuf import ForwardBackward
from trackway.trainer.calls.results import digest_of
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow

Arguments = TypeVar("Arguments", bound=BaseModel)
ALPHA = 32.0
"""The adapter's update is scaled by this divided by its rank, so that a learning rate fits every rank
(https://thinkingmachines.ai/blog/lora)."""
ATTENTION = r".*(attn|attention).*"
"""Names of the layers that `train_attn` chooses. `train_mlp` chooses all others below the head."""
_HEADER, _MODEL, _OPTIMIZER = "header", "model.", "optimizer."


class LoraArguments(BaseModel):
    """The adapter of a new model, by Tinker's names."""

    rank: int = Field(ge=1, le=1024)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdamArguments(BaseModel):
    """Options of a step, by Tinker's names."""

    model_config = {"allow_inf_nan": False}

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)
    """0 does not clip."""


class AdapterHeader(BaseModel):
    """The model and the request that a file of an adapter belongs to."""

    model_id: str
    seq_id: int
    """The request after which the adapter was like this."""
    lora: LoraArguments
    steps: int = 0
    """Steps of its optimizer."""
    result: str = ""
    """Result of that request."""
    row: MetricsRow | None = None
    """The run's newest row when that request was a step."""
    is_unloaded: bool = False


class SavedAdapter(NamedTuple):
    """A file's contents."""

    header: AdapterHeader
    tensors: dict[str, Tensor]


class TrainedModel:
    """An adapter in training. Methods raise TrackwayError with the model unchanged. Not thread-safe."""

    def __init__(self, header: AdapterHeader, config: LearnerConfig, policy: Policy) -> None:
        """Add a new adapter to the policy."""
        self.header = header
        self.learner = Learner(learner_config_of(config, header), policy=policy)
        self.loss, self.tokens = 0.0, 0
        """Sum of the loss, and target tokens, since the last step."""
        self.data: list[TrainedDatum] = []
        """Data since the last step, in the order of their requests."""

    def forward_backward(self, request: ForwardBackward, samples: Mapping[str, str], traceparent: str) -> LossOutput:
        """Add the request's gradient. INVALID_REQUEST for tokens that the model lacks, NOT_FINITE for NaN.

        For `samples` and `traceparent`, see `trained_data`.
        """
        self._check(request)
        self.learner.activate()
        parameters = [weight for weight in self.learner.policy.model.parameters() if weight.requires_grad]
        before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        try:
            output = forward_backward(self.learner, request)
            if not all(map(torch.isfinite, map(torch.tensor, (output.loss, *(x.sum() for x in output.logprobs))))):
                message = f"expected finite logprobs and a finite {request.loss_fn} loss, got {output.loss}"
                raise TrackwayError(ErrorCode.NOT_FINITE, f"{message}; lower the learning rate or the weights")
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise
        if not request.forward_only:
            self.loss += output.loss
            self.tokens += sum(len(datum.tokens) for datum in request.data)
            self.data += trained_data(request, output, samples, traceparent)
        return output

    def optim_step(self, options: AdamArguments) -> dict[str, float]:
        """Step with the gradient since the last step, and clear it. Returns metrics.

        NOT_FINITE, and the weights are as before, when the gradient or the new weights are not finite.
        """
        self.learner.activate()
        before = self._tensors()
        adamw.set_options(
            self.learner.optimizer,
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        norm, stepped = self.learner.optim_step(options.grad_clip_norm or float("inf"))
        loss, tokens = self.loss, self.tokens
        self.loss, self.tokens, self.data = 0.0, 0, []
        if not stepped or not all(bool(tensor.isfinite().all()) for tensor in self.learner.policy.tensors().values()):
            self._restore(before, optimizer=True)
            message = f"expected a finite gradient and finite weights, got a gradient norm of {norm}"
            raise TrackwayError(ErrorCode.NOT_FINITE, f"{message}; the step is left out, lower the learning rate")
        return {"grad_norm": norm, "lr": options.learning_rate, "loss_sum": loss, "tokens": float(tokens)}

    def write(self, file: Path, header: AdapterHeader) -> None:
        """Write the adapter and AdamW's state. It is on disk on return. Raises StorageError."""
        self.learner.activate()
        write_adapter(file, SavedAdapter(header, self._tensors()))

    def load(self, saved: SavedAdapter, optimizer: bool) -> None:
        """Take saved weights, and AdamW's state or none. The gradient is cleared. INVALID_REQUEST for another shape."""
        self.learner.activate()
        own = self.learner.policy.tensors()
        found = {name.removeprefix(_MODEL): t.shape for name, t in saved.tensors.items() if name.startswith(_MODEL)}
        if found != {name: tensor.shape for name, tensor in own.items()}:
            message = f"expected weights saved with {self.header.lora}, got weights saved with {saved.header.lora}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; create a model with that lora_config")
        self._restore(saved.tensors, optimizer)
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.loss, self.tokens, self.data = 0.0, 0, []

    def _restore(self, tensors: Mapping[str, Tensor], optimizer: bool) -> None:
        with torch.no_grad():
            for name, tensor in self.learner.policy.tensors().items():
                tensor.copy_(tensors[f"{_MODEL}{name}"])
        named = {name.removeprefix(_OPTIMIZER): t for name, t in tensors.items() if name.startswith(_OPTIMIZER)}
        adamw.restore_state(self.learner.optimizer, self.learner.policy.model, named if optimizer else {})

    def _tensors(self) -> dict[str, Tensor]:
        """A copy of the adapter and AdamW's state, on the CPU."""
        policy = self.learner.policy
        tensors = {f"{_MODEL}{name}": tensor for name, tensor in policy.tensors().items()}
        state = adamw.named_state(self.learner.optimizer, policy.model)
        tensors |= {f"{_OPTIMIZER}{name}": tensor for name, tensor in state.items()}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _check(self, request: ForwardBackward) -> None:
        config = self.learner.policy.model.config.get_text_config()
        longest = max(len(datum.tokens) for datum in request.data)
        if longest > config.max_position_embeddings:
            message = f"expected at most {config.max_position_embeddings} tokens in a datum, got {longest}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; cut it")
        highest = max(max(int(datum.tokens.max()), int(datum.targets.max())) for datum in request.data)
        if highest >= config.vocab_size:
            message = f"expected token ids below {config.vocab_size}, got {highest}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; use the tokenizer of the base model")


def learner_config_of(config: LearnerConfig, header: AdapterHeader) -> LearnerConfig:
    """The session's configuration with the model's adapter. INVALID_REQUEST for an adapter without layers."""
    lora = header.lora
    if not (lora.train_mlp or lora.train_attn):
        message = "lora_config: expected train_mlp or train_attn, got neither"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; set one of them (the head has no adapter here)")
    excluded = None if lora.train_attn else ATTENTION
    excluded = excluded if lora.train_mlp else rf"(?!{ATTENTION}).*"
    seed = int(digest_of(header.model_id), 16) % 2**31 if lora.seed is None else lora.seed
    values = {"lora_rank": lora.rank, "lora_alpha": ALPHA, "target_modules": "all-linear", "exclude_modules": excluded}
    return replace(config, model=config.model.with_values(values), seed=seed)


def write_adapter(file: Path, saved: SavedAdapter) -> None:
    """Replace a file. It is on disk on return. Raises StorageError."""
    with writing(file, "an adapter"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "an adapter") as draft:
            save_file(saved.tensors, draft, {_HEADER: saved.header.model_dump_json()})
            with draft.open("rb") as written:
                os.fsync(written.fileno())


def read_adapter(file: Path) -> SavedAdapter | None:
    """Read a file, or None without one. CHECKPOINT_CORRUPT for a damaged one."""
    try:
        with safe_open(file, "pt") as opened:
            header = AdapterHeader.model_validate_json((opened.metadata() or {})[_HEADER])
            return SavedAdapter(header, {name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (SafetensorError, ValidationError, KeyError) as error:
        message = f"expected an adapter in {file}, got a damaged file ({error}); restore it, or start a new session"
        raise TrackwayError(ErrorCode.CHECKPOINT_CORRUPT, message) from error


def arguments_of(kind: type[Arguments], arguments: JsonValue, name: Literal["lora_config", "adam_params"]) -> Arguments:
    """Validate a part of a request. Raises INVALID_REQUEST."""
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (name, *first["loc"])))
        message = f"{where}: expected another value ({first['msg']}), got {str(first['input'])[:64]!a}; correct it"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error
