"""Everything a run does about traces: how many, the trainer's own, feedback, and what became of the spans."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trackway.tracing import Tracing
from trackway.trainer.learner.filtering import FilteredBatch
from trackway.trainer.metrics.rollout import Metrics
from trackway.trainer.traces.budget import TraceBudget
from trackway.trainer.traces.feedback import Assessment, TraceFeedback, training_feedback, validation_feedback
from trackway.trainer.traces.span_counts import SpanAccounts
from trackway.trainer.traces.step import StepTrace
from trackway.wire.tracing import TraceTarget
from trackway.wire.trainer import TraceSummary
from trackway.wire.trajectory import Trajectory


@dataclass
class RunTraces:
    """Without `tracing` the run records nothing of its own and reports nothing."""

    target: TraceTarget
    own: StepTrace
    budget: TraceBudget
    accounts: SpanAccounts
    tracing: Tracing | None = None
    feedback: Sequence[TraceFeedback] = ()
    links: TraceFeedback | None = None
    """What links traces to the run in MLflow; None when their spans say the run themselves."""

    async def open(self) -> None:
        """Take the counts that the run starts from."""
        if self.tracing is not None:
            await self.accounts.open()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace what happens inside as the trainer's step `number`."""
        with self.own.step(number) as root:
            yield
        self.budget.spend(root.ledger.bytes)
        if root.trace_id is not None:
            self._link([Assessment(root.trace_id, root.span_id or "", {}, link=True)])

    def received(self, trajectories: Sequence[Trajectory]) -> None:
        """Count what was asked for in the step, and what it cost."""
        traced = [trajectory for trajectory in trajectories if trajectory.trace_id is not None]
        self.own.received(traced)
        self.budget.spend(sum(trajectory.trace_bytes for trajectory in traced), len(traced))
        self._link([Assessment(t.trace_id or "", t.span_id or "", {}, link=True) for t in traced])

    def assess(self, batch: FilteredBatch, advantages: Sequence[float]) -> None:
        """Queue the training feedback of each trace; `advantages` are those of `batch.used`. Returns at once."""
        assessments = training_feedback(batch, advantages)
        for backend in self.feedback:
            backend.submit(assessments)

    def assess_validation(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the rewards of a validation; returns at once."""
        assessments = validation_feedback(trajectories)
        for backend in self.feedback:
            backend.submit(assessments)

    def metrics(self) -> Metrics:
        """What was traced since the last call; nothing for a run that traces nothing."""
        taken = self.budget.take()
        return {} if self.tracing is None else taken

    def summary(self) -> TraceSummary | None:
        """The run's sums so far, as of the last look at the services, which this may start again."""
        if self.tracing is None:
            return None
        self.accounts.refresh()
        return self._sums()

    async def close(self, deadline_s: float) -> TraceSummary | None:
        """Send what waits here, look what waits elsewhere, each at most until the deadline; the run's sums."""
        if self.tracing is None:
            return None
        await asyncio.to_thread(self.tracing.shutdown, deadline_s)
        await self.accounts.settle(deadline_s)
        return self._sums()

    def _link(self, traces: Sequence[Assessment]) -> None:
        if self.links is not None:
            self.links.submit(traces)

    def _sums(self) -> TraceSummary:
        return self.accounts.summary(self.budget.trajectories, self.budget.bytes)
