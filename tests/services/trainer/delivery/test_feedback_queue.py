"""Feedback on disk: in order, bounded, kept until it is sent, by whichever process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trackway.trainer.delivery.feedback_queue import Assessment, FeedbackQueue, Sent
from trackway.trainer.delivery.jobs import Later

FIRST = Assessment("1" * 32, "1" * 16, {"reward": 1.0, "fate": "used"})
SECOND = Assessment("2" * 32, "2" * 16, {"reward": 0.0})
LINK = Assessment("3" * 32, "3" * 16, {}, link=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "feedback"


def sent_by(queue: FeedbackQueue) -> list[list[Assessment]]:
    """What each file held; all of it is taken."""
    seen: list[list[Assessment]] = []

    def take(assessments: list[Assessment]) -> Sent:
        seen.append(assessments)
        return Sent()

    while queue.send(take) is not None:
        pass
    return seen


def test_what_one_process_kept_another_one_sends_in_its_order(folder: Path):
    queue = FeedbackQueue(folder)
    queue.push([FIRST, SECOND])
    queue.push([LINK])
    other_queue = FeedbackQueue(folder)

    assert other_queue.waiting == 4
    assert sent_by(other_queue) == [[FIRST, SECOND], [LINK]]
    assert (queue.waiting, list(folder.iterdir())) == (0, [])


def test_of_a_file_only_what_is_left_is_sent_again(folder: Path):
    queue = FeedbackQueue(folder)
    queue.push([FIRST, SECOND])

    queue.send(lambda assessments: Sent(left=assessments[1:]))

    assert queue.waiting == 1
    assert sent_by(FeedbackQueue(folder)) == [[SECOND]]


def test_what_is_not_possible_yet_does_not_keep_the_rest(folder: Path):
    queue = FeedbackQueue(folder)
    queue.push([FIRST])
    queue.push([SECOND])
    seen: list[Assessment] = []

    def not_the_first(assessments: list[Assessment]) -> Sent:
        seen.extend(assessments)
        left = [assessment for assessment in assessments if assessment == FIRST]
        return Sent(left, reason="its trace has not arrived" if left else "")

    assert queue.send(not_the_first) and queue.send(not_the_first)
    with pytest.raises(Later):
        queue.send(not_the_first)
    assert (seen, queue.waiting) == ([FIRST, SECOND], 2)


def test_what_was_sent_makes_room(folder: Path):
    queue = FeedbackQueue(folder, max_bytes=150)
    for _ in range(3):
        queue.push([FIRST])
        assert sent_by(queue) == [[FIRST]]

    assert queue.take_dropped() == 0


def test_what_finds_no_room_is_counted(folder: Path):
    queue = FeedbackQueue(folder, max_bytes=150)
    for assessment in (SECOND, FIRST, FIRST):
        queue.push([assessment])

    assert (queue.take_dropped(), queue.take_dropped()) == (4, 0)
    assert sent_by(queue) == [[SECOND]]


def test_a_folder_that_cannot_be_written_is_counted_and_not_raised(folder: Path):
    folder.parent.mkdir()
    folder.touch()
    queue = FeedbackQueue(folder.parent / "feedback" / "below")

    queue.push([FIRST])

    assert queue.take_dropped() == 2


def test_a_text_with_a_line_separator_is_sent(folder: Path):
    queue, text = FeedbackQueue(folder), Assessment("4" * 32, "4" * 16, {"note": "first\u2028second"})
    queue.push([text])

    assert sent_by(queue) == [[text]]


def test_a_damaged_line_is_lost_alone(folder: Path):
    queue = FeedbackQueue(folder)
    queue.push([FIRST, SECOND])
    [file] = folder.iterdir()
    file.write_text("rubbish\n" + file.read_text().splitlines()[1] + "\n")

    sent = queue.send(lambda assessments: Sent())

    assert sent is not None and (sent.lost, sent.reason) == (2, f"{file} is damaged")
    assert queue.waiting == 0


def calls_of(action: Callable[[], object]) -> int:
    """The number of calls of functions, Python's and C's, among them each call into the file system."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def test_push_and_send_cost_the_same_at_any_backlog(folder: Path):
    def costs(backlog: int) -> tuple[int, int]:
        queue = FeedbackQueue(folder / str(backlog))
        for _ in range(backlog):
            queue.push([FIRST])
        push = calls_of(lambda: queue.push([FIRST]))
        return push, calls_of(lambda: queue.send(lambda assessments: Sent()))

    assert costs(20) == costs(200)


def test_files_that_another_process_sent_leave_the_bound(folder: Path):
    queue = FeedbackQueue(folder, max_bytes=150)
    queue.push([SECOND])

    assert sent_by(FeedbackQueue(folder)) == [[SECOND]]
    assert queue.send(lambda assessments: Sent()) is None
    queue.push([SECOND])

    assert (queue.take_dropped(), queue.waiting) == (0, 1)


def test_a_file_that_another_process_sent_in_part_is_found_again(folder: Path):
    queue = FeedbackQueue(folder)
    queue.push([FIRST, SECOND])

    FeedbackQueue(folder).send(lambda assessments: Sent(left=assessments[1:]))

    assert sent_by(queue) == [[SECOND]]


def test_a_sender_that_fails_leaves_its_file_queued(folder: Path):
    queue = FeedbackQueue(folder)
    queue.push([FIRST])

    def fail(assessments: list[Assessment]) -> Sent:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        queue.send(fail)

    assert sent_by(queue) == [[FIRST]]


def test_a_backlog_of_traces_pauses_the_queue(folder: Path):
    queue = FeedbackQueue(folder)
    for _ in range(20):
        queue.push([FIRST])
    requests = 0

    def missing(assessments: list[Assessment]) -> Sent:
        nonlocal requests
        requests += 1
        return Sent(assessments, reason="its trace has not arrived")

    with pytest.raises(Later):
        while queue.send(missing):
            pass

    assert (requests, queue.waiting) == (3, 40)
