"""Checkpoints: layout, the newest complete one after a crash, and how many are kept."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trackway.trainer.checkpoint import find_latest, load_checkpoint, save_checkpoint

ENDLESS_RUN = """
import sys
from pathlib import Path
from trackway.trainer.checkpoint import save_checkpoint

class Counter:
    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "count").write_text(str(step))
    def load(self, folder): ...
    def export(self, folder): self.save(folder)

for step in range(1, 100_000):
    save_checkpoint(Path(sys.argv[1]), step, Counter(), {"step": step}, keep=2)
"""


class Counter:
    """A learner whose whole state is one number."""

    def __init__(self, count: int = 0, breaks: bool = False) -> None:
        self.count = count
        self.breaks = breaks

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "count").write_text(str(self.count))

    def load(self, folder: Path) -> None:
        self.count = int((folder / "count").read_text())

    def export(self, folder: Path) -> None:
        if self.breaks:
            raise OSError("disk full")
        folder.mkdir(parents=True)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_has_verls_layout_and_comes_back_with_its_state(tmp_path: Path):
    save_checkpoint(tmp_path, 7, Counter(42), {"position": [1, 2], "epoch": 0})

    latest, learner = find_latest(tmp_path), Counter()

    assert latest is not None
    assert latest == tmp_path / "global_step_7"
    assert (names(latest), names(latest / "actor")) == (["actor", "state.json"], ["count", "huggingface"])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert load_checkpoint(latest, learner) == {"position": [1, 2], "epoch": 0}
    assert learner.count == 42


def test_no_checkpoint_is_found_where_none_was_written(tmp_path: Path):
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "nowhere") is None


def test_a_save_that_breaks_leaves_the_previous_one_and_the_next_cleans_up(tmp_path: Path):
    save_checkpoint(tmp_path, 1, Counter(1), {})
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 2, Counter(2, breaks=True), {})
    assert find_latest(tmp_path) == tmp_path / "global_step_1"

    save_checkpoint(tmp_path, 3, Counter(3), {})

    assert names(tmp_path) == ["global_step_1", "global_step_3", "latest_checkpointed_iteration.txt"]


def test_a_crash_before_the_latest_file_is_replaced_leaves_the_named_checkpoint(tmp_path: Path):
    save_checkpoint(tmp_path, 1, Counter(1), {})
    save_checkpoint(tmp_path, 2, Counter(2), {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")

    assert find_latest(tmp_path) == tmp_path / "global_step_1"


def test_without_the_latest_file_the_highest_step_is_found(tmp_path: Path):
    for step in (9, 10):
        save_checkpoint(tmp_path, step, Counter(step), {})
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()

    assert find_latest(tmp_path) == tmp_path / "global_step_10"


def test_the_same_step_saved_again_replaces_it(tmp_path: Path):
    save_checkpoint(tmp_path, 1, Counter(1), {"try": 1})
    save_checkpoint(tmp_path, 1, Counter(2), {"try": 2})

    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert load_checkpoint(tmp_path / "global_step_1", Counter()) == {"try": 2}


def test_a_crash_while_a_step_is_replaced_leaves_its_older_save(tmp_path: Path):
    save_checkpoint(tmp_path, 1, Counter(1), {"try": 1})
    (tmp_path / "global_step_1").rename(tmp_path / ".replaced_global_step_1")

    latest = find_latest(tmp_path)

    assert latest is not None
    assert load_checkpoint(latest, Counter()) == {"try": 1}


def test_only_the_newest_are_kept(tmp_path: Path):
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, Counter(step), {}, keep=2)

    assert names(tmp_path) == ["global_step_10", "global_step_2", "latest_checkpointed_iteration.txt"]


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"expected a checkpoint with state.json, got"):
        load_checkpoint(tmp_path, Counter())


@pytest.mark.parametrize("moment", [0.0, 0.013, 0.029, 0.051])
def test_a_killed_run_always_leaves_a_complete_checkpoint(tmp_path: Path, moment: float):
    run = subprocess.Popen([sys.executable, "-c", ENDLESS_RUN, str(tmp_path)])
    end = time.monotonic() + 60
    while find_latest(tmp_path) is None and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(moment)
    run.send_signal(signal.SIGKILL)
    run.wait(10)

    latest, learner = find_latest(tmp_path), Counter()

    assert latest is not None
    state = load_checkpoint(latest, learner)
    assert state == {"step": learner.count}
