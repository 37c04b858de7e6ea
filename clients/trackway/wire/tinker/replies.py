"""Replies of Tinker's API."""

from datetime import datetime
from typing import Literal

from pydantic import ConfigDict, JsonValue

from trackway.wire.base import WireReply


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
