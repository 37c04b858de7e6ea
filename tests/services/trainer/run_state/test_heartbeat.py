"""Who is taken for alive, by /proc here and by its beat elsewhere; real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.trainer.real_runs import beat_of
from tests.waiting import until
from trackway.trainer.run_state.folder import Beat, Machine, OutputsLock, Owner, RunFolder, this_machine
from trackway.trainer.run_state.heartbeat import DEAD_AFTER_S, EXIT_LOST, Heartbeat, LivenessMonitor
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow

pytestmark = pytest.mark.slow

ELSEWHERE = this_machine().model_copy(update={"host": "another-pod"})
BEATING = """
import sys, time
from pathlib import Path
from trackway.trainer.run_state.heartbeat import Heartbeat
from trackway.trainer.run_state.folder import RunFolder
with Heartbeat(RunFolder(Path(sys.argv[1])), every_s=0.1):
    sys.stdin.read()
"""

WRITING = """
import os, sys
from pathlib import Path
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.heartbeat import Heartbeat, exit_if_lost
from trackway.wire.trainer import MetricsRow, RunState
folder = RunFolder(Path(sys.argv[1]), exit_if_lost)
with Heartbeat(folder, every_s=3600):
    print("ready", flush=True)
    exec(sys.stdin.readline())
"""


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def beating(folder: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the run and says so every 100 ms."""
    with subprocess.Popen([sys.executable, "-c", BEATING, str(folder.path)], stdin=subprocess.PIPE) as process:
        until(lambda: beat_of(folder) > 0)
        yield process
        process.kill()


def test_a_process_of_this_machine_lives_until_it_is_gone_though_nobody_has_reaped_it(folder: RunFolder, beating):
    sightings = LivenessMonitor()
    before = sightings.alive(folder)

    beating.kill()
    until(lambda: not sightings.alive(folder))

    assert (before, beating.returncode) == (True, None)


def test_another_process_with_the_pid_of_a_dead_one_is_another_process(folder: RunFolder):
    mine = Owner.of(os.getpid())
    folder.write_owner(mine.model_copy(update={"started": mine.started - 1}))

    assert not LivenessMonitor().alive(folder)


def test_a_folder_that_names_nobody_has_nobody(folder: RunFolder):
    (folder.path / "worker.json").unlink()

    assert not LivenessMonitor().alive(folder)


def test_on_another_machine_a_process_is_dead_when_its_beat_has_not_changed_for_long(folder: RunFolder, beating):
    clock = Clock()
    elsewhere = LivenessMonitor(ELSEWHERE, clock)
    first = elsewhere.alive(folder)
    seen = beat_of(folder)
    until(lambda: beat_of(folder) > seen)
    clock.now += 10 * DEAD_AFTER_S
    changed = elsewhere.alive(folder)

    beating.kill()
    beating.wait()
    last_beat = elsewhere.alive(folder)  # one may have come between the look and the end
    clock.now += DEAD_AFTER_S - 0.1
    patient = elsewhere.alive(folder)
    clock.now += 0.2

    assert (first, changed, last_beat, patient, elsewhere.alive(folder)) == (True, True, True, True, False)


def test_a_new_owner_on_another_machine_is_alive_though_the_one_before_had_more_beats(folder: RunFolder):
    before, after = Owner(machine=ELSEWHERE, pid=7, started=7), Owner(machine=ELSEWHERE, pid=8, started=8)
    clock = Clock()
    sightings = LivenessMonitor(clock=clock)
    folder.write_owner(before)
    folder.write_beat(Beat(owner=before, count=500))
    assert sightings.alive(folder)

    clock.now += DEAD_AFTER_S
    folder.write_owner(after)
    folder.write_beat(Beat(owner=after, count=1))
    assert sightings.alive(folder)


def test_a_beat_of_a_process_that_has_lost_the_run_is_no_life_of_its_owner_and_gives_it_nothing_back(folder: RunFolder):
    owner, lost = Owner(machine=ELSEWHERE, pid=7, started=7), Owner(machine=ELSEWHERE, pid=8, started=8)
    folder.write_owner(owner)
    folder.write_beat(Beat(owner=owner, count=5))
    clock = Clock()
    sightings = LivenessMonitor(clock=clock)
    before = sightings.alive(folder)

    clock.now += DEAD_AFTER_S - 1
    folder.write_beat(Beat(owner=lost, count=6))
    after_a_foreign_beat = sightings.alive(folder)
    clock.now += DEAD_AFTER_S - 1
    folder.write_beat(Beat(owner=lost, count=7))

    assert (before, after_a_foreign_beat, sightings.alive(folder)) == (True, True, False)
    assert folder.owner() == owner


def test_the_same_host_name_in_another_container_is_another_machine(folder: RunFolder):
    folder.write_owner(Owner.of(2**22 + 1))
    processes = this_machine().model_copy(update={"processes": "pid:[1]"})
    rebooted = this_machine().model_copy(update={"boot": "another"})

    alive = [LivenessMonitor(machine).alive(folder) for machine in (this_machine(), processes, rebooted)]

    assert alive == [False, True, True]


def test_the_beat_goes_on_while_torch_computes(folder: RunFolder):
    import torch

    matrix = torch.rand(1500, 1500)
    with Heartbeat(folder, every_s=0.01):
        until(lambda: beat_of(folder) > 0)
        before = beat_of(folder)
        torch.linalg.matrix_power(matrix, 20)  # one call into C++
        during = beat_of(folder) - before

    assert during > 5


def test_after_its_end_a_heartbeat_writes_nothing(folder: RunFolder):
    with Heartbeat(folder, every_s=0.001):
        until(lambda: beat_of(folder) > 3)
    other_owner = Owner.of(1)
    folder.write_owner(other_owner)

    assert folder.owner() == other_owner


def test_a_process_that_stood_still_and_lost_its_run_ends_when_it_moves_again(folder: RunFolder, beating):
    seen = beat_of(folder)
    until(lambda: beat_of(folder) > seen)  # the next one is due in 100 ms
    beating.send_signal(signal.SIGSTOP)
    until(lambda: Path(f"/proc/{beating.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    taken = Owner(machine=Machine(host="b", boot="b", processes="b"), pid=7, started=7)
    folder.write_owner(taken)

    beating.send_signal(signal.SIGCONT)

    assert (beating.wait(120), folder.owner()) == (EXIT_LOST, taken)


@pytest.mark.parametrize(
    "change",
    [
        "folder.move(RunState.RUNNING)",
        "folder.update(step=7)",
        "folder.append_row(MetricsRow(step=7, data={}))",
        "folder.rewind(None)",
    ],
)
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_process_that_lost_its_run_ends_before_it_changes_anything(folder: RunFolder, change: str, is_lost: bool):
    folder.append_row(MetricsRow(step=1, data={}))
    before = folder.info(), folder.rows()
    command = [sys.executable, "-c", WRITING, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if is_lost:
            folder.disown()
        process.stdin.write(change.encode() + b"\n")
        process.stdin.close()
        status = process.wait(60)

    changed = (folder.info(), folder.rows()) != before
    assert (status, changed) == ((EXIT_LOST, False) if is_lost else (0, True))


def test_a_file_server_that_stands_still_is_no_silence_of_the_process(folder: RunFolder):
    clock = Clock()

    class SlowFolder(RunFolder):
        def owner(self) -> Owner | None:
            clock.now += 2 * DEAD_AFTER_S
            return super().owner()

    elsewhere = LivenessMonitor(ELSEWHERE, clock)
    first = elsewhere.alive(folder)

    assert (first, elsewhere.alive(SlowFolder(folder.path))) == (True, True)


def test_one_service_at_a_time_decides_over_an_outputs_folder(tmp_path: Path):
    ours, theirs = OutputsLock(tmp_path), OutputsLock(tmp_path)
    with ours.held():
        expected = pytest.raises(TrackwayError, match="another trainer service is starting a run")
        with ours.held(), expected as caught, theirs.held():
            pass
    with theirs.held():
        pass

    assert caught.value.code is ErrorCode.CONFLICT
