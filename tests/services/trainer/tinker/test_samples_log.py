"""Samples that were acknowledged are found again after a kill of the service."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import until
from trackway.trainer.tinker.samples_log import SampleLog, SampleRecord
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tinker import (
    EncodedText,
    ModelInput,
    SampleParams,
    SampleRequest,
)


def record(seq_id: int, seed: int = 3, tokens: tuple[int, ...] = (1, 2)) -> SampleRecord:
    request = SampleRequest(
        prompt=ModelInput(chunks=[EncodedText(tokens=[*tokens])]),
        sampling_params=SampleParams(max_tokens=4, temperature=0.5),
        sampling_session_id="s:sample:0",
        seq_id=seq_id,
        num_samples=2,
    )
    return SampleRecord(id=f"s:sample:0:{seq_id}", request=request, seed=seed, traceparent="00-1-2-01")


def test_a_sample_is_found_with_its_seed_by_another_process(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    for seq_id in (0, 1):
        log.append(record(seq_id))
    found = SampleLog(tmp_path).find("s:sample:0:1")
    assert found.model_dump() == record(1).model_dump()
    assert found.sequence_ids == ["s:sample:0:1:0", "s:sample:0:1:1"]


def test_a_repeated_request_keeps_the_first_seed_and_another_is_refused(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    log.append(record(0, seed=3))
    assert log.append(record(0, seed=4)).seed == SampleLog(tmp_path).append(record(0, seed=5)).seed == 3
    with pytest.raises(TrackwayError, match="expected a repeated sample s:sample:0:0 with its first content"):
        log.append(record(0, tokens=(1, 3)))


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_that_is_not_whole_is_cut_off(tmp_path: Path, cut: int) -> None:
    SampleLog(tmp_path).append(record(0))
    whole = (tmp_path / "samples.log").read_bytes()
    SampleLog(tmp_path).append(record(1))
    (tmp_path / "samples.log").write_bytes((tmp_path / "samples.log").read_bytes()[:-cut])
    log = SampleLog(tmp_path)
    with pytest.raises(TrackwayError) as missing:
        log.find("s:sample:0:1")
    assert (missing.value.code, (tmp_path / "samples.log").read_bytes()) == (ErrorCode.GONE, whole)
    assert log.append(record(1, seed=9)).seed == SampleLog(tmp_path).find("s:sample:0:1").seed == 9


def test_the_oldest_samples_are_forgotten(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, max_file_bytes=len(record(0).model_dump_json(exclude_defaults=True)))
    for seq_id in range(6):
        log.append(record(seq_id))
    reopened = SampleLog(tmp_path)
    for opened in (log, reopened):
        assert [opened.find(f"s:sample:0:{seq_id}").seed for seq_id in (4, 5)] == [3, 3]
        with pytest.raises(TrackwayError, match="expected a sample that was acknowledged lately, got s:sample:0:1"):
            opened.find("s:sample:0:1")
    assert {path.name for path in tmp_path.iterdir()} == {"samples.log", "samples.old.log"}
    reopened.remove()
    assert not any(tmp_path.iterdir())


def test_samples_of_one_moment_share_an_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, fsync, first, synced = SampleLog(tmp_path), os.fsync, threading.Event(), list[int]()

    def counted(file: int) -> None:
        fsync(file)
        synced.append(os.fstat(file).st_size)
        if not first.is_set():
            first.set()
            until(lambda: (tmp_path / "samples.log").read_bytes().count(b"\n") == 9)

    monkeypatch.setattr(os, "fsync", counted)
    with ThreadPoolExecutor(9) as pool:
        pool.submit(log.append, record(0))
        assert first.wait(60)
        appended = [pool.submit(log.append, record(seq_id)) for seq_id in range(1, 9)]
    assert [future.result().id for future in appended] == [f"s:sample:0:{seq_id}" for seq_id in range(1, 9)]
    assert len(synced) == 2 and synced[1] == (tmp_path / "samples.log").stat().st_size
