"""Who publishes when a run goes on while the last process's lock has not been let go yet."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pytest

from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.learner.learner import Learner
from trackway.system import StorageError
from trackway.trainer.loop import weight_publisher
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import WeightProof


def open_publisher(store: Path, run: str) -> Publisher:
    return Publisher(WeightStore(str(store)), cast(Learner, None), run, "0123456789abcdef", store / "export", 2)


def test_a_run_waits_for_its_own_last_process_to_let_go(tmp_path: Path) -> None:
    last = open_publisher(tmp_path, "mine")
    waiting = threading.Thread(target=lambda: open_publisher(tmp_path, "mine").close())
    waiting.start()
    waiting.join(0.1)
    waited = waiting.is_alive()

    last.close()
    waiting.join(30)

    assert (waited, waiting.is_alive()) == (True, False)


def test_each_version_says_what_its_run_wants_for_requests_in_flight(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    publisher = Publisher(store, cast(Learner, Exporter(8)), "run", "0123456789abcdef", tmp_path / "export", 2, "wait")
    publisher.publish()
    publisher.close()

    assert store.manifest(1).update_mode == "wait"


def test_a_run_waits_neither_for_another_run_nor_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_publisher, "CLAIM_WAIT_S", 0.0)
    holder = open_publisher(tmp_path, "mine")
    refused = []
    for run in ("other", "mine"):
        with pytest.raises(TrackwayError) as caught:
            open_publisher(tmp_path, run)
        refused.append(caught.value.code)
    holder.close()

    assert refused == [ErrorCode.CONFLICT] * 2


class Exporter:
    """A learner whose weights have a size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def export_to_engines(self, folder: Path) -> None:
        (folder / "weights").write_bytes(bytes(self.size))

    def proof(self, folder: Path, previous_version: int | None) -> WeightProof:
        return ANY_PROOF


@pytest.mark.parametrize("size", [2_000_000, 600_000], ids=["no room for the export", "none for its copy"])
def test_weights_without_room_name_the_disk_and_leave_nothing_of_their_version(small_disk: Path, size: int) -> None:
    learner = Exporter(1000)
    store = WeightStore(str(small_disk / "store"))
    publisher = Publisher(store, cast(Learner, learner), "run", "0123456789abcdef", small_disk / "export", 2)
    publisher.publish()
    learner.size = size

    with pytest.raises(StorageError, match=r"weights version 2 to .*'No space left on device'"):
        publisher.publish()
    left = sorted(path.name for path in small_disk.rglob("*"))
    learner.size = 1000

    assert left == ["1", "latest.json", "manifest.json", "publisher.lock", "store", "weights"]
    assert publisher.publish() == 2
    publisher.close()


class Stepping:
    """A learner whose weights are bfloat16, of which each export changes a few."""

    def __init__(self) -> None:
        self.exports = 0

    def export_to_engines(self, folder: Path) -> None:
        self.exports += 1
        (folder / "model.safetensors").write_bytes(b"xy" * self.exports + b"ab" * (5000 - self.exports))

    def proof(self, folder: Path, previous_version: int | None) -> WeightProof:
        return ANY_PROOF


def bases(store: WeightStore, versions: Iterable[int]) -> list[int | None]:
    """What each version is a delta of; None for whole ones."""
    deltas = [store.manifest(version).delta for version in versions]
    return [None if delta is None else delta.base for delta in deltas]


def test_one_of_so_many_versions_is_whole_and_the_others_are_deltas_of_the_one_before(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    for uid in ("0123456789abcdef", "resumed"):
        run = cast(Learner, Stepping())
        publisher = Publisher(store, run, "run", uid, tmp_path / "export", 9, anchor_every=3)
        for _ in range(4):
            publisher.publish()
        publisher.close()

    assert bases(store, range(1, 9)) == [None, 1, 2, None, None, 5, 6, None]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_after_a_version_of_another_run_comes_a_whole_one(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    publisher = Publisher(store, cast(Learner, Stepping()), "run", "0" * 16, tmp_path / "export", 9, anchor_every=9)
    for _ in range(2):
        publisher.publish()
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"cd" * 5000)
    store.publish(3, "other", other, ANY_PROOF)
    for _ in range(2):
        publisher.publish()
    publisher.close()

    assert bases(store, range(1, 6)) == [None, 1, None, None, 4]
