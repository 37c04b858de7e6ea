"""A run's tracing as one object: the budget, the trainer's own trace, feedback, and span counts.

The trace budget: a daily limit in bytes that lowers the sampling rate before a backend's quota is exceeded.

The sizes are those reported by the trajectories: all spans of all services, before compression. All runs of an outputs
folder share one count, so the budget applies to the backend's plan rather than to each run.

The trainer's own traces: one per step, with a span for each phase.

    train step 3 > rollout | update_actor > optimizer_step 0 ... | update_weights | testing | save_checkpoint

A validation beside later steps has a trace of its own, `validation 3`. Where engines share the learner's GPUs, a step
has `sleep` before `update_actor` and `wake_up` after `update_weights`.

Each trajectory has its own trace, which links to the `rollout` (or `testing`) span that requested it. An
`optimizer_step` links to the trajectories it trained on. Without active tracing nothing is recorded, at no cost.

Feedback (reward, advantage, training status, ground truth) is queued on disk (feedback_queue.py) and sent in the
background, by another process if necessary. MLflow accepts it only once the trace has arrived, a second or two after
the trajectory ended; Weave accepts it at any time.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ValidationError

from trackway.clients import CallPolicy, ServiceClient
from trackway.learner.filtering import FilteredBatch, TrainStatus
from trackway.system import atomic_write, locked
from trackway.tracing import SpanHandle, Tracing, optimizer_step_span, train_step_span
from trackway.tracing.spans import operation_span
from trackway.trainer.delivery.feedback_queue import GROUND_TRUTH, Assessment, Value
from trackway.trainer.metrics import Metrics
from trackway.wire.base import named_number
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Health, ReplicaList, SpanCounts
from trackway.wire.trainer import TraceSummary
from trackway.wire.trajectory import MAX_ANSWER, TraceTarget, Trajectory


class TraceFeedback(Protocol):
    """A trace backend that stores feedback."""

    def submit(self, assessments: Sequence[Assessment]) -> None:
        """Queue the values on disk. Never raises."""
        ...


def training_feedback(batch: FilteredBatch, advantages: Sequence[float], step: int = 0) -> list[Assessment]:
    """Reward, advantage, `fate` and ground truth of the traced trajectories. `advantages` belong to `batch.used`.

    Those that step `step` trained and an earlier one submitted have `trained_step` too. 0 leaves it out.
    """
    remaining = iter(advantages)
    by_position = [next(remaining) if status is TrainStatus.USED else None for status in batch.statuses]
    return [
        _assessment(
            trajectory,
            {
                **_reward(trajectory),
                **_named("advantage", advantage),
                "fate": status.feedback,
                **_named("trained_step", float(step) if step > trajectory.tags.step else None),
                **_ground_truth(trajectory),
            },
        )
        for trajectory, status, advantage in zip(batch.trajectories, batch.statuses, by_position, strict=True)
        if trajectory.trace_id is not None
    ]


def validation_feedback(trajectories: Sequence[Trajectory]) -> list[Assessment]:
    """Reward and ground truth of each trajectory that has a trace and a reward."""
    scored = [trajectory for trajectory in trajectories if trajectory.trace_id is not None and trajectory.reward]
    return [_assessment(trajectory, _reward(trajectory) | _ground_truth(trajectory)) for trajectory in scored]


def links_of(trajectories: Sequence[Trajectory]) -> list[Assessment]:
    """The link of each trajectory's trace to the run."""
    return [
        Assessment(trajectory.trace_id, trajectory.span_id or "", {}, link=True)
        for trajectory in trajectories
        if trajectory.trace_id is not None
    ]


def _assessment(trajectory: Trajectory, values: Mapping[str, Value]) -> Assessment:
    named = {name: named_number(value) if isinstance(value, float) else value for name, value in values.items()}
    return Assessment(trajectory.trace_id or "", trajectory.span_id or "", named)


def _reward(trajectory: Trajectory) -> dict[str, float]:
    return _named("reward", None if trajectory.reward is None else trajectory.reward.score)


def _ground_truth(trajectory: Trajectory) -> dict[str, str]:
    """Empty for none, and for one longer than an answer: a part of it would be another truth."""
    truth = trajectory.ground_truth
    return {} if truth is None or len(truth) > MAX_ANSWER else {GROUND_TRUTH: truth}


def _named(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}


logger = logging.getLogger("trackway.trainer")

STEP_SHARE = 1 / 20
"""Share of the remaining daily budget that one step may use, so that sampling decreases gradually."""
LOCK_DEADLINE_S = 1.0
"""Longest wait for another process that updates the count, which takes less than a millisecond."""


def affordable(wanted: int, left: int, bytes_each: float) -> int:
    """The number of `wanted` prompts that a step may trace with `left` bytes remaining today.

    `bytes_each` is the size of a prompt's traces with all its rollouts. While it is unknown (0), one prompt is allowed.
    """
    if left <= 0:
        return 0
    return min(wanted, int(left * STEP_SHARE / bytes_each) if bytes_each else 1)


class DailyTraceBytes:
    """Bytes traced today, counted in a file that processes share. A missing or damaged file counts as 0."""

    def __init__(self, path: Path, today: Callable[[], date] = lambda: datetime.now(UTC).date()) -> None:
        self._path = path
        self._today = today

    def add(self, size: int) -> int:
        """Add `size` bytes and return today's total (UTC). Raises OSError when the file cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path.with_suffix(".lock"), wait_s=LOCK_DEADLINE_S, mode=None):
            today = self._today().isoformat()
            count = self._read()
            count = _DayCount(day=today, bytes=(count.bytes if count.day == today else 0) + size)
            atomic_write(self._path, count.model_dump_json())
            return count.bytes

    def _read(self) -> "_DayCount":
        try:
            return _DayCount.model_validate_json(self._path.read_text())
        except (FileNotFoundError, ValidationError):
            return _DayCount()


class _DayCount(BaseModel):
    day: str = ""
    bytes: int = 0


class TraceBudget:
    """Decides before each step how many prompts are traced, and counts the bytes of their traces."""

    def __init__(self, daily_bytes: DailyTraceBytes, bytes_per_day: int | None) -> None:
        self._daily_bytes = daily_bytes
        self._bytes_per_day = bytes_per_day
        self._last_logged: int | None = None
        self._traced = 0
        self._traced_bytes = 0
        self._step: Metrics = {}
        self.trajectories = 0
        """Trajectories traced by this process."""
        self.bytes = 0
        """Size of their spans and of the trainer's own."""

    def prompts(self, wanted: int, rollouts: int) -> int:
        """The number of `wanted` prompts, with `rollouts` trajectories each, to trace in this step."""
        count = wanted
        if self._bytes_per_day is not None and wanted:
            bytes_each = self._traced_bytes / self._traced * rollouts if self._traced else 0.0
            count = affordable(wanted, self._bytes_per_day - self._today(0), bytes_each)
            self._log_reduction(wanted, count)
        self._step["trace/prompts_traced"] = self._step.get("trace/prompts_traced", 0.0) + count
        return count

    def spend(self, size: int, trajectories: int = 0) -> None:
        """Count `size` bytes, of `trajectories` traced trajectories or of spans that belong to none."""
        if not size and not trajectories:
            return
        if trajectories:
            self._traced += trajectories
            self._traced_bytes += size
        self.trajectories += trajectories
        self.bytes += size
        self._step["trace/bytes"] = self._step.get("trace/bytes", 0.0) + size
        self._step["trace/bytes_today"] = float(self._today(size))

    def take(self) -> Metrics:
        """The trace metrics since the last `take`."""
        metrics, self._step = self._step, {}
        return metrics

    def _today(self, size: int) -> int:
        try:
            return self._daily_bytes.add(size)
        except OSError as error:
            logger.warning("trace bytes are counted for this run only: %s", error)
            return self.bytes

    def _log_reduction(self, wanted: int, count: int) -> None:
        if count < wanted and count != self._last_logged:
            message = "trackway.trace_bytes_per_day=%d: %d of %d prompts are traced, with %d bytes used today"
            logger.info(message, self._bytes_per_day, count, wanted, self._today(0))
        self._last_logged = count


SHOWN_TRAJECTORIES = 64
"""Most traced trajectories listed in a step's outputs. The links of its optimizer steps are complete."""

_SHOWN_METRICS = {"actor/lr": "lr", "actor/grad_norm": "grad_norm", "actor/pg_loss": "loss"}


class StepTrace:
    """The trace of the current step. One object serves all steps in turn."""

    def __init__(self, experiment_name: str, target: TraceTarget, name: str = "train step") -> None:
        self._experiment_name = experiment_name
        self._name = name
        self._target = target
        self._root: SpanHandle | None = None
        self._traced: list[Trajectory] = []
        self._optimizer_steps = 0

    def beside(self, name: str) -> "StepTrace":
        """For a trace that is open at the same time as this one."""
        return StepTrace(self._experiment_name, self._target, name)

    @contextmanager
    def step(self, number: int) -> Iterator[SpanHandle]:
        """Trace the block as step `number`."""
        self._traced, self._optimizer_steps = [], 0
        with train_step_span(number, self._experiment_name, self._target, self._name) as root:
            self._root = root
            try:
                yield root
            finally:
                self._root = None
                root.outputs(self._outputs())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Trace a phase of the step. Phases outside a step are not recorded."""
        with operation_span(name):
            yield

    def note(self, **values: float) -> None:
        """Set numeric attributes on the step's span."""
        if self._root is not None:
            _measure(self._root, values)

    def received(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the trajectories that the step requested."""
        self._traced += [trajectory for trajectory in trajectories if trajectory.trace_id is not None]

    @contextmanager
    def optimizer_step(self, used: Sequence[Trajectory]) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Trace one optimizer step with links to the traced trajectories in `used`; yields a setter for its metrics."""
        ids = [(trajectory.trace_id, trajectory.span_id) for trajectory in used]
        consumed = [(trace_id, span_id) for trace_id, span_id in ids if trace_id and span_id]
        number = self._optimizer_steps
        self._optimizer_steps += 1
        with optimizer_step_span(number, consumed) as span:
            _measure(span, {"trajectories": len(used)})
            yield lambda metrics: _measure(span, shown_metrics(metrics))

    def _outputs(self) -> dict[str, object]:
        traced = self._traced[:SHOWN_TRAJECTORIES]
        shown = [{"id": trajectory.id, "trace_id": trajectory.trace_id} for trajectory in traced]
        return {"traced": len(self._traced), "trajectories": shown}


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """`lr`, `grad_norm` and `loss`, as far as the metrics have them."""
    return {name: metrics[key] for key, name in _SHOWN_METRICS.items() if key in metrics}


def _measure(span: SpanHandle, values: Mapping[str, float]) -> None:
    if span.recording:
        for name, value in values.items():
            span.set(f"agentic.{name}", value)


QUERY_INTERVAL_S = 15.0
"""Shortest interval between two queries during a run. Each is one request per service."""
_PAUSE_S = 0.5
_HEALTH_POLICY = CallPolicy.question(5.0)


class SpanAccounts:
    """Span counts of each process since the run's start.

    A process that has exited keeps its last counts, except for waiting spans: another process takes over its folder on
    disk.
    """

    def __init__(
        self, services: Mapping[str, str], own: Callable[[], SpanCounts], earlier: TraceSummary | None = None
    ) -> None:
        """`services` maps names to URLs, `own` returns this process's counts, `earlier` is a resumed run's summary."""
        self._services = services
        self._own = own
        self._earlier = earlier or TraceSummary()
        self._start: dict[str, SpanCounts] = {}
        self._last: dict[str, SpanCounts] = {}
        self._alive: set[str] = set()
        self._unknown: list[str] = []
        self._queried_at = 0.0
        self._query: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Record the counts at the run's start."""
        await self._query_services()
        self._start = dict(self._last)

    def refresh(self) -> None:
        """Start a query in the background, unless the last one is recent."""
        idle = self._query is None or self._query.done()
        if idle and time.monotonic() - self._queried_at >= QUERY_INTERVAL_S:
            self._query = asyncio.create_task(self._query_services())

    async def settle(self, deadline_s: float) -> None:
        """Query the services until no span is waiting, at most until the deadline."""
        end = time.monotonic() + deadline_s
        if self._query is not None:
            await self._query
        await self._query_services()
        while self.summary().spans_waiting and time.monotonic() < end:
            await asyncio.sleep(_PAUSE_S)
            await self._query_services()

    def summary(self, trajectories: int = 0, size: int = 0) -> TraceSummary:
        """The run's totals. `trajectories` and `size` (bytes) are those traced by this process."""
        own = self._own()
        current = [own, *(self._last[name] for name in self._alive)]
        return TraceSummary(
            trajectories=self._earlier.trajectories + trajectories,
            bytes=self._earlier.bytes + size,
            spans_dropped=self._earlier.spans_dropped + own.dropped + self._increase(lambda counts: counts.dropped),
            spans_refused=self._earlier.spans_refused + own.refused + self._increase(lambda counts: counts.refused),
            spans_waiting=sum(counts.waiting for counts in current),
            spool_bytes=sum(counts.spool_bytes for counts in current),
            unknown=self._unknown,
        )

    def _increase(self, count: Callable[[SpanCounts], int]) -> int:
        return sum(count(last) - count(self._start.get(name, SpanCounts())) for name, last in self._last.items())

    async def _query_services(self) -> None:
        answers = await asyncio.gather(*(_processes(url) for url in self._services.values()))
        by_service = dict(zip(self._services, answers, strict=True))
        self._unknown = [name for name, processes in by_service.items() if processes is None]
        counts = {
            f"{name}/{process.replica}": process.spans
            for name, processes in by_service.items()
            for process in processes or []
        }
        self._last |= counts
        self._alive = set(counts)
        self._queried_at = time.monotonic()


async def _processes(url: str) -> list[Health] | None:
    """The processes of a service: its replicas under Ray Serve, else the process that answers; None without answer."""
    client = ServiceClient(url, policy=_HEALTH_POLICY)
    try:
        replicas = (await client.call("GET", "/replicas", reply=ReplicaList)).replicas
    except TrackwayError as error:
        if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED):
            return None
        try:
            return [await client.call("GET", "/health", reply=Health)]
        except TrackwayError:
            return None
    return [replica.health for replica in replicas]


@dataclass
class RunTraces:
    """The parts of a run's tracing. With `tracing` None the trainer records no spans and reports no counts."""

    target: TraceTarget
    own: StepTrace
    budget: TraceBudget
    accounts: SpanAccounts
    tracing: Tracing | None = None
    feedback: Sequence[TraceFeedback] = ()
    links: TraceFeedback | None = None
    """Links traces to the run in MLflow, or None when MLflow is off, or the traces go elsewhere."""

    async def open(self) -> None:
        """Record the span counts at the run's start."""
        if self.tracing is not None:
            await self.accounts.open()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace the block as the trainer's step `number`."""
        with self._root(self.own, number):
            yield

    @contextmanager
    def validation(self, number: int) -> Iterator[StepTrace]:
        """Trace the block as the validation of step `number`, a trace of its own, separate from later steps."""
        trace = self.own.beside("validation")
        with self._root(trace, number), trace.part("testing"):
            yield trace

    @contextmanager
    def _root(self, trace: StepTrace, number: int) -> Iterator[None]:
        with trace.step(number) as root:
            yield
        self.budget.spend(root.trace_stats.bytes)
        if root.trace_id is not None:
            self._link([Assessment(root.trace_id, root.span_id or "", {}, link=True)])

    def received(self, trajectories: Sequence[Trajectory], trace: StepTrace | None = None) -> None:
        """Count the trajectories requested in the step, or in another `trace`, and the bytes of their traces."""
        traced = [trajectory for trajectory in trajectories if trajectory.trace_id is not None]
        (trace or self.own).received(traced)
        self.budget.spend(sum(trajectory.trace_bytes for trajectory in traced), len(traced))
        self._link(links_of(traced))

    def assess(self, batch: FilteredBatch, advantages: Sequence[float], step: int) -> None:
        """Queue the feedback of a step on each trace. `advantages` belong to `batch.used`. Returns immediately."""
        assessments = training_feedback(batch, advantages, step)
        for backend in self.feedback:
            backend.submit(assessments)

    def dropped(self, batch: FilteredBatch) -> None:
        """Record what became of these trajectories, which no step took. Returns immediately."""
        if batch.trajectories:
            self.received(batch.trajectories)
            self.assess(batch, [], 0)

    def assess_validation(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the rewards of a validation. Returns immediately."""
        assessments = validation_feedback(trajectories)
        for backend in self.feedback:
            backend.submit(assessments)

    def metrics(self) -> Metrics:
        """The trace metrics since the last call. Empty for a run without tracing."""
        metrics = self.budget.take()
        return {} if self.tracing is None else metrics

    def summary(self) -> TraceSummary | None:
        """The run's totals as of the last query of the services. May start another query."""
        if self.tracing is None:
            return None
        self.accounts.refresh()
        return self._totals()

    async def close(self, deadline_s: float) -> TraceSummary | None:
        """Flush this process's spans, then wait for the services' queues, each until the deadline. The run's totals."""
        if self.tracing is None:
            return None
        await asyncio.to_thread(self.tracing.shutdown, deadline_s)
        await self.accounts.settle(deadline_s)
        return self._totals()

    def _link(self, traces: Sequence[Assessment]) -> None:
        if self.links is not None:
            self.links.submit(traces)

    def _totals(self) -> TraceSummary:
        return self.accounts.summary(self.budget.trajectories, self.budget.bytes)
