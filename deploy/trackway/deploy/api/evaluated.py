"""The result of `trackway.evaluate`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from trackway.deploy.runs.evaluation_report import evaluation_report
from trackway.evaluation.store import EvaluationStore
from trackway.evaluation.summary import Evaluation, Paired, RolloutSummary
from trackway.trainer.run_state.trajectories import to_record
from trackway.wire.trajectory import Trajectory

if TYPE_CHECKING:
    import pandas


class Evaluated:
    """A finished evaluation. Printed, it is the table that the command line shows."""

    def __init__(self, store: EvaluationStore) -> None:
        self._store = store
        self.evaluation: Evaluation = store.evaluation()

    @property
    def name(self) -> str:
        """The evaluation's name, which `trackway evaluate NAME` and the console know."""
        return self.evaluation.name

    @property
    def summary(self) -> RolloutSummary:
        """pass@k, scores, lengths and tool use over all rows."""
        assert self.evaluation.summary is not None
        return self.evaluation.summary

    @property
    def score(self) -> float | None:
        """Mean score of the rows, or None when every rollout failed."""
        return self.summary.score.value if self.summary.score else None

    def against(self, other: "Evaluated") -> Paired | None:
        """The difference to another evaluation, row by row, with a 95 % interval, or None without a common row."""
        return self._store.compared(other._store)

    def trajectories(self) -> "pandas.DataFrame":
        """Its trajectories, one per line. For the columns, see `Run.trajectories`."""
        return frame_of(self._store.trajectories())

    def __repr__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as captured:
            console.print(evaluation_report(self.evaluation, None, None))
        return captured.get().rstrip()


def frame_of(trajectories: Sequence[Trajectory]) -> "pandas.DataFrame":
    """The trajectories as a table, with the columns of the run's parquet files. Nested values are objects."""
    import pandas

    records = [to_record(trajectory) | trajectory.model_dump(mode="json") for trajectory in trajectories]
    return pandas.DataFrame(records)
