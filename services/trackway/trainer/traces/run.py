"""A run's tracing as one object: the budget, the trainer's own trace, feedback, and span counts."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trackway.tracing import Tracing
from trackway.trainer.learner.filtering import FilteredBatch
from trackway.trainer.metrics.rollout import Metrics
from trackway.trainer.traces.budget import TraceBudget
from trackway.trainer.traces.feedback import (
    Assessment,
    TraceFeedback,
    links_of,
    training_feedback,
    validation_feedback,
)
from trackway.trainer.traces.span_counts import SpanAccounts
from trackway.trainer.traces.step import StepTrace
from trackway.wire.tracing import TraceTarget
from trackway.wire.trainer import TraceSummary
from trackway.wire.trajectory import Trajectory


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
