"""Tinker's API, by the names of its SDK (0.38). Losses and samples are protobuf instead.

Requests refuse unknown fields, as the SDK's own models do.
"""

import json
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, StringConstraints
from pydantic_core import PydanticCustomError

from trackway.wire.base import Float, Int, TokenId, WireReply, WireRequest
from trackway.wire.rollout import MAX_TOP_LOGPROBS

_SESSION = r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}"
_NUMBER = r"[0-9]{1,9}"
MAX_METADATA_BYTES = 16_384
MAX_SAMPLES = 128
"""Most sequences of one sample request."""
MAX_SEQ_ID = 2**62
"""Sequence ids of an SDK's copies begin at multiples of 10^9 up to 10^18."""


def _small(value: JsonValue) -> JsonValue:
    size = len(json.dumps(value))
    if size > MAX_METADATA_BYTES:
        got = {"most": MAX_METADATA_BYTES, "size": size}
        raise PydanticCustomError("metadata", "expected at most {most} bytes of JSON, got {size}; shorten it", got)
    return value


Metadata = Annotated[dict[str, JsonValue], AfterValidator(_small)]
SessionId = Annotated[str, StringConstraints(pattern=f"^{_SESSION}$")]
ModelId = Annotated[str, StringConstraints(pattern=f"^{_SESSION}:train:{_NUMBER}$")]
SamplerId = Annotated[str, StringConstraints(pattern=f"^{_SESSION}:sample:{_NUMBER}$")]
RequestId = Annotated[str, StringConstraints(pattern=f"^{_SESSION}:(train|sample):{_NUMBER}:[0-9]{{1,19}}$")]
CheckpointName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}$")]
TinkerPath = Annotated[
    str,
    StringConstraints(pattern=rf"^tinker://{_SESSION}:train:{_NUMBER}/(weights|sampler_weights)/[A-Za-z0-9][\w.\-]*$"),
]
BaseModelName = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Place = Annotated[Int, Field(ge=0, lt=10**9)]
"""Number of a model or a sampler in its session."""
SeqId = Annotated[Int, Field(ge=1, lt=MAX_SEQ_ID)]
"""Place of a request among its model's."""
Seconds = Annotated[Int, Field(ge=1, le=10**9)]
CheckpointKind = Literal["weights", "sampler_weights"]


class ClientConfigRequest(WireRequest):
    """Ask for the settings of a client."""

    sdk_version: str


class CreateSessionRequest(WireRequest):
    """Open a session."""

    tags: Annotated[list[str], Field(max_length=64, fail_fast=True), AfterValidator(_small)]
    user_metadata: Metadata | None = None
    sdk_version: str = Field(max_length=64)
    project_id: str | None = Field(default=None, max_length=256)
    display_name: str | None = Field(default=None, max_length=256)
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(WireRequest):
    """Keep a session open."""

    session_id: SessionId
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(WireRequest):
    """The end of a client."""

    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(WireRequest):
    """End a session."""

    reason: FinishReason
    detail: str | None = Field(default=None, max_length=4096)


class LoraParams(WireRequest):
    """The adapter of a new model."""

    rank: Int = Field(ge=1, le=1024)
    seed: Annotated[Int | None, Field(ge=-(2**63), lt=2**63)] = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(WireRequest):
    """The optimizer of a new model."""

    type: Literal["adamw"] = "adamw"


class CreateModelRequest(WireRequest):
    """Create a model in training."""

    session_id: SessionId
    model_seq_id: Place
    base_model: BaseModelName
    user_metadata: Metadata | None = None
    lora_config: LoraParams
    optimizer_config: OptimizerChoice = OptimizerChoice()
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(WireRequest):
    """Ask for a model's facts."""

    model_id: ModelId
    type: Literal["get_info"] = "get_info"


class AdamParams(WireRequest):
    """Hyperparameters of one step of AdamW."""

    learning_rate: Float = Field(default=1e-4, ge=0)
    beta1: Float = Field(default=0.9, ge=0, lt=1)
    beta2: Float = Field(default=0.95, ge=0, lt=1)
    eps: Float = Field(default=1e-12, gt=0)
    weight_decay: Float = Field(default=0.0, ge=0)
    grad_clip_norm: Float = 0.0
    """Largest norm of the gradient. 0 or less does not clip."""


class OptimStepRequest(WireRequest):
    """Update a model by its accumulated gradients."""

    adam_params: AdamParams
    model_id: ModelId
    seq_id: SeqId
    type: Literal["optim_step"] = "optim_step"


class _SaveRequest(WireRequest):
    model_id: ModelId
    seq_id: SeqId
    ttl_seconds: Seconds | None = None
    """Seconds until named weights are deleted. None keeps them until their session's folder is removed."""
    user_metadata: Annotated[dict[str, str], AfterValidator(_small)] | None = None


class TtlRequest(WireRequest):
    """Set when saved weights are deleted."""

    ttl_seconds: Seconds | None
    """None keeps them."""


class SaveWeightsRequest(_SaveRequest):
    """Save weights and optimizer state under a name."""

    path: CheckpointName
    overwrite: bool = False
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(_SaveRequest):
    """Publish weights to sample from, under a name or as a sampling session."""

    path: CheckpointName | None = None
    sampling_session_seq_id: Place | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeightsRequest(WireRequest):
    """Load a checkpoint into a model, or into a new one of a session."""

    model_id: ModelId | None = None
    seq_id: SeqId | None = None
    session_id: SessionId | None = None
    model_seq_id: Place | None = None
    base_model: BaseModelName | None = None
    user_metadata: Metadata | None = None
    path: TinkerPath
    optimizer: bool
    optimizer_config: OptimizerChoice | None = None
    weights_access_token: None = None
    type: Literal["load_weights"] = "load_weights"


class UnloadModelRequest(WireRequest):
    """Free a model's memory."""

    model_id: ModelId
    type: Literal["unload_model"] = "unload_model"


class CreateSamplingSessionRequest(WireRequest):
    """Open a sampling session of a base model or of saved weights."""

    session_id: SessionId
    sampling_session_seq_id: Place
    base_model: BaseModelName | None = None
    model_path: TinkerPath | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class EncodedText(WireRequest):
    """A run of token ids."""

    tokens: list[TokenId] = Field(fail_fast=True)
    type: Literal["encoded_text"] = "encoded_text"


class ModelInput(WireRequest):
    """A prompt in chunks of tokens."""

    chunks: list[EncodedText] = Field(max_length=4096, fail_fast=True)

    @property
    def token_ids(self) -> list[int]:
        """All token ids."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SampleParams(WireRequest):
    """Parameters of the sampling."""

    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    """None takes what the prompt leaves of the context."""
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63 - MAX_SAMPLES)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=256, fail_fast=True)]
        | Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)]
        | None
    ) = None
    """Texts or token ids that end a sequence, as the model's end token does. An empty list ends it at `max_tokens`."""
    temperature: Float = Field(default=1.0, ge=0)
    top_k: Int = Field(default=-1, ge=-1)
    top_p: Float = Field(default=1.0, ge=0, le=1)


TopK = Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class SampleRequest(WireRequest):
    """Continue a prompt `num_samples` times."""

    num_samples: Int = Field(default=1, ge=1, le=MAX_SAMPLES)
    prompt: ModelInput
    sampling_params: SampleParams
    sampling_session_id: SamplerId
    seq_id: Annotated[Int, Field(ge=0, lt=MAX_SEQ_ID)]
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: TopK = 0
    topk_sample_logprobs: TopK = 0
    prompt_logprobs_last_n: Annotated[Int, Field(ge=1)] | None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None
    type: Literal["sample"] = "sample"


class RetrieveFutureRequest(WireRequest):
    """Ask for the result of a request."""

    request_id: RequestId
    allow_metadata_only: bool = False


class CancelFutureRequest(WireRequest):
    """Abort a sample."""

    request_id: RequestId


class WeightsInfoRequest(WireRequest):
    """Ask for a checkpoint's facts."""

    tinker_path: TinkerPath


class TinkerReply(WireReply):
    """A reply by Tinker's names."""

    model_config = ConfigDict(protected_namespaces=())


class ClientConfig(TinkerReply):
    """Settings of an SDK of this server."""

    sample_max_concurrent_requests: int
    custom_loss_server_side: bool = False
    sample_use_retrieve_futures: bool = False
    proto_compress_fwdbwd: bool = False


class DynamicConfig(TinkerReply):
    """Settings that an SDK asks for again now and then."""

    sample_cancel_enabled: bool = True


class ApiHealth(TinkerReply):
    """The API answers."""

    status: Literal["ok"] = "ok"


class TelemetryAccepted(TinkerReply):
    """Telemetry is dropped."""

    status: Literal["accepted"] = "accepted"


class SupportedModel(TinkerReply):
    """A model that can be trained and sampled."""

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


class ServerCapabilities(TinkerReply):
    """The models of this server."""

    supported_models: list[SupportedModel]


class CreatedSession(TinkerReply):
    """A new session."""

    type: Literal["create_session"] = "create_session"
    session_id: str


class HeartbeatReply(TinkerReply):
    """The session is open."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FutureReply(TinkerReply):
    """The request is on disk. `retrieve_future` returns its result."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class ModelData(TinkerReply):
    """The base of a model."""

    arch: str | None = None
    model_name: str
    tokenizer_id: str


class ModelFactsReply(TinkerReply):
    """A model in training."""

    type: Literal["get_info"] = "get_info"
    model_data: ModelData
    model_id: str
    is_lora: Literal[True] = True
    lora_rank: int
    model_name: str


class CreatedSamplingSession(TinkerReply):
    """A new sampling session."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class SamplerReply(TinkerReply):
    """A sampling session."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class WeightsInfo(TinkerReply):
    """The model of a checkpoint."""

    base_model: str
    is_lora: Literal[True] = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class SavedCheckpoint(TinkerReply):
    """Saved weights."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: datetime
    tinker_path: str
    expires_at: datetime | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunReply(TinkerReply):
    """A model in training, as a list of runs shows it."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: Literal[True] = True
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: SavedCheckpoint | None = None
    last_sampler_checkpoint: SavedCheckpoint | None = None
    user_metadata: dict[str, JsonValue] | None = None


class ListCursor(TinkerReply):
    """A part of a list."""

    offset: int
    limit: int
    total_count: int


class TrainingRunList(TinkerReply):
    """Models in training."""

    training_runs: list[TrainingRunReply]
    cursor: ListCursor


class CheckpointList(TinkerReply):
    """Saved weights of a model."""

    checkpoints: list[SavedCheckpoint]


class OpenSessionList(TinkerReply):
    """Ids of the open sessions."""

    sessions: list[str]


class SessionFacts(TinkerReply):
    """The models and samplers of a session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, JsonValue] | None = None
    display_name: str | None = None


class NothingReply(TinkerReply):
    """Nothing to say."""
