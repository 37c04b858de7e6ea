"""The work behind the routes of Tinker's API: acknowledge requests once they are on disk, and return their results."""

import asyncio
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import NamedTuple

from pydantic import JsonValue

from trackway.clients import Deadline, RolloutClient
from trackway.tracing import attributes as names
from trackway.tracing import extracted, inject
from trackway.tracing.attributes import SpanKind
from trackway.tracing.spans import child_span, root_span
from trackway.trainer.calls.log import UNNAMED, Op, TrainingCall
from trackway.trainer.calls.results import Result
from trackway.trainer.tinker.samples_log import SampleRecord
from trackway.trainer.tinker.sampling import Draws, Weights, check_sample, drawn_seed
from trackway.trainer.tinker.sessions import (
    CALLER_NAME,
    KEPT_SNAPSHOTS,
    MAX_MODELS,
    MAX_SAMPLERS,
    Sampler,
    SessionRecord,
    TinkerSession,
    TinkerSessions,
    TrackedModel,
    new_session_id,
)
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import BASE_POLICY, ModelCard, ModelList
from trackway.wire.tinker import (
    CreateModelRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    FutureReply,
    LoadWeightsRequest,
    SampleRequest,
    SamplerReply,
    TrainingRunReply,
    WeightsInfo,
)
from trackway.wire.trainer import ENDED
from trackway.wire.trajectory import TraceTarget

ANSWER_S = 10.0
"""Longest wait for the rollout service's answer."""
_FRESH_S = 30.0
"""Seconds for which an answer of the rollout service is used."""


class BaseModelFacts(NamedTuple):
    """The model of the rollout service."""

    root: str
    """Path of its folder there."""
    policy: str
    """Name of the service's default policy, which a run may have trained."""
    max_len: int
    """Longest sequence in tokens."""

    @property
    def names(self) -> list[str]:
        """The names that this server lists: the path, and the folder's name."""
        return list(dict.fromkeys([self.root, PurePath(self.root).name]))

    def is_named(self, name: str) -> bool:
        """Return whether a client's name is its path, the end of it, or the default policy's name."""
        parts, end = Path(self.root).parts, PurePath(name).parts
        is_same = PurePath(name).is_absolute() and Path(name).resolve() == Path(self.root).resolve()
        return is_same or name == self.policy or (bool(end) and parts[-len(end) :] == end)

    def policy_of(self, name: str) -> str:
        """Return the policy that a client's name stands for: the untrained model for the model's path or its end."""
        return BASE_POLICY if self.is_named(name) and name != self.policy else name


class BaseModels:
    """Asks the rollout service for its model."""

    def __init__(self, rollout: RolloutClient) -> None:
        self._rollout = rollout
        self._facts: BaseModelFacts | None = None
        self._asked_at = 0.0

    async def facts(self) -> BaseModelFacts:
        """Return the model. Raises TrackwayError when the rollout service does not answer."""
        if self._facts is None or time.monotonic() - self._asked_at > _FRESH_S:
            card, *_ = await self._cards()
            self._facts = BaseModelFacts(card.root or card.id, card.id, card.max_model_len)
            self._asked_at = time.monotonic()
        return self._facts

    async def required(self, name: str) -> BaseModelFacts:
        """Return the model. Raises INVALID_REQUEST unless the client names it."""
        facts = await self.facts()
        if not facts.is_named(name):
            raise _unknown(name, facts, "name that, or serve another (model_path)")
        return facts

    async def require_sampled(self, name: str) -> None:
        """Raise INVALID_REQUEST unless the client names the model or a policy that the rollout service lists."""
        facts = await self.facts()
        if not facts.is_named(name) and name not in (policies := [card.id for card in await self._cards()]):
            raise _unknown(name, facts, f"name that or a policy ({', '.join(policies)})")

    async def _cards(self) -> list[ModelCard]:
        """Ask the rollout service for its model, which comes first, and its policies."""
        deadline = Deadline.after(ANSWER_S)
        return (await self._rollout.call("GET", "/v1/models", reply=ModelList, deadline=deadline)).data


def _unknown(name: str, facts: BaseModelFacts, remedy: str) -> TrackwayError:
    expected = " or ".join(facts.names)
    message = f"base_model: expected {expected}, the model of the rollout service, got {name}; {remedy}"
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)


POLL_S = 30.0
"""Longest wait of one `retrieve_future`. The SDK gives up after 45 s."""
LOOK_EVERY_S = 0.01
"""Pause between two looks for a result while a caller waits."""
_CHECK_RUN_S = 1.0
_PRIVATE = frozenset({"policy", "version", "sampling_session_seq_id"})
"""Fields of a result that name published weights to this service."""


class TinkerService:
    """The API over the sessions of an outputs folder. Methods raise TrackwayError.

    `target` is the destination of the sessions' traces.
    """

    def __init__(self, sessions: TinkerSessions, rollout: RolloutClient, target: TraceTarget) -> None:
        self.sessions, self._target = sessions, target
        self.bases = BaseModels(rollout)
        self.draws = Draws(rollout, self._weights_of, target)

    def create_session(self, request: CreateSessionRequest) -> TinkerSession:
        """Open a session, whose first trace begins with a span of its name."""
        id, headers = new_session_id(), dict[str, str]()
        tags, kind = {"session": id, "experiment_name": id}, SpanKind.OPERATION
        with root_span("session", tags, {names.TITLE: id}, True, self._target, kind) as span:
            if span.recording:
                inject(headers)
        return self.sessions.open(
            SessionRecord(
                session_id=id,
                created_at=datetime.now(UTC),
                owner=CALLER_NAME.get() or "",
                tags=request.tags,
                user_metadata=request.user_metadata or {},
                display_name=request.display_name,
                traceparent=headers.get("traceparent", ""),
            )
        )

    async def create_model(self, request: CreateModelRequest) -> FutureReply:
        """Create a model in training. The first one starts the session's run."""
        session = self.sessions.required(request.session_id)
        arguments = request.model_dump(mode="json", exclude_none=True, include=_OF_MODEL)
        return await self._create(session, request.model_seq_id, request.base_model, arguments)

    async def load_weights(self, request: LoadWeightsRequest) -> FutureReply:
        """Load a checkpoint into a model, or create one from it."""
        saved = self.sessions.checkpoint(request.path, "weights").model
        if request.model_id is not None and request.seq_id is not None and request.session_id is None:
            arguments: dict[str, JsonValue] = {"path": request.path, "optimizer": request.optimizer}
            return await self.enqueue(request.model_id, request.seq_id, "load_weights", arguments)
        if request.session_id is None or request.model_seq_id is None or request.model_id is not None:
            message = "expected model_id and seq_id, or session_id and model_seq_id, got others; give either pair"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        arguments = {
            "base_model": request.base_model or saved.base_model,
            "lora_config": saved.create.arguments["lora_config"],
            "checkpoint": request.path,
            "optimizer": request.optimizer,
            **({} if request.user_metadata is None else {"user_metadata": request.user_metadata}),
        }
        session = self.sessions.required(request.session_id)
        return await self._create(session, request.model_seq_id, str(arguments["base_model"]), arguments)

    async def _create(
        self, session: TinkerSession, number: int, base_model: str, arguments: dict[str, JsonValue]
    ) -> FutureReply:
        if number not in session.models and len(session.models) >= MAX_MODELS:
            message = f"expected at most {MAX_MODELS} models in a session, got one more; create another session"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        base = await self.bases.required(base_model)
        model_id = f"{session.id}:train:{number}"
        call = TrainingCall(
            id=f"{model_id}:0",
            model_id=model_id,
            seq_id=0,
            op="create_model",
            arguments=arguments,
            traceparent=await self._trace(session),
        )
        async with session.lock:
            if self.sessions.runs.state(session.id) is None:
                await self._start(session, base.root)
            return await self._append(session, call, b"")

    async def _start(self, session: TinkerSession, model_path: str) -> None:
        """Start the session's run. OVERLOADED while as many runs are active as may be, which the SDK waits for."""
        try:
            await self.sessions.runs.start_session(session.id, {"actor_rollout_ref.model.path": model_path})
        except TrackwayError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
            raise TrackwayError(ErrorCode.OVERLOADED, error.message, retry_after_s=10) from error

    async def enqueue(
        self,
        model_id: str,
        seq_id: int,
        op: Op,
        arguments: dict[str, JsonValue],
        body: bytes = b"",
        samples: Sequence[str] = (),
    ) -> FutureReply:
        """Acknowledge a request of a model. INVALID_REQUEST for another one under the same sequence id.

        `samples` are the sampled sequences that its data name.
        """
        session = self.sessions.required(model_id)
        model = session.model(model_id)
        call = TrainingCall(
            id=f"{model.create.model_id}:{seq_id}",
            model_id=model.create.model_id,
            seq_id=seq_id,
            op=op,
            arguments=arguments,
            traceparent=await self._trace(session),
            links=await asyncio.to_thread(session.samples.traceparents, samples) if samples else {},
        )
        async with session.lock:
            if model.unload is not None and op != "unload_model" and seq_id >= model.unload.seq_id:
                message = (
                    f"expected a model in memory, got {model_id}, which was unloaded; create another from a checkpoint"
                )
                raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
            # A request before the newest state that the log has not was removed from it, so this is a repeated one.
            if seq_id < model.settled and not session.log.has(call.id):
                return FutureReply(request_id=call.id, model_id=call.model_id)
            session.require_room(model, seq_id, len(body))
            reply = await self._append(session, call, body)
            ttl_s = arguments.get("ttl_seconds")
            if isinstance(ttl_s, int) and call.id not in session.record.expires:
                await self.sessions.set_expiry(session, call.id, ttl_s)
            await asyncio.to_thread(session.compact)
            return reply

    async def unload(self, model_id: str) -> FutureReply:
        """Free a model after the requests that were acknowledged before."""
        model = self.sessions.required(model_id).model(model_id)
        seq_id = model.unload.seq_id if model.unload else model.last_seq + 1
        return await self.enqueue(model_id, seq_id, "unload_model", {})

    async def _append(self, session: TinkerSession, call: TrainingCall, body: bytes) -> FutureReply:
        """Write a request to the log, once, and wake the run's process. `session.lock` is held."""
        try:
            is_new = await asyncio.to_thread(session.log.append, call, body)
        except TrackwayError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
            raise TrackwayError(ErrorCode.INVALID_REQUEST, error.message) from error  # the SDK repeats a 409
        if is_new:
            session.note(call, len(body))
        self.sessions.runs.wake(session.id)
        return FutureReply(request_id=call.id, model_id=call.model_id)

    async def create_sampling_session(self, request: CreateSamplingSessionRequest) -> str:
        """Open a sampling session. Returns its id."""
        session, number = self.sessions.required(request.session_id), request.sampling_session_seq_id
        if request.model_path is not None:
            model, saved_by = self.sessions.checkpoint(request.model_path, "sampler_weights")
            sampler = Sampler(base_model=model.base_model, model_path=request.model_path, saved_by=saved_by)
        elif request.base_model is not None:
            await self.bases.require_sampled(request.base_model)
            sampler = Sampler(base_model=request.base_model)
        else:
            message = "expected base_model or model_path, got neither; name one"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        async with session.lock:
            known = session.samplers.setdefault(number, sampler)
            if known != sampler:
                message = f"expected a new sampling_session_seq_id, got {number}, which samples from others; count on"
                raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
            if len(session.samplers) > MAX_SAMPLERS:
                del session.samplers[number]
                message = f"expected at most {MAX_SAMPLERS} sampling sessions, got one more; create another session"
                raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
            session.record.samplers[number] = sampler
            await asyncio.to_thread(session.write)
        return session.sampler_id(number)

    def sampler(self, sampler_id: str) -> SamplerReply:
        """Return a sampling session."""
        sampler = self._sampler(sampler_id)
        return SamplerReply(sampler_id=sampler_id, base_model=sampler.base_model, model_path=sampler.model_path)

    def _sampler(self, id: str) -> Sampler:
        """Return the sampling session that an id begins with. Raises NOT_FOUND."""
        session, number = self.sessions.any(id), int(id.split(":")[2])
        if number not in session.samplers:
            kept = f"create it first, or name the weights: the newest {KEPT_SNAPSHOTS} unnamed ones stay"
            message = f"expected a sampling session of {session.id}, got {id}; {kept}"
            raise TrackwayError(ErrorCode.NOT_FOUND, message)
        return session.samplers[number]

    async def sample(self, request: SampleRequest) -> FutureReply:
        """Acknowledge a sample and begin to draw it."""
        session = self.sessions.required(request.sampling_session_id)
        self._sampler(request.sampling_session_id)
        check_sample(request)
        number = int(request.sampling_session_id.split(":")[2])
        id = f"{session.sampler_id(number)}:{request.seq_id}"
        if self.draws.known(id) is None:
            self.draws.require_room()
        seed, carried = request.sampling_params.seed, {"traceparent": await self._trace(session)}
        with extracted(carried, self._target), child_span("sample", SpanKind.OPERATION, {}) as span:
            span.inputs({"id": id, **request.model_dump(mode="json", include=_OF_SAMPLE)})
            if span.recording:
                inject(carried)
        record = SampleRecord(
            id=id,
            request=request,
            seed=drawn_seed() if seed is None else seed,
            traceparent=carried["traceparent"],
        )
        record = await asyncio.to_thread(session.samples.append, record)
        self.draws.begin(record)
        return FutureReply(request_id=id, sample_sequence_ids=record.sequence_ids)

    async def _weights_of(self, id: str) -> Weights:
        sampler, base = self._sampler(id), await self.bases.facts()
        if sampler.saved_by is None:
            return Weights(base.policy_of(sampler.base_model), 0, base.max_len)
        result = self.sessions.result(sampler.saved_by)
        if result is None:
            message = f"expected published weights, got request {sampler.saved_by} without a result; wait for it"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        published = json.loads(result.body)
        if result.kind != "json":
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"the weights were not saved: {published['error']}")
        return Weights(published["policy"], published["version"], base.max_len)

    async def result(self, request_id: str, within_s: float = POLL_S) -> Result | None:
        """Return the result of a request, or None when there is none after `within_s` seconds.

        Raises GONE for a sample that is no longer known, NOT_FOUND for a request that was never acknowledged.
        """
        if request_id.split(":")[1] == "sample":
            return await self._sampled(request_id, within_s)
        session = self.sessions.any(request_id)
        if not session.record.ended:
            session = self.sessions.required(request_id)
        model, seq_id = session.model(request_id.rpartition(":")[0]), int(request_id.rpartition(":")[2])
        if seq_id > model.last_seq:
            message = f"expected a request that was acknowledged, got {request_id}; send it first"
            raise TrackwayError(ErrorCode.NOT_FOUND, message)
        end, look_at_run = time.monotonic() + within_s, time.monotonic() + _CHECK_RUN_S
        while (result := session.results.read(request_id)) is None:
            if seq_id < model.settled:
                message = f"expected a result that is not removed, got {request_id}, which was fetched before"
                raise TrackwayError(ErrorCode.NOT_FOUND, f"{message}; keep results when they arrive")
            now = time.monotonic()
            if now >= look_at_run:
                look_at_run = now + _CHECK_RUN_S
                self._require_run(session)
            if now >= end:
                return None
            await asyncio.sleep(LOOK_EVERY_S)
        model.waiting.pop(request_id, None)
        model.fetched.add(seq_id)
        if seq_id in model.changes:
            session.remove_results(model)
            await self._remove_snapshots(session, model)
        return result if result.kind != "json" else self._shown(session, request_id, result)

    async def _remove_snapshots(self, session: TinkerSession, model: TrackedModel) -> None:
        """Remove the policies of unnamed snapshots that newer ones replaced and no sample in progress uses."""
        used = self.draws.samplers()
        for number, id in session.older_snapshots(model).items():
            result = session.results.read(id)
            if session.sampler_id(number) in used or session.samplers.pop(number, None) is None:
                continue
            policy = json.loads(result.body).get("policy", "") if result is not None else ""
            if policy.endswith(f".{UNNAMED}{id.rpartition(':')[2]}"):  # not the model's line of versions
                await asyncio.to_thread(self.sessions.remove_policy, policy)
            session.results.remove(id)

    def _require_run(self, session: TinkerSession) -> None:
        """Raise GONE when the session's run has ended, so that no result can come."""
        info = self.sessions.runs.state(session.id)
        if session.record.ended or (info is not None and info.state in ENDED and not info.interrupted):
            why = session.record.ended or f"its run is {info.state if info else 'lost'}: {info.message if info else ''}"
            message = f"expected a result, got a session that has ended ({why}); create another from its checkpoint"
            raise TrackwayError(ErrorCode.GONE, message)

    async def _sampled(self, id: str, within_s: float) -> Result | None:
        session = self.sessions.any(id)
        task = self.draws.known(id)
        if task is None:
            session = self.sessions.required(id)
            task = self.draws.begin(await asyncio.to_thread(session.samples.find, id))
        done, _ = await asyncio.wait({task}, timeout=within_s)
        if not done:
            return None
        return Result.of_error("the sample was cancelled", "user") if task.cancelled() else task.result()

    async def _trace(self, session: TinkerSession) -> str:
        """Return the caller's trace, or else the one of the session's step. The first request of a step begins it."""
        carried, record = dict[str, str](), session.record
        inject(carried)
        if "traceparent" not in carried and record.traceparent and session.step_end != record.step_after:
            record.step, record.step_after = record.step + 1, session.step_end
            title, tags = f"step {record.step}", {names.TRAIN_STEP: record.step, "experiment_name": session.id}
            with (
                extracted({"traceparent": record.traceparent}),  # to which the new trace links
                root_span(title, tags, {names.TITLE: title}, True, self._target, SpanKind.TRAIN_STEP),
            ):
                inject(carried)
            record.step_traceparent = carried["traceparent"]
            await asyncio.to_thread(session.write)
        return carried.get("traceparent") or record.step_traceparent or record.traceparent

    def _shown(self, session: TinkerSession, id: str, result: Result) -> Result:
        fields = {key: value for key, value in json.loads(result.body).items() if key not in _PRIVATE}
        return Result("json", json.dumps({**fields, **session.overlays.get(id, {})}).encode())

    def waits_for_run(self, request_id: str) -> bool:
        """Return whether a request waits for a process that does not run yet."""
        info = self.sessions.runs.state(request_id.partition(":")[0])
        return info is not None and info.state.value != "running"

    def weights_info(self, path: str) -> WeightsInfo:
        """Return the model of a checkpoint."""
        model = self.sessions.checkpoint(path).model
        lora = model.lora
        return WeightsInfo(
            base_model=model.base_model,
            lora_rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
        )

    def training_run(self, session: TinkerSession, model: TrackedModel) -> TrainingRunReply:
        """Return a model as a list of runs shows it."""
        newest = {checkpoint.checkpoint_type: checkpoint for checkpoint in session.checkpoints(model)}
        return TrainingRunReply(
            training_run_id=model.create.model_id,
            base_model=model.base_model,
            model_owner=session.record.owner,
            lora_rank=model.lora.rank,
            last_request_time=session.last_request_time,
            last_checkpoint=newest.get("training"),
            last_sampler_checkpoint=newest.get("sampler"),
            user_metadata=model.metadata,
        )


_OF_SAMPLE = {"num_samples", "sampling_params"}
_OF_MODEL = {"base_model", "lora_config", "user_metadata"}
