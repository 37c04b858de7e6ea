"""Checkpoints: layout, the newest complete one after a crash, and how many are kept."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.waiting import until
from trackway.system import StorageError
from trackway.trainer.run_state.checkpoint import (
    find_all,
    find_latest,
    load_checkpoint,
    save_checkpoint,
    set_aside_damaged,
)
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = pytest.mark.slow

ENDLESS_RUN = """
import sys
from pathlib import Path
from trackway.trainer.run_state.checkpoint import save_checkpoint

class Counter:
    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "count").write_text(str(step))

for step in range(1, 100_000):
    save_checkpoint(Path(sys.argv[1]), step, Counter().save, {"step": step}, keep=2)
"""


class Counter:
    """A learner whose whole state is one number."""

    def __init__(self, count: int = 0, breaks: bool = False) -> None:
        self.count = count
        self.breaks = breaks

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "count").write_text(str(self.count))
        if self.breaks:
            raise OSError("disk full")

    def load(self, folder: Path) -> None:
        self.count = int((folder / "count").read_text())


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_has_verls_layout_and_comes_back_with_its_state(tmp_path: Path):
    save_checkpoint(tmp_path, 7, Counter(42).save, {"position": [1, 2], "epoch": 0})

    latest, learner = find_latest(tmp_path), Counter()

    assert latest is not None
    assert latest == tmp_path / "global_step_7"
    assert (names(latest), names(latest / "actor")) == (
        ["actor", "manifest.json", "state.json"],
        ["count"],
    )
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert load_checkpoint(latest, learner) == {"position": [1, 2], "epoch": 0}
    assert learner.count == 42


def test_no_checkpoint_is_found_where_none_was_written(tmp_path: Path):
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "nowhere") is None


def test_a_save_that_breaks_leaves_the_previous_one_and_nothing_of_its_own(tmp_path: Path):
    save_checkpoint(tmp_path, 1, Counter(1).save, {})
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 2, Counter(2, breaks=True).save, {})

    assert find_latest(tmp_path) == tmp_path / "global_step_1"
    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path):
    (tmp_path / ".making_global_step_2" / "actor").mkdir(parents=True)
    (tmp_path / ".latest_checkpointed_iteration.txt.0123.tmp").touch()

    save_checkpoint(tmp_path, 3, Counter(3).save, {})

    assert names(tmp_path) == ["global_step_3", "latest_checkpointed_iteration.txt"]


def test_a_full_disk_is_named_and_keeps_the_checkpoint_before(small_disk: Path):
    class Big(Counter):
        def save(self, folder: Path) -> None:
            super().save(folder)
            (folder / "weights").write_bytes(bytes(2_000_000))

    save_checkpoint(small_disk, 1, Counter(1).save, {})
    with pytest.raises(StorageError, match=r"to write the checkpoint of step 2 to .*'No space left on device'"):
        save_checkpoint(small_disk, 2, Big(2).save, {})

    assert find_latest(small_disk) == small_disk / "global_step_1"
    assert names(small_disk) == ["global_step_1", "latest_checkpointed_iteration.txt"]


def test_a_crash_before_the_latest_file_is_replaced_leaves_the_named_checkpoint(tmp_path: Path):
    save_checkpoint(tmp_path, 1, Counter(1).save, {})
    save_checkpoint(tmp_path, 2, Counter(2).save, {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")

    assert find_latest(tmp_path) == tmp_path / "global_step_1"


def test_without_the_latest_file_the_highest_step_is_found(tmp_path: Path):
    for step in (9, 10):
        save_checkpoint(tmp_path, step, Counter(step).save, {})
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()

    assert find_latest(tmp_path) == tmp_path / "global_step_10"


def test_the_same_step_saved_again_replaces_it(tmp_path: Path):
    save_checkpoint(tmp_path, 1, Counter(1).save, {"try": 1})
    save_checkpoint(tmp_path, 1, Counter(2).save, {"try": 2})

    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert load_checkpoint(tmp_path / "global_step_1", Counter()) == {"try": 2}


def test_a_crash_while_a_step_is_replaced_leaves_its_older_save(tmp_path: Path):
    save_checkpoint(tmp_path, 1, Counter(1).save, {"try": 1})
    (tmp_path / "global_step_1").rename(tmp_path / ".replaced_global_step_1")

    latest = find_latest(tmp_path)

    assert latest is not None
    assert load_checkpoint(latest, Counter()) == {"try": 1}


def test_only_the_newest_are_kept(tmp_path: Path):
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, Counter(step).save, {}, keep=2)

    assert names(tmp_path) == ["global_step_10", "global_step_2", "latest_checkpointed_iteration.txt"]


def test_checkpoints_are_found_newest_first_and_the_named_one_before_all(tmp_path: Path):
    for step in (2, 9, 10):
        save_checkpoint(tmp_path, step, Counter(step).save, {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")

    assert [path.name for path in find_all(tmp_path)] == ["global_step_9", "global_step_10", "global_step_2"]


def test_the_highest_step_is_first_where_the_file_that_names_the_latest_is_damaged(tmp_path: Path):
    for step in (2, 9):
        save_checkpoint(tmp_path, step, Counter(step).save, {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe")

    assert [path.name for path in find_all(tmp_path)] == ["global_step_9", "global_step_2"]


def test_every_file_of_a_checkpoint_has_its_digest(tmp_path: Path):
    saved = save_checkpoint(tmp_path, 1, Counter(1).save, {"step": 1})

    files = json.loads((saved / "manifest.json").read_text())["files"]

    assert [file["name"] for file in files] == ["actor/count", "state.json"]
    assert files[0]["sha256"] == hashlib.sha256(b"1").hexdigest()


@pytest.mark.parametrize(
    ("file", "data", "said"),
    [
        ("actor/count", b"2", r"actor/count: expected sha256 6b86b273.*, got d4735e3a"),
        ("actor/count", None, r"actor/count: expected sha256 6b86b273.*, got no file"),
        ("state.json", b'{"step": 2}', r"state.json: expected sha256 .*, got "),
        ("state.json", None, r"state.json: expected a file, got none"),
        ("manifest.json", b'{"files": [', r"manifest.json: expected digests of files, got 1 errors in it"),
        ("manifest.json", None, r"manifest.json: expected a file, got none"),
    ],
)
def test_a_damaged_checkpoint_is_not_loaded_and_says_which_file_it_is(
    tmp_path: Path, file: str, data: bytes | None, said: str
):
    saved, learner = save_checkpoint(tmp_path, 1, Counter(1).save, {"step": 1}), Counter(7)
    if data is None:
        (saved / file).unlink()
    else:
        (saved / file).write_bytes(data)

    with pytest.raises(TrackwayError, match=rf"the checkpoint .*/global_step_1 is damaged: {said}") as caught:
        load_checkpoint(saved, learner)

    assert (caught.value.code, learner.count) == (ErrorCode.CHECKPOINT_CORRUPT, 7)


class OfAnotherModel(Counter):
    def load(self, folder: Path) -> None:
        raise ValueError("expected the weights of m, got other names")


def test_a_checkpoint_that_cannot_be_loaded_names_the_release_that_saved_it_and_the_way_on(tmp_path: Path):
    def refusal() -> str:
        with pytest.raises(TrackwayError, match="cannot be loaded") as caught:
            load_checkpoint(saved, OfAnotherModel())
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        return caught.value.message

    saved = save_checkpoint(tmp_path, 1, Counter(1).save, {"step": 1})
    manifest, own = saved / "manifest.json", version("trackway")
    fields = json.loads(manifest.read_text())
    plain = f"the checkpoint {saved} cannot be loaded: expected the weights of m, got other names"
    way_on = (
        f", and this is release {own} (format 1): resume it with the release that saved it, or export it there "
        "(trackway export) and start a run from that model"
    )

    assert (fields["release"], fields["format"]) == (own, 1)
    assert refusal() == plain
    manifest.write_text(json.dumps({**fields, "release": "9.1.0", "format": 2}))
    assert refusal() == f"{plain}; it was saved by release 9.1.0 (format 2){way_on}"
    assert load_checkpoint(saved, learner := Counter()) == {"step": 1}
    assert learner.count == 1


def test_damaged_checkpoints_are_kept_under_names_of_their_own(tmp_path: Path):
    for _ in range(2):
        save_checkpoint(tmp_path, 1, Counter(1).save, {})
        set_aside_damaged(tmp_path / "global_step_1")
    save_checkpoint(tmp_path, 2, Counter(2).save, {}, keep=1)

    assert names(tmp_path) == [
        "damaged_global_step_1",
        "damaged_global_step_1_2",
        "global_step_2",
        "latest_checkpointed_iteration.txt",
    ]


@pytest.mark.parametrize("moment", [0.0, 0.013, 0.029, 0.051])
def test_a_killed_run_always_leaves_a_complete_checkpoint(tmp_path: Path, moment: float):
    run = subprocess.Popen([sys.executable, "-c", ENDLESS_RUN, str(tmp_path)])
    until(lambda: find_latest(tmp_path) is not None)
    time.sleep(moment)
    run.send_signal(signal.SIGKILL)
    run.wait(60)

    latest, learner = find_latest(tmp_path), Counter()

    assert latest is not None
    state = load_checkpoint(latest, learner)
    assert state == {"step": learner.count}
