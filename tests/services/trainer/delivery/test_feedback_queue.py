"""Feedback on disk: in order, bounded, kept until it is sent, by whichever process."""

from pathlib import Path

import pytest

from trackway.trainer.delivery.assessment import Assessment
from trackway.trainer.delivery.feedback_queue import FeedbackQueue, Sent
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


def test_a_damaged_line_is_lost_alone(folder: Path):
    queue = FeedbackQueue(folder)
    queue.push([FIRST, SECOND])
    [file] = folder.iterdir()
    file.write_text("rubbish\n" + file.read_text().splitlines()[1] + "\n")

    sent = queue.send(lambda assessments: Sent())

    assert sent is not None and (sent.lost, sent.reason) == (2, f"{file} is damaged")
    assert queue.waiting == 0
