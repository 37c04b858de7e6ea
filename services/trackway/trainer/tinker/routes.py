"""The routes of Tinker's API under `/api/v1`: what its SDK (0.38) calls. The logic is in service.py."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Query, Request, Response
from pydantic import JsonValue, TypeAdapter

from trackway.clients import RolloutClient
from trackway.clients.weights import WeightStore
from trackway.run_config import resolve
from trackway.serving import ServiceRouter, needs_admin
from trackway.serving.auth import CALLER
from trackway.serving.routes import ErrorFormatRoute, Handler
from trackway.tracing.export.backends import experiment_by_name
from trackway.trainer.calls.protobuf import decode, schema
from trackway.trainer.settings import TrainerSettings
from trackway.trainer.tinker.sampling import CALL_POLICY, MAX_DRAWS
from trackway.trainer.tinker.service import TinkerService
from trackway.trainer.tinker.sessions import CALLER_NAME, SessionRuns, TinkerSessions
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tinker import (
    ApiHealth,
    CancelFutureRequest,
    CheckpointKind,
    CheckpointList,
    CheckpointName,
    ClientConfig,
    ClientConfigRequest,
    CreatedSamplingSession,
    CreatedSession,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    DynamicConfig,
    FinishSessionRequest,
    FutureReply,
    GetInfoRequest,
    HeartbeatReply,
    ListCursor,
    LoadWeightsRequest,
    ModelData,
    ModelFactsReply,
    ModelId,
    NothingReply,
    OpenSessionList,
    OptimStepRequest,
    RetrieveFutureRequest,
    SampleRequest,
    SamplerId,
    SamplerReply,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    ServerCapabilities,
    SessionFacts,
    SessionHeartbeatRequest,
    SessionId,
    SupportedModel,
    TelemetryAccepted,
    TrainingRunList,
    TrainingRunReply,
    TtlRequest,
    UnloadModelRequest,
    WeightsInfo,
    WeightsInfoRequest,
)
from trackway.wire.trajectory import TraceTarget

PROTOBUF = "application/x-protobuf"
MAX_INLINE_BYTES = 1024 * 1024
"""Bytes of a result from which on its size is sent first, for a caller that allows it."""
_MODEL_ID = TypeAdapter(ModelId)


class TinkerRoute(ErrorFormatRoute):
    """A route whose invalid requests are answered 400, as the SDK expects. The body is Trackway's."""

    @staticmethod
    def error_body(error: TrackwayError) -> dict[str, JsonValue]:
        """Trackway's body."""
        return error.to_reply().model_dump(mode="json")

    def get_route_handler(self) -> Handler:
        """The handler, for the sessions of the caller's token. An error where the schema's package is missing."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:  # a dependency of FastAPI takes a tenth of a sample's time here
            try:
                schema()
            except TrackwayError as error:
                return self.error_answer(error)
            CALLER_NAME.set(request.scope[CALLER].name)
            return await handle(request)

        return answer


def tinker_routes(service: TinkerService) -> ServiceRouter:
    """The API. Training needs an operator's token, as runs do. Samples and lists need any."""
    router = ServiceRouter(prefix="/api/v1", tags=["tinker"], route_class=TinkerRoute)
    for routes in (_sampling_routes, _training_routes, _client_routes, _list_routes):  # frequent ones first
        routes(router, service)
    return router


def _client_routes(router: ServiceRouter, service: TinkerService) -> None:
    sessions = service.sessions

    @router.post("/client/config")
    async def client_config(request: ClientConfigRequest) -> ClientConfig:
        """The SDK's switches and limits."""
        return ClientConfig(sample_max_concurrent_requests=MAX_DRAWS)

    @router.post("/client/dynamic_config")
    async def dynamic_config(request: ClientConfigRequest) -> DynamicConfig:
        """True if abandoned samples are cancelled."""
        return DynamicConfig()

    @router.get("/healthz")
    async def healthz() -> ApiHealth:
        """The API answers."""
        return ApiHealth()

    @router.post("/telemetry")
    async def telemetry() -> TelemetryAccepted:
        """Drop what the SDK reports about itself."""
        return TelemetryAccepted()

    @router.get("/get_server_capabilities")
    async def capabilities() -> ServerCapabilities:
        """The model that can be trained and sampled, by each of its names."""
        base = await service.bases.facts()
        models = [SupportedModel(model_name=name, max_context_length=base.max_len) for name in base.names]
        return ServerCapabilities(supported_models=models)

    @router.post("/create_session")
    async def create_session(request: CreateSessionRequest) -> CreatedSession:
        """Open a session. It becomes a run with its first model, and ends when its heartbeats stop."""
        session = service.create_session(request)
        return CreatedSession(session_id=session.id)

    @router.post("/session_heartbeat")
    async def heartbeat(request: SessionHeartbeatRequest) -> HeartbeatReply:
        """Keep a session open. 410 once it has ended."""
        sessions.required(request.session_id)
        return HeartbeatReply()

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: SessionId, request: FinishSessionRequest) -> NothingReply:
        """End a session. Its results stay."""
        session = sessions.any(session_id)
        await sessions.end(session, f"finished by its client: {request.reason.type}")
        return NothingReply()


def _training_routes(router: ServiceRouter, service: TinkerService) -> None:
    operator = [Depends(needs_admin)]

    @router.post("/create_model", dependencies=operator)
    async def create_model(request: CreateModelRequest) -> FutureReply:
        """Create a LoRA model. Its base is the rollout service's model."""
        return await service.create_model(request)

    @router.post("/get_info")
    async def get_info(request: GetInfoRequest) -> ModelFactsReply:
        """The facts of a model."""
        model, base = service.sessions.any(request.model_id).model(request.model_id), await service.bases.facts()
        name = model.base_model
        data = ModelData(model_name=name, tokenizer_id=name if "/" in name else base.root)
        return ModelFactsReply(model_data=data, model_id=request.model_id, lora_rank=model.lora.rank, model_name=name)

    @router.post(
        "/forward_backward",
        dependencies=operator,
        openapi_extra={"requestBody": {"content": {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def forward_backward(raw: Request) -> FutureReply:
        """Compute a loss and add its gradients, or only the loss. The body is a ForwardBackwardRequest in protobuf."""
        body = await raw.body()
        model_id, seq_id = _identified(body)
        request = await asyncio.to_thread(decode, body)
        samples = [sample for datum in request.data for sample in datum.samples]
        return await service.enqueue(model_id, seq_id, "forward_backward", {}, body, samples)

    @router.post("/optim_step", dependencies=operator)
    async def optim_step(request: OptimStepRequest) -> FutureReply:
        """Update the weights with AdamW and clear the gradients."""
        arguments = request.model_dump(mode="json", include={"adam_params"})
        return await service.enqueue(request.model_id, request.seq_id, "optim_step", arguments)

    @router.post("/save_weights", dependencies=operator)
    async def save_weights(request: SaveWeightsRequest) -> FutureReply:
        """Save weights and optimizer state."""
        fields = {"path", "overwrite", "ttl_seconds", "user_metadata"}
        arguments = request.model_dump(mode="json", exclude_none=True, include=fields)
        return await service.enqueue(request.model_id, request.seq_id, "save_weights", arguments)

    @router.post("/save_weights_for_sampler", dependencies=operator)
    async def save_weights_for_sampler(request: SaveWeightsForSamplerRequest) -> FutureReply:
        """Publish weights as a policy of the rollout service."""
        if (request.path is None) == (request.sampling_session_seq_id is None):
            message = "expected either path or sampling_session_seq_id, got both or neither; give one"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        fields = {"path", "sampling_session_seq_id", "kind", "ttl_seconds", "user_metadata"}
        arguments = request.model_dump(mode="json", exclude_none=True, include=fields)
        return await service.enqueue(request.model_id, request.seq_id, "save_weights_for_sampler", arguments)

    @router.post("/load_weights", dependencies=operator)
    async def load_weights(request: LoadWeightsRequest) -> FutureReply:
        """Load saved weights into a model, or into a new one."""
        return await service.load_weights(request)

    @router.post("/unload_model", dependencies=operator)
    async def unload_model(request: UnloadModelRequest) -> FutureReply:
        """Free the memory of a model."""
        return await service.unload(request.model_id)


def _identified(body: bytes) -> tuple[str, int]:
    """Return model and sequence id of a forward_backward. Raises INVALID_REQUEST for other bytes."""
    message = schema().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
        model_id, seq_id = _MODEL_ID.validate_python(message.model_id), message.seq_id
    except Exception as error:  # DecodeError belongs to protobuf, which is imported with the schema
        problem = "expected a ForwardBackwardRequest in protobuf with model_id <session>:train:<number>, got"
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST, f"{problem} {len(body)} other bytes; send it with Tinker's SDK"
        ) from error
    if seq_id < 1:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"seq_id: expected 1 or more, got {seq_id}; count from 1")
    return model_id, seq_id


def _sampling_routes(router: ServiceRouter, service: TinkerService) -> None:
    sessions = service.sessions

    @router.post("/asample")
    async def asample(request: SampleRequest) -> FutureReply:
        """Continue a prompt. 429 while too many samples are in progress."""
        return await service.sample(request)

    @router.post("/retrieve_future", response_model=None, responses={200: {"content": {PROTOBUF: {}}}})
    async def retrieve_future(request: RetrieveFutureRequest) -> Response:
        """The result of a request, as JSON or protobuf; `try_again` when it takes longer than half a minute."""
        result = await service.result(request.request_id)
        if result is None:
            queue_state = "paused_capacity" if service.waits_for_run(request.request_id) else "active"
            return _json({"type": "try_again", "request_id": request.request_id, "queue_state": queue_state})
        if request.allow_metadata_only and len(result.body) > MAX_INLINE_BYTES:
            return _json({"status": "complete_metadata", "response_payload_size": len(result.body)})
        return Response(result.body, media_type=PROTOBUF if result.kind == "protobuf" else "application/json")

    @router.post("/create_sampling_session")
    async def create_sampling_session(request: CreateSamplingSessionRequest) -> CreatedSamplingSession:
        """Open a sampling session."""
        return CreatedSamplingSession(sampling_session_id=await service.create_sampling_session(request))

    @router.get("/samplers/{sampler_id}")
    async def sampler(sampler_id: SamplerId) -> SamplerReply:
        """A sampling session."""
        return service.sampler(sampler_id)

    @router.post("/cancel_future")
    async def cancel_future(request: CancelFutureRequest) -> NothingReply:
        """Abort a sample. Requests of a model cannot be aborted."""
        if request.request_id.split(":")[1] != "sample":
            message = f"expected the id of a sample, got {request.request_id}; let it end"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        sessions.any(request.request_id)
        service.draws.cancel(request.request_id)
        return NothingReply()


def _list_routes(router: ServiceRouter, service: TinkerService) -> None:
    sessions = service.sessions

    @router.post("/weights_info")
    async def weights_info(request: WeightsInfoRequest) -> WeightsInfo:
        """The model of saved weights."""
        return service.weights_info(request.tinker_path)

    @router.get("/training_runs")
    async def training_runs(
        limit: Annotated[int, Query(ge=1, le=1000)] = 20, offset: Annotated[int, Query(ge=0)] = 0
    ) -> TrainingRunList:
        """The models of open sessions, newest session first."""
        models = [(session, model) for session in sessions for model in session.models.values()]
        models.sort(key=lambda pair: pair[0].record.created_at, reverse=True)
        shown = [service.training_run(*pair) for pair in models[offset : offset + limit]]
        return TrainingRunList(
            training_runs=shown, cursor=ListCursor(offset=offset, limit=limit, total_count=len(models))
        )

    @router.get("/training_runs/{training_run_id}")
    async def training_run(training_run_id: ModelId) -> TrainingRunReply:
        """A model."""
        session = sessions.any(training_run_id)
        return service.training_run(session, session.model(training_run_id))

    @router.get("/training_runs/{training_run_id}/checkpoints")
    async def checkpoints(training_run_id: ModelId) -> CheckpointList:
        """The saved weights of a model."""
        session = sessions.any(training_run_id)
        return CheckpointList(checkpoints=session.checkpoints(session.model(training_run_id)))

    operator, checkpoint = [Depends(needs_admin)], "/training_runs/{training_run_id}/checkpoints/{kind}/{name}"

    @router.delete(checkpoint, status_code=204, dependencies=operator)
    async def delete_checkpoint(training_run_id: ModelId, kind: CheckpointKind, name: CheckpointName) -> None:
        """Delete saved weights."""
        session = sessions.any(training_run_id)
        await sessions.delete(session, session.model(training_run_id), f"{kind}/{name}")

    @router.put(f"{checkpoint}/ttl", status_code=204, dependencies=operator)
    async def set_ttl(
        training_run_id: ModelId, kind: CheckpointKind, name: CheckpointName, request: TtlRequest
    ) -> None:
        """Delete saved weights after some seconds, or never."""
        session = sessions.any(training_run_id)
        saved = session.saved(session.model(training_run_id), f"{kind}/{name}")
        await sessions.set_expiry(session, saved.call_id, request.ttl_seconds)

    @router.get("/sessions")
    async def list_sessions(
        limit: Annotated[int, Query(ge=1, le=1000)] = 20, offset: Annotated[int, Query(ge=0)] = 0
    ) -> OpenSessionList:
        """The open sessions."""
        return OpenSessionList(sessions=[session.id for session in sessions][offset : offset + limit])

    @router.get("/sessions/{session_id}")
    async def one_session(session_id: SessionId) -> SessionFacts:
        """The models and sampling sessions of a session."""
        session = sessions.any(session_id)
        return SessionFacts(
            training_run_ids=[model.create.model_id for model in session.models.values()],
            sampler_ids=[session.sampler_id(number) for number in session.samplers],
            user_metadata=session.record.user_metadata,
            display_name=session.record.display_name,
        )


def _json(content: dict[str, JsonValue]) -> Response:
    return Response(TypeAdapter(JsonValue).dump_json(content), media_type="application/json")


class TinkerApi:
    """The API over the runs of a service."""

    def __init__(self, settings: TrainerSettings, runs: SessionRuns) -> None:
        outputs = Path(settings.outputs_dir)
        self._sessions = TinkerSessions(
            outputs, runs, WeightStore(settings.weights_url), settings.tinker_max_sessions, settings.tinker_idle_s
        )
        rollout = RolloutClient(
            settings.url("rollout"), policy=CALL_POLICY, token=settings.token, direct=settings.direct
        )
        target = TraceTarget()
        if settings.tracing.mlflow_uri is not None:
            target = TraceTarget(mlflow_experiment_id=experiment_by_name(resolve({}).trace_project))
        self._service = TinkerService(self._sessions, rollout, target)
        self.routes = tinker_routes(self._service)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Restore the sessions, and end idle ones and delete expired weights until the block ends."""
        await asyncio.to_thread(self._sessions.restore)
        idle = asyncio.create_task(self._sessions.end_idle())
        try:
            yield
        finally:
            idle.cancel()
            await asyncio.wait({idle})
            await self._service.draws.close()
