"""The sessions of Tinker's API. All that they need is in their folders, so that a restarted service continues them.

outputs/<session>/calls/session.json    the session and its sampling sessions
outputs/<session>/calls/requests.log    requests for its models (trackway.trainer.calls)
outputs/<session>/calls/samples.log     acknowledged samples
"""

import asyncio
import json
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from pydantic import BaseModel, Field, JsonValue, ValidationError

from trackway.clients.weights import WeightStore
from trackway.system import atomic_write
from trackway.trainer.calls.log import RequestLog, TrainingCall
from trackway.trainer.calls.results import Result, Results, weights_file
from trackway.trainer.tinker.samples_log import SampleLog
from trackway.wire.base import NON_FINITE
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tinker import LoraParams, SavedCheckpoint
from trackway.wire.trainer import RunInfo

logger = logging.getLogger("trackway.trainer")

MAX_MODELS = 16
"""Most models of a session."""
MAX_SAMPLERS = 100_000
"""Most sampling sessions of a session."""
MAX_WAITING = 512
"""Most requests of a model without a result."""
MAX_WAITING_BYTES = 512 * 2**20
"""Most bytes of the requests of a session without a result."""
COMPACT_BYTES = 64 * 2**20
"""Bytes of a log from which on the requests are removed whose changes are on disk."""
KEPT_RESULTS = 64
"""Newest results of a model that stay even when they were fetched: an answer may have been lost."""
MAX_RESULTS = 4096
"""Most results of a model's computations that stay when they were not fetched."""
KEPT_SNAPSHOTS = 4
"""Newest unnamed snapshots of a model that can be sampled from."""
CHECK_IDLE_S = 5.0
_KEPT_ENDED = 16

CALLER_NAME: ContextVar[str | None] = ContextVar("tinker_caller", default=None)
"""Name of the token of the request in progress. None outside of requests."""
CALLS = "calls"
_RECORD = "session.json"


class SessionRuns(Protocol):
    """The runs of the service, as sessions need them. Methods raise TrackwayError."""

    async def start_session(self, name: str, values: Mapping[str, JsonValue]) -> RunInfo:
        """Start a run whose process executes the log in its folder's `calls`."""
        ...

    def wake(self, name: str) -> None:
        """Tell the run's process that its log has grown."""
        ...

    async def end_session(self, name: str) -> None:
        """Let the run finish. Without an active run of the name, do nothing."""
        ...

    def state(self, name: str) -> RunInfo | None:
        """Return the run's status, or None before it has started."""
        ...


class Sampler(BaseModel):
    """A sampling session."""

    base_model: str
    model_path: str | None = None
    saved_by: str | None = None
    """Id of the request that published its weights. None for the base model's."""


class SessionRecord(BaseModel):
    """The request that opened a session, and the sampling sessions that no request of a model opened."""

    model_config = {"ser_json_inf_nan": NON_FINITE}

    session_id: str
    created_at: datetime
    owner: str = ""
    """Name of the token that opened it."""
    tags: list[str] = Field(default_factory=list[str])
    user_metadata: dict[str, JsonValue] = Field(default_factory=dict)
    display_name: str | None = None
    samplers: dict[int, Sampler] = Field(default_factory=dict)
    traceparent: str = ""
    """Root of the session's trace. Empty when nothing is traced."""
    step: int = 0
    """Steps that have a trace."""
    step_traceparent: str = ""
    """Root of the newest step's trace, which requests join that have no trace of their own."""
    step_after: str = ""
    """Id of the request after which that step began."""
    expires: dict[str, float] = Field(default_factory=dict)
    """When weights are deleted, in seconds since 1970, by the request that saved them."""
    deleted: list[str] = Field(default_factory=list[str])
    """Requests whose saved weights were deleted."""
    ended: str = ""
    """Why the session has ended. Empty while it is open."""


class Saved(NamedTuple):
    """A request that saves weights under a name."""

    call_id: str
    metadata: dict[str, str] | None


@dataclass
class TrackedModel:
    """A model in training, as its acknowledged requests describe it."""

    create: TrainingCall
    last_seq: int = 0
    unload: TrainingCall | None = None
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Sequence id and bytes of the requests that are not known to have a result."""
    saved: dict[str, Saved] = field(default_factory=dict)
    """Newest request for each `weights/<name>` and `sampler_weights/<name>`."""
    changes: set[int] = field(default_factory=set[int])
    """Sequence ids of the requests that change weights, from the newest known to be on disk on."""
    settled: int = 0
    """Newest request whose change is on disk. Those before are not executed again."""
    published: set[str] = field(default_factory=set[str])
    """Requests that published named weights, which a sampling session of another session may use."""
    fetched: set[int] = field(default_factory=set[int])
    """Requests whose results were sent and may be removed."""

    @property
    def base_model(self) -> str:
        """Return the name of the base that the client gave."""
        return str(self.create.arguments["base_model"])

    @property
    def lora(self) -> LoraParams:
        """Return the adapter's parameters."""
        return LoraParams.model_validate(self.create.arguments["lora_config"])

    @property
    def metadata(self) -> dict[str, JsonValue] | None:
        """Return what the client noted about it."""
        noted = self.create.arguments.get("user_metadata")
        return noted if isinstance(noted, dict) else None


class Checkpoint(NamedTuple):
    """Saved weights."""

    model: TrackedModel
    saved_by: str
    """Id of the request that saved them."""


class TinkerSession:
    """An open or ended session."""

    def __init__(self, folder: Path, record: SessionRecord) -> None:
        self.folder, self.record = folder, record
        self.log, self.results, self.samples = RequestLog(folder), Results(folder), SampleLog(folder)
        self.models: dict[int, TrackedModel] = {}
        self.samplers = dict(record.samplers)
        self.overlays: dict[str, dict[str, JsonValue]] = {}
        """Fields of a result that its request decides, by request."""
        self.step_end = ""
        """Id of the newest request that ends a step: a create_model or an optim_step."""
        self.beat_at = time.monotonic()
        self.lock = asyncio.Lock()
        """Held around each change of the log."""
        self._compact_at = COMPACT_BYTES

    @classmethod
    def opened(cls, folder: Path) -> "TinkerSession":
        """Return the session of a folder. Raises OSError, ValidationError, or TrackwayError for a damaged log."""
        session = cls(folder, SessionRecord.model_validate_json((folder / _RECORD).read_bytes()))
        for _, call, body in session.log.read():
            session.note(call, len(body))
        for model in session.models.values():
            session.settle(model)
        for number, sampler in [*session.samplers.items()]:
            if sampler.model_path is None and sampler.saved_by is not None and session.is_removed(sampler.saved_by):
                del session.samplers[number]
        return session

    @property
    def id(self) -> str:
        """Return its id, which is the run's name."""
        return self.record.session_id

    def write(self) -> None:
        """Replace the record. Raises StorageError."""
        atomic_write(self.folder / _RECORD, self.record.model_dump_json(), what="a session")

    def note(self, call: TrainingCall, size: int) -> None:
        """Take note of an acknowledged request."""
        number = int(call.model_id.rpartition(":")[2])
        if call.op == "create_model":
            self.models.setdefault(number, TrackedModel(call))
            if "checkpoint" in call.arguments:
                self.overlays[call.id] = {"type": "load_weights", "path": call.arguments["checkpoint"]}
        model = self.models[number]
        model.last_seq = max(model.last_seq, call.seq_id)
        model.waiting[call.id] = call.seq_id, size
        name, place = call.arguments.get("path"), call.arguments.get("sampling_session_seq_id")
        if call.op in ("create_model", "optim_step"):
            self.step_end = call.id
        if call.op in ("optim_step", "load_weights"):
            model.changes.add(call.seq_id)
        elif call.op == "unload_model":
            model.unload = call
        elif call.op.startswith("save_weights") and name is not None and call.id not in self.record.deleted:
            kind = "weights" if call.op == "save_weights" else "sampler_weights"
            model.published |= {call.id} if kind == "sampler_weights" else set()
            model.saved[f"{kind}/{name}"] = Saved(call.id, _texts(call.arguments.get("user_metadata")))
        elif isinstance(place, int) and name is None:
            self.samplers[place] = Sampler(base_model=model.base_model, saved_by=call.id)
            self.overlays[call.id] = {"sampling_session_id": self.sampler_id(place)}

    def settle(self, model: TrackedModel) -> None:
        """Find the newest request whose change is on disk. The run's process writes the result after the change."""
        for seq_id in sorted(model.changes, reverse=True):
            result = self.results.read(f"{model.create.model_id}:{seq_id}")
            if result is not None and result.kind == "json":
                model.settled = seq_id
                break
        model.changes = {seq_id for seq_id in model.changes if seq_id >= model.settled}
        model.waiting = {id: known for id, known in model.waiting.items() if known[0] > model.settled}

    def is_removed(self, call_id: str) -> bool:
        """Return whether a request's result was removed."""
        model = self.model(call_id.rpartition(":")[0])
        return int(call_id.rpartition(":")[2]) < model.settled and self.results.written_at(call_id) is None

    def remove_results(self, model: TrackedModel) -> None:
        """Remove the results of computations that were fetched, and of those beyond the bound."""
        self.settle(model)
        model_id, kept = model.create.model_id, self._kept()
        seq_ids = [seq for seq in self.results.seq_ids(model_id) if f"{model_id}:{seq}" not in kept]
        for place, seq_id in enumerate(reversed(seq_ids)):
            is_done = seq_id < model.settled and (seq_id in model.fetched or place >= MAX_RESULTS)
            if place >= KEPT_RESULTS and is_done:
                self.results.remove(f"{model_id}:{seq_id}")
                model.fetched.discard(seq_id)

    def compact(self) -> None:
        """Remove the requests from the log that are not executed again, if it has grown. Raises StorageError."""
        if self.log.size < self._compact_at:
            return
        for model in self.models.values():
            self.settle(model)
        kept = self._kept()
        self.log.compact(lambda call: call.id in kept or call.seq_id >= self.model(call.model_id).settled)
        self._compact_at = max(COMPACT_BYTES, 2 * self.log.size)

    def _kept(self) -> set[str]:
        """Requests that make models, checkpoints and sampling sessions what they are."""
        kept = {sampler.saved_by for sampler in self.samplers.values() if sampler.saved_by is not None}
        for model in self.models.values():
            kept |= {model.create.id, *model.published, *(saved.call_id for saved in model.saved.values())}
            kept |= set() if model.unload is None else {model.unload.id}
        return kept

    def older_snapshots(self, model: TrackedModel) -> dict[int, str]:
        """Return the unnamed sampling sessions of a model that newer ones replaced, and the requests that made them."""
        prefix = f"{model.create.model_id}:"
        unnamed = {
            number: sampler.saved_by
            for number, sampler in self.samplers.items()
            if sampler.saved_by is not None and sampler.model_path is None and sampler.saved_by.startswith(prefix)
        }
        ordered = sorted(unnamed.items(), key=lambda item: int(item[1].rpartition(":")[2]))
        return {number: id for number, id in ordered[:-KEPT_SNAPSHOTS] if int(id.rpartition(":")[2]) < model.settled}

    def sampler_id(self, number: int) -> str:
        """Return the id of a sampling session."""
        return f"{self.id}:sample:{number}"

    def model(self, model_id: str) -> TrackedModel:
        """Return a model. Raises NOT_FOUND."""
        model = self.models.get(int(model_id.rpartition(":")[2]))
        if model is None:
            known = ", ".join(model.create.model_id for model in self.models.values()) or "none"
            message = f"expected a model of this session ({known}), got {model_id}; create it first"
            raise TrackwayError(ErrorCode.NOT_FOUND, message)
        return model

    def require_room(self, model: TrackedModel, seq_id: int, size: int) -> None:
        """Raise OVERLOADED when too much waits, except for a request that the others wait for."""
        if len(model.waiting) >= MAX_WAITING or self._waiting_bytes() + size > MAX_WAITING_BYTES:
            for tracked in self.models.values():
                tracked.waiting = {id: known for id, known in tracked.waiting.items() if self.results.read(id) is None}
        first = min((seq for seq, _ in model.waiting.values()), default=seq_id)
        if seq_id > first and len(model.waiting) >= MAX_WAITING:
            message = f"expected at most {MAX_WAITING} requests of {model.create.model_id} without a result, got more"
            raise TrackwayError(ErrorCode.OVERLOADED, f"{message}; wait for results", retry_after_s=1)
        if seq_id > first and self._waiting_bytes() + size > MAX_WAITING_BYTES:
            message = f"expected requests of at most {MAX_WAITING_BYTES} bytes without a result, got more"
            raise TrackwayError(ErrorCode.OVERLOADED, f"{message}; wait for results", retry_after_s=1)

    def _waiting_bytes(self) -> int:
        return sum(size for model in self.models.values() for _, size in model.waiting.values())

    def checkpoints(self, model: TrackedModel) -> list[SavedCheckpoint]:
        """Return the saved weights of a model, oldest first."""
        found: list[SavedCheckpoint] = []
        for name, saved in model.saved.items():
            result, written_at = self.results.read(saved.call_id), self.results.written_at(saved.call_id)
            due = self.record.expires.get(saved.call_id)
            if result is not None and result.kind == "json" and written_at is not None:
                found.append(
                    SavedCheckpoint(
                        checkpoint_id=name,
                        checkpoint_type="training" if name.startswith("weights/") else "sampler",
                        time=datetime.fromtimestamp(written_at, UTC),
                        tinker_path=f"tinker://{model.create.model_id}/{name}",
                        expires_at=None if due is None else datetime.fromtimestamp(due, UTC),
                        user_metadata=saved.metadata,
                    )
                )
        return sorted(found, key=lambda checkpoint: checkpoint.time)

    def saved(self, model: TrackedModel, name: str) -> Saved:
        """Return the request that saved weights. Raises NOT_FOUND unless they are there."""
        saved = model.saved.get(name)
        if saved is None or self.results.written_at(saved.call_id) is None:
            known = ", ".join(model.saved) or "none"
            message = f"expected saved weights of {model.create.model_id} ({known}), got {name}; save them first"
            raise TrackwayError(ErrorCode.NOT_FOUND, message)
        return saved

    def expired(self) -> list[tuple[TrackedModel, str]]:
        """Return the model and the name of the saved weights whose time is over. Weights to be saved yet are left out.

        Forgets the time of weights that others have replaced.
        """
        due = {id for id, end in self.record.expires.items() if end <= time.time()}
        saved = [(model, name, saved.call_id) for model in self.models.values() for name, saved in model.saved.items()]
        for replaced in due - {id for *_, id in saved}:
            del self.record.expires[replaced]
        return [(model, name) for model, name, id in saved if id in due and self.results.written_at(id) is not None]

    @property
    def last_request_time(self) -> datetime:
        """Return when the newest request of a model was acknowledged."""
        with suppress(OSError):
            return datetime.fromtimestamp((self.folder / "requests.log").stat().st_mtime, UTC)
        return self.record.created_at


class TinkerSessions:
    """The sessions of an outputs folder. Methods raise TrackwayError."""

    def __init__(
        self, outputs: Path, runs: SessionRuns, weights: WeightStore, max_sessions: int, idle_s: float
    ) -> None:
        self._outputs, self.runs, self._weights = outputs, runs, weights
        self._max_sessions, self._idle_s = max_sessions, idle_s
        self._sessions: dict[str, TinkerSession] = {}
        self._names: set[str] = set()
        """Sessions on disk. A name of a request is looked up here before it becomes part of a path."""
        self._ended: OrderedDict[str, TinkerSession] = OrderedDict()
        """The ended sessions that were asked for last."""
        self._due: dict[str, float] = {}
        """When the next weights of a session expire."""

    def restore(self) -> None:
        """Take up the sessions that were open when the service was last lost."""
        for path in sorted(self._outputs.glob(f"*/{CALLS}/{_RECORD}")):
            session = self._from_disk(path.parent)
            if session is None:
                continue
            self._names.add(session.id)
            self._note_due(session)
            if not session.record.ended:
                self._sessions[session.id] = session

    def _from_disk(self, folder: Path) -> TinkerSession | None:
        try:
            session = TinkerSession.opened(folder)
        except (OSError, ValidationError, TrackwayError, KeyError) as error:
            logger.warning("the session in %s is left out: %s", folder, error)
            return None
        return session if session.id == folder.parent.name else None

    def open(self, record: SessionRecord) -> TinkerSession:
        """Open a session. OVERLOADED when as many are open as may be."""
        if len(self._sessions) >= self._max_sessions:
            message = f"expected at most {self._max_sessions} open sessions (tinker_max_sessions), got one more"
            raise TrackwayError(ErrorCode.OVERLOADED, f"{message}; finish one, or raise it", retry_after_s=10)
        folder = self._outputs / record.session_id / CALLS
        folder.mkdir(parents=True, exist_ok=True)
        session = TinkerSession(folder, record)
        session.write()
        self._names.add(session.id)
        self._sessions[session.id] = session
        return session

    def __iter__(self) -> Iterator[TinkerSession]:
        yield from filter(_is_visible, [*self._sessions.values()])

    def required(self, id: str) -> TinkerSession:
        """Return the open session that an id begins with, and count this as a sign of life.

        Raises NOT_FOUND for an unknown session, GONE for one that has ended.
        """
        name = id.partition(":")[0]
        session = self._sessions.get(name)
        if session is not None and _is_visible(session):
            session.beat_at = time.monotonic()
            return session
        ended = self.any(name)
        message = f"expected an open session, got {name}, which has ended ({ended.record.ended}); create another"
        raise TrackwayError(ErrorCode.GONE, message)

    def any(self, id: str) -> TinkerSession:
        """Return the session that an id begins with, open or ended. Raises NOT_FOUND."""
        name = id.partition(":")[0]
        session = self._sessions.get(name) or self._ended.get(name)
        if session is None and name in self._names:
            session = self._from_disk(self._outputs / name / CALLS)
        if session is None or not _is_visible(session):
            message = f"expected the id of a session of this token, got {name}; create one"
            raise TrackwayError(ErrorCode.NOT_FOUND, message)
        if session.record.ended:
            self._ended[name] = session
            while len(self._ended) > _KEPT_ENDED:
                self._ended.popitem(last=False)
        return session

    async def end(self, session: TinkerSession, why: str) -> None:
        """End a session and its run. Results stay."""
        if self._sessions.pop(session.id, None) is None:
            return
        session.record.ended = why
        await asyncio.to_thread(session.write)
        await asyncio.to_thread(session.samples.remove)
        await self.runs.end_session(session.id)

    async def end_idle(self) -> None:
        """End each session without a sign of life for `idle_s` seconds, and delete expired weights, until cancelled."""
        while True:
            await asyncio.sleep(min(CHECK_IDLE_S, self._idle_s))
            for session in self:
                if time.monotonic() - session.beat_at <= self._idle_s:
                    continue
                try:
                    await self.end(session, f"no heartbeat for {self._idle_s:g} s")
                except Exception:
                    logger.exception("the idle session %s could not be ended", session.id)
            try:
                await self._delete_expired()
            except Exception:
                logger.exception("expired weights could not be deleted")

    async def _delete_expired(self) -> None:
        for name in [name for name, due in self._due.items() if due <= time.time()]:
            try:
                session = self.any(name)
            except TrackwayError:
                del self._due[name]  # its folder was removed
                continue
            for model, weights in session.expired():
                await self.delete(session, model, weights)
            self._note_due(session)

    def _note_due(self, session: TinkerSession) -> None:
        self._due[session.id] = min(session.record.expires.values(), default=inf)

    async def set_expiry(self, session: TinkerSession, call_id: str, seconds: int | None) -> None:
        """Delete the weights that a request saved after so many seconds, or never. Raises StorageError."""
        if seconds is None:
            session.record.expires.pop(call_id, None)
        else:
            session.record.expires[call_id] = time.time() + seconds
        await asyncio.to_thread(session.write)
        self._note_due(session)

    async def delete(self, session: TinkerSession, model: TrackedModel, name: str) -> None:
        """Delete saved weights of a model. Raises NOT_FOUND when no weights have the name."""
        saved = session.saved(model, name)
        result = session.results.read(saved.call_id)
        del model.saved[name]
        session.record.deleted.append(saved.call_id)
        session.record.expires.pop(saved.call_id, None)
        await asyncio.to_thread(session.write)
        if name.startswith("weights/"):
            weights_file(self._outputs, f"tinker://{model.create.model_id}/{name}").unlink(missing_ok=True)
        elif result is not None and result.kind == "json":
            await asyncio.to_thread(self.remove_policy, json.loads(result.body)["policy"])

    def remove_policy(self, policy: str) -> None:
        """Remove the published weights of a policy, if they are there."""
        try:
            self._weights.remove_policy(policy)
        except FileNotFoundError:
            logger.info("policy %s was removed before", policy)
        except OSError as error:
            logger.warning("the weights of policy %s are not removed: %s", policy, error)

    def result(self, call_id: str) -> Result | None:
        """Return the result of a request of any session."""
        return self.any(call_id).results.read(call_id)

    def checkpoint(self, path: str, kind: Literal["weights", "sampler_weights"] | None = None) -> "Checkpoint":
        """Return what a `tinker://` path names. Raises INVALID_REQUEST when nothing of the kind was saved there."""
        model_id, _, name = path.removeprefix("tinker://").partition("/")
        if kind is not None and not name.startswith(f"{kind}/"):
            save = "save_state" if kind == "weights" else "save_weights_for_sampler"
            message = f"expected tinker://<model>/{kind}/<name>, got {path}; save it by {save}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        model = self.any(model_id).model(model_id)
        saved = model.saved.get(name)
        if saved is None:
            known = ", ".join(f"tinker://{model_id}/{other}" for other in model.saved) or "none"
            message = f"expected a path of saved weights ({known}), got {path}; save them first"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        return Checkpoint(model, saved.call_id)


def _is_visible(session: TinkerSession) -> bool:
    """Return whether the request in progress may see a session: its token opened it."""
    name = CALLER_NAME.get()
    return name is None or session.record.owner == name


def new_session_id() -> str:
    """Return a session's id, which is a run's name."""
    return f"tinker-{uuid.uuid4().hex[:12]}"


def _texts(value: JsonValue) -> dict[str, str] | None:
    return {key: str(text) for key, text in value.items()} if isinstance(value, dict) else None
