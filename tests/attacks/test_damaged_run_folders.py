"""Whatever lies in a run's folder: the run is listed, says why and how to go on, and can go on."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from trackway.run_config import RunConfig
from trackway.trainer.app import create_app
from trackway.trainer.run_state.folder import Beat, Owner, RunFolder, this_machine
from trackway.trainer.run_state.heartbeat import Heartbeat, LivenessMonitor, exit_if_lost
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.settings import TrainerSettings
from trackway.trainer.supervisor.manager import RunManager
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow, RunInfo, RunState

SERVICES = ServiceUrls(agent_url="http://127.0.0.1:9", tools_url="http://127.0.0.1:9", weights_url="/nowhere")

DAMAGE = {
    "empty": b"",
    "garbage": b"\x00\xff\xfe garbage \x80",
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "nested": b"[" * 100_000,
    "no state": b'{"run": "damaged"}',
    "an unknown state": b'{"run": "damaged", "state": "hibernating"}',
    "text for a number": b'{"run": "damaged", "state": "running", "step": "third"}',
    "half": b'{"run": "damaged", "uid": "abc", "mlflow_uri": "http://mlflow", "run_id": "r1", "state": "runn',
}


def damaged(outputs: Path, content: bytes | None, name: str = "state.json") -> RunFolder:
    """A run that was stopped after a few steps, and then lost a file."""
    folder = RunFolder(outputs / "damaged")
    folder.create(RunConfig(), SERVICES)
    folder.move(RunState.RUNNING)
    folder.disown()
    folder.append_row(MetricsRow(step=1, data={"critic/score/mean": 0.5}))
    (folder.path / name).unlink()
    if content is not None:
        (folder.path / name).write_bytes(content)
    return RunFolder(folder.path)


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.fixture
async def runs(outputs: Path) -> AsyncIterator[RunManager]:
    runs = RunManager(outputs, SERVICES)
    yield runs
    await runs.close()


@pytest.mark.parametrize("content", [*DAMAGE.values(), None], ids=[*DAMAGE, "gone"])
def test_a_run_whose_state_cannot_be_read_is_listed_with_the_way_to_go_on(outputs: Path, content: bytes | None):
    folder = damaged(outputs, content)
    with TestClient(create_app(TrainerSettings(outputs_dir=str(outputs)))) as client:
        listed = client.get("/runs")
        reply = client.get("/runs/damaged")
        rows = client.get("/runs/damaged/metrics?follow=true")
        stopped = client.post("/runs/damaged/stop")
        metrics = client.get("/metrics")

    [info] = [RunInfo.model_validate(entry) for entry in listed.json()["runs"]]
    assert (info.run, info.state, info.folder) == ("damaged", RunState.UNREADABLE, str(folder.path))
    assert info.message.startswith(f"{folder.path}/state.json cannot be read (")
    assert "resume the run: it continues from its newest checkpoint" in info.message
    assert RunInfo.model_validate(reply.json()) == info
    assert json.loads(rows.text)["data"] == {"critic/score/mean": 0.5}
    assert (stopped.status_code, stopped.json()["error"]["code"]) == (409, "conflict")
    assert 'trackway_run_state{policy="",run="damaged",state="unreadable"} 1.0' in metrics.text
    assert metrics.status_code == 200


def test_what_can_be_read_of_a_damaged_state_is_kept_when_the_run_goes_on_and_the_file_too(outputs: Path):
    folder = damaged(outputs, DAMAGE["half"])

    before = folder.info()
    folder.move(RunState.STARTING)
    after = RunFolder(folder.path).info()

    assert (before.uid, before.mlflow_uri, before.run_id) == ("abc", "http://mlflow", "r1")
    assert (after.state, after.uid, after.run_id, after.message) == (RunState.STARTING, "abc", "r1", "")
    assert (folder.path / "state.json.unreadable").read_bytes() == DAMAGE["half"]


@pytest.mark.parametrize("content", DAMAGE.values(), ids=[*DAMAGE])
def test_the_process_of_a_run_writes_its_state_again_as_it_knows_it(outputs: Path, content: bytes):
    folder = damaged(outputs, b"{}")
    folder.move(RunState.STARTING)
    with Heartbeat(folder, every_s=3600):
        own = RunFolder(folder.path, exit_if_lost)
        own.move(RunState.RUNNING, restarts=2)
        (own.path / "state.json").write_bytes(content)
        own.update(step=3)

    info = RunFolder(folder.path).info()
    assert (info.state, info.step, info.restarts) == (RunState.RUNNING, 3, 2)


def test_a_process_that_never_could_read_its_state_starts(outputs: Path):
    folder = damaged(outputs, DAMAGE["half"])
    with Heartbeat(folder, every_s=3600):
        RunFolder(folder.path, exit_if_lost).move(RunState.RUNNING)

    assert (folder.info().state, folder.info().uid) == (RunState.RUNNING, "abc")


@pytest.mark.parametrize("content", DAMAGE.values(), ids=[*DAMAGE])
def test_a_damaged_owner_file_neither_ends_the_owner_nor_takes_it_for_dead(outputs: Path, content: bytes):
    folder = damaged(outputs, b"{}")
    with Heartbeat(folder, every_s=3600):
        own = RunFolder(folder.path, exit_if_lost)
        own.move(RunState.RUNNING)
        own.write_beat(Beat(owner=Owner.of(os.getpid()), count=1))
        (own.path / "worker.json").write_bytes(content)
        own.append_row(MetricsRow(step=2, data={}))
        seen = LivenessMonitor().alive(RunFolder(folder.path))

    assert seen
    assert [row.step for row in folder.rows()] == [1, 2]


@pytest.mark.parametrize("content", DAMAGE.values(), ids=[*DAMAGE])
def test_another_service_takes_the_owner_from_the_beat_when_its_file_is_damaged(outputs: Path, content: bytes):
    folder = damaged(outputs, b"{}")
    owner = Owner.of(1, this_machine().model_copy(update={"host": "another-pod"}))
    folder.write_beat(Beat(owner=owner, count=7))
    (folder.path / "worker.json").write_bytes(content)

    assert (RunFolder(folder.path).owner(), folder.beats(owner)) == (owner, 7)


@pytest.mark.parametrize("content", DAMAGE.values(), ids=[*DAMAGE])
def test_a_damaged_beat_is_none(outputs: Path, content: bytes):
    folder = damaged(outputs, b"{}")
    (folder.path / "heartbeat.json").write_bytes(content)

    assert folder.beats(Owner.of(1)) == 0
    assert folder.owner() is None


@pytest.mark.parametrize("name", ["config.json", "services.json"])
@pytest.mark.parametrize(
    "content", [*DAMAGE.values(), b'{"of_a_later_version": 1}', None], ids=[*DAMAGE, "newer", "gone"]
)
def test_a_configuration_that_cannot_be_read_is_named_with_the_way_to_go_on(
    outputs: Path, name: str, content: bytes | None
):
    folder = damaged(outputs, content, name)

    with pytest.raises(TrackwayError, match=f"expected {name} of run 'damaged' at ") as caught:
        folder.config() if name == "config.json" else folder.services()

    assert caught.value.code is ErrorCode.CONFLICT
    assert f"trainer.resume_from_path={folder.checkpoints}/global_step_<n>" in caught.value.message


@pytest.mark.anyio
async def test_a_run_without_a_readable_configuration_is_listed_and_its_resumption_refused_by_name(
    runs: RunManager, outputs: Path
):
    damaged(outputs, b"{", "config.json")

    listed = runs.registry.list()
    with pytest.raises(TrackwayError, match=r"expected config\.json of run 'damaged'"):
        await runs.resume("damaged")

    assert [(info.run, info.state) for info in listed] == [("damaged", RunState.FAILED)]


def test_rows_that_cannot_be_read_cost_no_other_row_and_are_kept_aside_when_the_file_is_rewound(outputs: Path):
    folder = damaged(outputs, b"{}")
    rubbish = b'null\n\xff\xfe\n{"step": 2, "data": {"x": "Infinity"}}\n{"step": 3, "data": {"x": nul'
    with folder.metrics_file.open("ab") as file:
        file.write(rubbish)
    whole = folder.metrics_file.read_bytes()

    before = [row.step for row in folder.rows()]
    folder.rewind(MetricsRow(step=2, data={}))

    assert before == [1, 2]
    assert [row.step for row in folder.rows()] == [1, 2]
    assert (folder.path / "metrics.jsonl.unreadable").read_bytes() == whole


def test_a_folder_that_was_copied_is_a_run_of_its_own_name(outputs: Path):
    folder = damaged(outputs, b'{"run": "another", "state": "stopped"}')

    assert folder.info().run == "damaged"


def test_a_name_whose_run_never_began_can_be_used(outputs: Path):
    """A crash between the first files and the state leaves nothing to go on with."""
    folder = damaged(outputs, None)
    folder.metrics_file.unlink()

    assert not folder.exists
    assert folder.create(RunConfig(), SERVICES).state is RunState.STARTING
