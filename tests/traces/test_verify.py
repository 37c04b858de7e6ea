"""A run's dump held against a store: what is counted, what is waited for, what a user may get wrong."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.traces.example_trace import ExampleTrace, MemoryStore
from trackway.system.process import UserError
from trackway.traces.store import Steps
from trackway.traces.tree import TraceTree
from trackway.traces.verify import Gap, WaitingSpans, dumps, settle, verify, waiting
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import write_trajectories


def examples(count: int) -> list[ExampleTrace]:
    return [ExampleTrace(rollout_n=n, trace_id=f"tr-{n:032x}") for n in range(count)]


def dump(run: Path, name: str, *made: ExampleTrace, untraced: int = 0) -> Path:
    """A file of trajectories as the trainer writes it."""
    path = run / "trajectories" / f"{name}.parquet"
    others = [ExampleTrace(rollout_n=100 + n).trajectory(trace_id=None) for n in range(untraced)]
    write_trajectories(path, [*(example.trajectory() for example in made), *others])
    return path


class Late(MemoryStore):
    """A store to which one more trace comes each time it is asked."""

    def __init__(self, *examples: ExampleTrace) -> None:
        super().__init__(*examples)
        self.coming = self.trees
        self.trees = []

    def get(self, trace_ids: Sequence[str]) -> dict[str, TraceTree]:
        found = super().get(trace_ids)
        self.trees = self.coming[: len(self.trees) + 1]
        return found


def test_every_traced_trajectory_is_counted_and_the_untraced_are_not(tmp_path: Path) -> None:
    made = examples(3)
    files = [dump(tmp_path / "tiny", "step_3", *made[:2], untraced=5), dump(tmp_path / "tiny", "step_4", made[2])]
    found = verify(MemoryStore(*made), RunFolder(tmp_path / "tiny"), files, wait_s=0)
    assert (found.run, found.dumps, found.trajectories, found.traced, found.complete) == ("tiny", 2, 8, 3, 3)
    assert found.gaps == []


def test_each_gap_has_its_trajectory_and_its_reasons(tmp_path: Path) -> None:
    made = examples(3)
    file = dump(tmp_path / "tiny", "step_3", *made)
    made[1].drop("c0", "s")
    found = verify(MemoryStore(*made[:2]), RunFolder(tmp_path / "tiny"), [file], wait_s=0)
    assert (found.traced, found.complete) == (3, 1)
    assert found.gaps == [
        Gap(
            trajectory="tiny/3/17/1",
            trace_id=f"{1:032x}",
            name="s3/i17/n1",
            reasons=["1 of 2 chat spans: none below turn 0", "0 of 1 reward spans"],
        ),
        Gap(trajectory="tiny/3/17/2", trace_id=f"{2:032x}", name="s3/i17/n2", reasons=["the trace is absent"]),
    ]


def test_late_spans_are_waited_for_and_whole_trees_are_not_asked_for_again() -> None:
    made = examples(2)
    shelf = Late(*made)
    assert settle(shelf, [example.trajectory() for example in made], wait_s=60) == []
    first, second = (example.trajectory().trace_id for example in made)
    assert shelf.asked == [[first, second], [first, second], [second]]


def test_waiting_ends_with_the_gaps_that_are_left() -> None:
    [example] = examples(1)
    [gap] = settle(MemoryStore(), [example.trajectory()], wait_s=0.01)
    assert gap.reasons == ["the trace is absent"]


def test_a_large_step_is_asked_for_in_parts_and_its_progress_is_told(tmp_path: Path) -> None:
    made = examples(250)
    shelf, shown = MemoryStore(*made), list[tuple[int, int]]()
    files = [dump(tmp_path, "step_3", *made[:220]), dump(tmp_path, "step_4", *made[220:])]
    verify(shelf, RunFolder(tmp_path), files, wait_s=0, meter=lambda known, checked: shown.append((known, checked)))
    assert [len(ids) for ids in shelf.asked] == [100, 100, 20, 30]
    assert shown == [(220, 100), (220, 100), (220, 20), (250, 30)]


def test_spans_that_wait_on_disk_are_counted(tmp_path: Path) -> None:
    assert waiting(tmp_path) == WaitingSpans(files=0, bytes=0)
    folder = tmp_path / "spool" / "mlflow" / "agent-1-aa"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "00000001-512.otlp").write_bytes(b"x" * 700)
    (folder / "00000002-9.otlp").write_bytes(b"x" * 30)
    assert waiting(tmp_path) == WaitingSpans(files=2, bytes=730)


@pytest.mark.parametrize(
    ("steps", "validate", "expected"),
    [
        (None, None, ["val_step_0", "step_2", "step_10", "val_step_10"]),
        (None, False, ["step_2", "step_10"]),
        (None, True, ["val_step_0", "val_step_10"]),
        (Steps(10, 10), None, ["step_10", "val_step_10"]),
        (Steps(1, 9), None, ["step_2"]),
    ],
)
def test_dumps_are_chosen_by_step_and_kind(
    tmp_path: Path, steps: Steps | None, validate: bool | None, expected: list[str]
) -> None:
    folder = tmp_path / "tiny" / "trajectories"
    folder.mkdir(parents=True)
    for name in ("step_10", "step_2", "val_step_0", "val_step_10", "notes"):
        (folder / f"{name}.parquet").touch()
    assert [path.stem for path in dumps(RunFolder(tmp_path / "tiny"), steps, validate)] == expected
    with pytest.raises(UserError, match="found steps validation 0, 2, 10, validation 10"):
        dumps(RunFolder(tmp_path / "tiny"), Steps(99, 99), None)
