"""Finished sessions on disk: each is kept once, drawn once, and back after a run that went back to a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trackway.trainer.run_state.session_inbox import OpenInbox, SessionInbox
from trackway.wire.agent import Limits
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.sessions import FinishedSession, SessionRun
from trackway.wire.trajectory import TraceTarget, Trajectory

RUN = SessionRun(
    run="run-a",
    experiment_name="exp",
    sampling_params=SamplingParams(max_tokens=64),
    limits=Limits(),
    trace_target=TraceTarget(),
)
Finished = Callable[..., FinishedSession]


@pytest.fixture
def finished(rollout: Callable[..., Trajectory]) -> Finished:
    """Makes the session of this number."""

    def make(number: int, group: int | str = "g", **changes: object) -> FinishedSession:
        trajectory = rollout(0, 0, float(number), **changes)
        return FinishedSession(session_id=f"s-abcd-{number:032x}", group=group, trajectory=trajectory)

    return make


def inbox_of(folder: Path, most: int = 8) -> SessionInbox:
    inbox = SessionInbox(folder)
    inbox.open(OpenInbox(run=RUN, most=most), trained=())
    return inbox


def ids(inbox: SessionInbox) -> list[str]:
    return [session.session_id for session in inbox.waiting()]


def test_a_session_that_is_put_twice_waits_once_and_is_drawn_whole(tmp_path: Path, finished: Finished) -> None:
    inbox, session = inbox_of(tmp_path), finished(1)

    assert [inbox.put(session), inbox.put(session), inbox.put(finished(2, 7))] == [1, 1, 2]
    assert [(waiting.session_id, waiting.group) for waiting in inbox.waiting()] == [
        (session.session_id, "g"),
        (finished(2).session_id, 7),
    ]
    assert inbox.draw([session.session_id]) == [session]
    assert inbox.put(session) == 1  # its agent service repeats the call
    assert ids(inbox) == [finished(2).session_id]


def test_one_session_too_many_is_refused_until_some_are_drawn(tmp_path: Path, finished: Finished) -> None:
    inbox = inbox_of(tmp_path, most=1)
    inbox.put(finished(1))

    with pytest.raises(TrackwayError, match="expected fewer than 1 sessions that wait") as refused:
        inbox.put(finished(2))
    assert refused.value.code is ErrorCode.OVERLOADED
    inbox.draw(ids(inbox))
    assert inbox.put(finished(2)) == 1


def test_a_run_that_takes_no_sessions_says_so(tmp_path: Path, finished: Finished) -> None:
    with pytest.raises(TrackwayError, match=r"trackway\.rollouts_from=sessions") as refused:
        SessionInbox(tmp_path).put(finished(1))

    assert refused.value.code is ErrorCode.CONFLICT


def test_after_a_kill_what_no_checkpoint_has_waits_again(tmp_path: Path, finished: Finished) -> None:
    before = inbox_of(tmp_path)
    for number in range(4):
        before.put(finished(number))
    before.draw([finished(number).session_id for number in range(3)])

    after = SessionInbox(tmp_path)
    after.open(OpenInbox(run=RUN, most=8), trained={finished(1).session_id})

    assert set(ids(after)) == {finished(number).session_id for number in (0, 2, 3)}


def test_a_file_that_cannot_be_read_is_set_aside(tmp_path: Path, finished: Finished) -> None:
    inbox = inbox_of(tmp_path)
    inbox.put(finished(1))
    file = tmp_path / "sessions" / "waiting" / f"{finished(2).session_id}.json"
    file.write_text(json.dumps({"session_id": "other version"}))

    assert ids(inbox) == [finished(1).session_id]
    assert file.with_suffix(".unreadable").exists()
