"""What waits on disk for a backend: few files, exact sums, and a folder that may be deleted."""

import errno
import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from trackway.system import StorageError
from trackway.tracing.export.otlp import Batch
from trackway.tracing.export.queues import JOINED_FROM, DiskQueue

MIB = 1024 * 1024


def batch(name: str, spans: int = 1, headers: dict[str, str] | None = None) -> Batch:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number in range(spans):
        scope.spans.add().name = f"{name}{number}"
    return Batch(headers or {"x-team": "rl"}, gzip.compress(request.SerializeToString()), spans)


def names(stored: Batch) -> list[str]:
    request = ExportTraceServiceRequest.FromString(gzip.decompress(stored.payload))
    return [span.name for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def drained(spool: DiskQueue) -> list[str]:
    found: list[str] = []
    while (oldest := spool.oldest()) is not None:
        path, stored = oldest
        assert len(names(stored)) == stored.spans
        found += names(stored)
        spool.remove(path)
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.otlp"))


def test_a_short_outage_joins_nothing(spool: DiskQueue, tmp_path: Path) -> None:
    for number in range(JOINED_FROM):
        spool.push(batch(f"{number}-"))

    assert len(files(tmp_path)) == JOINED_FROM


@pytest.fixture
def spool(tmp_path: Path):
    spool = DiskQueue(tmp_path, "agent", 64 * MIB)
    yield spool
    spool.close()


def test_small_batches_become_few_files_that_lose_no_span_and_keep_their_order(
    spool: DiskQueue, tmp_path: Path
) -> None:
    for number in range(JOINED_FROM + 249):
        assert spool.push(batch(f"{number}-"))

    assert len(files(tmp_path)) == JOINED_FROM + 2  # the last three have 100, 100 and 50 spans
    assert spool.spans == JOINED_FROM + 249
    assert spool.bytes == sum(path.stat().st_size for path in files(tmp_path))
    assert drained(spool) == [f"{number}-0" for number in range(JOINED_FROM + 249)]
    assert (spool.spans, spool.bytes, files(tmp_path)) == (0, 0, [])


def test_batches_for_two_addresses_are_never_joined(spool: DiskQueue, tmp_path: Path) -> None:
    for project in "ab" * JOINED_FROM:
        spool.push(batch(project, headers={"project_id": project}))

    assert len(files(tmp_path)) == 2 * JOINED_FROM
    assert drained(spool) == ["a0", "b0"] * JOINED_FROM


def test_a_batch_that_is_being_sent_is_not_joined_by_a_later_one(spool: DiskQueue, monkeypatch) -> None:
    monkeypatch.setattr("trackway.tracing.export.queues.JOINED_FROM", 0)
    spool.push(batch("first"))
    sending = spool.oldest()
    spool.push(batch("second"))

    assert sending is not None and names(sending[1]) == ["first0"]
    spool.remove(sending[0])
    assert drained(spool) == ["second0"]


def test_a_batch_that_was_put_off_comes_last(spool: DiskQueue) -> None:
    for name in ("a", "b"):
        spool.push(batch(name, headers={"project_id": name}))
    first = spool.oldest()
    assert first is not None
    spool.postpone(first[0])

    assert spool.spans == 2
    assert drained(spool) == ["b0", "a0"]


def test_what_joins_a_file_counts_against_the_bound(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("trackway.tracing.export.queues.JOINED_FROM", 0)
    size = len(batch("a", 90).to_bytes())
    spool = DiskQueue(tmp_path, "agent", size + 10)
    assert spool.push(batch("a", 90))
    assert not spool.push(batch("b", 10))

    assert (spool.spans, spool.bytes) == (90, size)
    assert len(drained(spool)) == 90
    spool.close()


@pytest.mark.parametrize("deleted", ["own", "backend", "whole"])
def test_a_deleted_folder_is_made_again_and_only_what_lay_in_it_is_lost(tmp_path: Path, deleted: str) -> None:
    backend = tmp_path / "spool" / "mlflow"
    spool = DiskQueue(backend, "agent", 64 * MIB)
    spool.push(batch("lost", 3))
    [own] = backend.iterdir()
    shutil.rmtree({"own": own, "backend": backend, "whole": tmp_path / "spool"}[deleted])

    assert spool.push(batch("kept", 2))

    assert (spool.spans, spool.broken_spans, spool.adopt()) == (2, 3, 0)
    assert drained(spool) == ["kept0", "kept1"]
    spool.push(batch("left", 4))
    spool.close()
    following = DiskQueue(backend, "agent", 64 * MIB)
    assert following.spans == 4
    assert len(drained(following)) == 4
    following.close()


def test_a_folder_that_is_gone_is_looked_into_without_harm(tmp_path: Path) -> None:
    spool = DiskQueue(tmp_path / "mlflow", "agent", 64 * MIB)
    spool.push(batch("lost", 3))
    shutil.rmtree(tmp_path / "mlflow")

    assert (spool.adopt(), spool.oldest()) == (0, None)
    assert (spool.spans, spool.bytes, spool.broken_spans) == (0, 0, 3)
    spool.close()


def test_a_full_disk_takes_no_batch_and_keeps_nothing_of_it_and_takes_the_next_once_there_is_room(
    small_disk: Path, fill: Callable[..., Path]
) -> None:
    spool = DiskQueue(small_disk / "mlflow", "agent", 64 * MIB)
    spool.push(batch("a"))
    filler = fill(small_disk)
    refused = spool.push(batch("b"))
    left = sorted(path.name for path in spool._folder.iterdir())
    filler.unlink()

    assert (refused, spool.push(batch("c")), left) == (False, True, ["00000001-1.otlp", "lock"])
    assert drained(spool) == ["a0", "c0"]
    spool.close()


def test_a_spool_on_a_read_only_disk_names_it(small_disk: Path, remount: Callable[[Path, str], None]) -> None:
    remount(small_disk, "ro")

    with pytest.raises(StorageError, match=r"expected to write traces that wait to .*'Read-only file system'"):
        DiskQueue(small_disk / "mlflow", "agent", 64 * MIB)


def test_a_disk_that_takes_no_change_stops_no_sending_and_what_another_process_left_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, gone = DiskQueue(tmp_path, "agent", 64 * MIB), DiskQueue(tmp_path, "reward", 64 * MIB)
    spool.push(batch("a"))
    gone.push(batch("b"))
    gone.close()

    def read_only(*given: object, **named: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", read_only)
        disk.setattr(Path, "unlink", read_only)
        adopted, sent = spool.adopt(), drained(spool)

    assert (adopted, sent, spool.spans) == (0, ["a0"], 0)
    assert (spool.adopt(), drained(spool)) == (1, ["b0"])
    spool.close()
