"""The W&B run for real, offline: what its own file holds is read back."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trackway.run_config import RunConfig, compose
from trackway.trainer.delivery import QueuedSink, open_tracking
from trackway.trainer.delivery.opening import WandbRun
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.service import OwnCode
from trackway.wire.trainer import MetricsRow

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

pytestmark = pytest.mark.slow

BLOCK, HEADER = 32768, struct.Struct("<IHB")
ROWS = [
    MetricsRow(step=0, data={"val-core/openai/gsm8k/acc/mean@1": 0.25}),
    MetricsRow(step=5, data={"critic/score/mean": 0.5, "timing_s/gen": 1.5, "actor/lr": 1e-6}),
    MetricsRow(step=6, data={"critic/score/mean": 0.75}),
]
OWN = ("_step", "_runtime", "_timestamp")


def config(*overrides: str) -> RunConfig:
    names = ["trainer.project_name=gsm8k_async_rl", "trainer.experiment_name=qwen2.5-3b_function_rm"]
    return compose(["trainer.logger=[console,wandb]", *names, "actor_rollout_ref.rollout.n=16", *overrides])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    folder = RunFolder(tmp_path / "run")
    folder.create(config(), ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="/w"))
    yield folder
    end_of_process()


def end_of_process() -> None:
    """Ends wandb's own process, as the end of a run's process does; the next run reads the environment again."""
    import wandb  # a second of CPU that collection saves

    wandb.teardown()


def records(file: Path) -> Iterator["Record"]:
    """The records of a `.wandb` file: LevelDB's log format behind a header of 7 bytes, one protobuf message each."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, place, parts = file.read_bytes(), HEADER.size, b""
    while place < len(data):
        if BLOCK - place % BLOCK < HEADER.size:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, place)
        place += HEADER.size
        parts += data[place : place + length]
        place += length
        if kind in (1, 4):  # the whole of a record, or the last part of one
            record, parts = Record(), b"".join([parts])
            record.ParseFromString(parts)
            parts = b""
            yield record


def stored(folder: RunFolder) -> list["Record"]:
    """Of the newest file, which is whole when W&B's service has ended, as it does with a process."""
    end_of_process()
    [*_, newest] = sorted((folder.path / "wandb").glob("offline-run-*/*.wandb"))
    return list(records(newest))


def history(folder: RunFolder) -> list[tuple[int, dict[str, float]]]:
    found = []
    for record in stored(folder):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append((items["_step"], {key: value for key, value in items.items() if key not in OWN}))
    return found


def of_kind(folder: RunFolder, kind: str) -> "Record":
    return next(record for record in stored(folder) if record.WhichOneof("record_type") == kind)


def test_without_a_key_every_row_is_kept_in_the_runs_folder_under_its_exact_names(folder: RunFolder):
    folder.update(code={"tools": OwnCode(digest="b1", commit="c0ffee", modules=["my_agent"])})
    tracking = open_tracking(folder, config(), None)
    [sink] = tracking.backends
    for row in ROWS:
        sink.log(row)
    tracking.close("FINISHED", 60.0)

    run = of_kind(folder, "run").run
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert history(folder) == [(row.step, row.data) for row in ROWS]
    assert (run.project, run.display_name) == ("gsm8k_async_rl", "qwen2.5-3b_function_rm")
    assert run.run_id == folder.info().uid
    assert settings["actor_rollout_ref"]["rollout"]["n"] == 16
    assert settings["own_code"] == {"tools": {"digest": "b1", "commit": "c0ffee", "modules": ["my_agent"], "files": []}}
    assert settings["trainer"]["logger"] == ["console", "wandb"]
    assert of_kind(folder, "exit").exit.exit_code == 0


def test_metrics_that_are_not_finite_are_kept_beside_the_others(folder: RunFolder):
    tracking = open_tracking(folder, config(), None)
    tracking.backends[0].log(MetricsRow(step=1, data={"actor/grad_norm": math.nan, "score": math.inf, "actor/lr": 1.0}))
    tracking.close("FINISHED", 60.0)

    [(step, kept)] = history(folder)
    assert (step, str(kept["actor/grad_norm"]).lower(), str(kept["score"])) == (1, "nan", "inf")
    assert kept["actor/lr"] == 1.0


def test_a_resumed_run_goes_on_under_its_id_and_lacks_nothing_that_a_killed_process_left_unsent(folder: RunFolder):
    first = open_tracking(folder, config(), None)
    first.backends[0].log(ROWS[0])
    first.close("KILLED", 60.0)
    end_of_process()

    again = open_tracking(folder, config(), None)
    again.catch_up(ROWS[:2])
    again.backends[0].log(ROWS[2])
    again.close("FAILED", 60.0)

    runs = [path.name.split("-")[3] for path in (folder.path / "wandb").glob("offline-run-*")]  # offline-run-TIME-ID
    assert runs == [folder.info().uid] * 2
    assert history(folder) == [(row.step, row.data) for row in ROWS]
    assert of_kind(folder, "exit").exit.exit_code == 1


def test_the_run_may_be_one_that_is_named(folder: RunFolder):
    run = WandbRun(folder, config("trackway.wandb_run_id=mine"))

    run.open()
    run.finish("FINISHED")

    assert of_kind(folder, "run").run.run_id == "mine"


@pytest.mark.extended
def test_a_server_that_does_not_answer_leaves_the_metrics_in_the_runs_folder(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("trackway.trainer.delivery.opening.INIT_TIMEOUT_S", 1.0)
    sink = QueuedSink("wandb", WandbRun(folder, config()))
    sink.log(ROWS[1])
    sink.close("FINISHED", 120.0)

    assert history(folder) == [(5, ROWS[1].data)]
    assert "; its metrics stay in the run's folder" in caplog.text


def test_a_disabled_run_writes_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracking = open_tracking(folder, config(), None)
    tracking.backends[0].log(ROWS[0])
    tracking.close("FINISHED", 60.0)

    assert not (folder.path / "wandb").exists()
