"""The trainer's own traces: one per step, and below it what the step did.

    train step 3 > rollout | update_actor > optimizer_step 0 ... | update_weights | testing | save_checkpoint

and, where engines share the learner's GPUs, `sleep` before `update_actor` and `wake_up` after `update_weights`.

A trajectory is a trace of its own that links to the `rollout` (or `testing`) which asked for it; an `optimizer_step`
links to the trajectories that it learned from. Without an active tracing nothing here is recorded or costs anything.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from trackway.tracing import SpanHandle, optimizer_step_span, train_step_span
from trackway.tracing.attributes import measures
from trackway.tracing.spans import operation_span
from trackway.wire.tracing import TraceTarget
from trackway.wire.trajectory import Trajectory

SHOWN_TRAJECTORIES = 64
"""Traced trajectories that a step's outputs list; the links of its optimiser steps are complete."""

_SHOWN_METRICS = {"actor/lr": "lr", "actor/grad_norm": "grad_norm", "actor/pg_loss": "loss"}


class StepTrace:
    """The trace of the step that runs now; the same object serves one step after another."""

    def __init__(self, experiment_name: str, target: TraceTarget) -> None:
        self._experiment_name = experiment_name
        self._target = target
        self._root: SpanHandle | None = None
        self._traced: list[Trajectory] = []
        self._optimizer_steps = 0

    @contextmanager
    def step(self, number: int) -> Iterator[SpanHandle]:
        """Trace what happens inside as step `number`."""
        self._traced, self._optimizer_steps = [], 0
        with train_step_span(number, self._experiment_name, self._target) as root:
            self._root = root
            try:
                yield root
            finally:
                self._root = None
                root.outputs(self._outputs())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Trace a part of the step; parts outside any step are not recorded."""
        with operation_span(name):
            yield

    def note(self, **values: float) -> None:
        """Put numbers on the step."""
        if self._root is not None:
            _measure(self._root, values)

    def received(self, trajectories: Sequence[Trajectory]) -> None:
        """The step asked for these."""
        self._traced += [trajectory for trajectory in trajectories if trajectory.trace_id is not None]

    @contextmanager
    def optimizer_step(self, used: Sequence[Trajectory]) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Trace one optimiser step, linked to the traced ones of the trajectories it uses; takes its metrics."""
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
    """lr, grad_norm and loss, of those metrics that are there."""
    return {name: metrics[key] for key, name in _SHOWN_METRICS.items() if key in metrics}


def _measure(span: SpanHandle, values: Mapping[str, float]) -> None:
    if span.recording:
        for key, value in measures(values).items():
            span.set(key, value)
