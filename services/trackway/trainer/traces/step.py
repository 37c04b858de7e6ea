"""The trainer's own traces: one per step, with a span for each phase.

    train step 3 > rollout | update_actor > optimizer_step 0 ... | update_weights | testing | save_checkpoint

A validation beside later steps has a trace of its own, `validation 3`. Where engines share the learner's GPUs, a step
has `sleep` before `update_actor` and `wake_up` after `update_weights`.

Each trajectory has its own trace, which links to the `rollout` (or `testing`) span that requested it. An
`optimizer_step` links to the trajectories it trained on. Without active tracing nothing is recorded, at no cost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from trackway.tracing import SpanHandle, optimizer_step_span, train_step_span
from trackway.tracing.spans import operation_span
from trackway.wire.tracing import TraceTarget
from trackway.wire.trajectory import Trajectory

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
