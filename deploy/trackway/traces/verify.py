"""Verifies that a trace backend has a complete tree for each traced trajectory of a run."""

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from trackway.system.process import UserError
from trackway.traces import rules
from trackway.traces.store import Steps, TraceStore
from trackway.traces.tree import TraceTree
from trackway.tracing.attributes import display_name
from trackway.tracing.settings import SPOOL_FOLDER
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.trajectory import Trajectory

_CHUNK = 100
_LOOK_AGAIN_S = 0.5
_DUMP = re.compile(r"(val_)?step_(\d+)\.parquet")

Rule = Callable[[TraceTree | None, Trajectory], list[str]]
"""The reasons why a trace is incomplete."""


class Gap(BaseModel):
    """A traced trajectory with an incomplete trace."""

    trajectory: str
    trace_id: str
    name: str
    reasons: list[str]


class WaitingSpans(BaseModel):
    """Spans waiting on disk for their backend."""

    files: int
    bytes: int


class Verification(BaseModel):
    """The result of a verification."""

    run: str
    dumps: int
    """Number of files of trajectories: one per step and kind."""
    trajectories: int
    traced: int
    complete: int
    gaps: list[Gap]
    waiting: WaitingSpans


Meter = Callable[[int, int], object]
"""Called with the number of trajectories known so far, and the number of them that were checked since the last call."""


def _unseen(*counts: int) -> None:
    """Show no progress."""


def dumps(run: RunFolder, steps: Steps | None, validate: bool | None) -> list[Path]:
    """The run's files of trajectories, by step. `validate` True or False leaves the other kind out.

    Raises:
        UserError: there are none.
    """
    every = [
        (match, path) for path in (run.path / "trajectories").glob("*.parquet") if (match := _DUMP.fullmatch(path.name))
    ]
    chosen = [
        (int(match[2]), path)
        for match, path in every
        if (steps is None or int(match[2]) in steps) and validate in (None, match[1] is not None)
    ]
    if not chosen:
        there = sorted((int(match[2]), match[1] or "") for match, _ in every)
        found = ", ".join(f"{'validation ' if kind else ''}{step}" for step, kind in there) or "none"
        raise UserError(f"expected trajectories of the given steps in run {run.name!r}, found steps {found}")
    return [path for _, path in sorted(chosen)]


def verify(
    store: TraceStore, run: RunFolder, files: Sequence[Path], wait_s: float, meter: Meter = _unseen
) -> Verification:
    """Check each traced trajectory of the files against its trace, waiting `wait_s` seconds for late spans."""
    total = traced = 0
    suspects: list[Trajectory] = []
    for path in files:
        trajectories = read_trajectories(path)
        recorded = [trajectory for trajectory in trajectories if trajectory.trace_id]
        total, traced = total + len(trajectories), traced + len(recorded)
        gaps = look(store, recorded, seen=partial(meter, traced))
        suspects += [trajectory for trajectory in recorded if trajectory.trace_id in gaps]
    gaps = settle(store, suspects, wait_s)
    return Verification(
        run=run.name,
        dumps=len(files),
        trajectories=total,
        traced=traced,
        complete=traced - len(gaps),
        gaps=gaps,
        waiting=waiting(run.path.parent),
    )


def settle(store: TraceStore, trajectories: Sequence[Trajectory], wait_s: float, rule: Rule = rules.gaps) -> list[Gap]:
    """The gaps that remain when every trace is complete or `wait_s` seconds have passed."""
    deadline = time.monotonic() + wait_s
    while True:
        reasons = look(store, trajectories, rule)
        trajectories = [trajectory for trajectory in trajectories if trajectory.trace_id in reasons]
        left = deadline - time.monotonic()
        if not trajectories or left <= 0:
            return [
                Gap(
                    trajectory=trajectory.id,
                    trace_id=trajectory.trace_id or "",
                    name=display_name(trajectory.tags),
                    reasons=reasons[trajectory.trace_id or ""],
                )
                for trajectory in trajectories
            ]
        time.sleep(min(_LOOK_AGAIN_S, left))


def look(
    store: TraceStore,
    trajectories: Sequence[Trajectory],
    rule: Rule = rules.gaps,
    seen: Callable[[int], object] = _unseen,
) -> dict[str, list[str]]:
    """The reasons of each trajectory with an incomplete trace, by trace id. `seen` gets the size of each part."""
    reasons_by_id: dict[str, list[str]] = {}
    for chunk in _chunks(trajectories):
        trees = store.get([trajectory.trace_id for trajectory in chunk if trajectory.trace_id])
        for trajectory in chunk:
            if trajectory.trace_id and (reasons := rule(trees.get(trajectory.trace_id), trajectory)):
                reasons_by_id[trajectory.trace_id] = reasons
        seen(len(chunk))
    return reasons_by_id


def waiting(outputs: Path) -> WaitingSpans:
    """Files and bytes in the spool of an outputs folder."""
    sizes = [size for path in (outputs / SPOOL_FOLDER).rglob("*.otlp") if (size := _size(path)) is not None]
    return WaitingSpans(files=len(sizes), bytes=sum(sizes))


def _size(path: Path) -> int | None:
    """Size in bytes, or None if the file was sent meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _chunks(trajectories: Iterable[Trajectory]) -> Iterator[Sequence[Trajectory]]:
    rest = iter(trajectories)
    while chunk := list(itertools.islice(rest, _CHUNK)):
        yield chunk
