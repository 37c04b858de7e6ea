"""The log of requests: each once and in order, cut where a killed service stopped, never with other content."""

import os
from pathlib import Path

import pytest
from pydantic import JsonValue

from trackway.trainer.calls.log import RequestLog, TrainingCall
from trackway.wire.errors import ErrorCode, TrackwayError

BODY = bytes(range(256)) * 3


def call(seq_id: int, **arguments: JsonValue) -> TrainingCall:
    return TrainingCall(
        id=f"s:train:0:{seq_id}", model_id="s:train:0", seq_id=seq_id, op="optim_step", arguments=arguments
    )


def logged(folder: Path, after: int = 0) -> list[tuple[TrainingCall, bytes]]:
    return [(call, body) for _, call, body in RequestLog(folder).read(after)]


def test_requests_are_read_as_they_were_appended_and_from_any_record_on(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "calls")
    assert [log.append(call(1), BODY), log.append(call(2, learning_rate=1e-4)), log.append(call(3), b"")] == [True] * 3

    ends = [end for end, *_ in log.read()]
    assert logged(tmp_path / "calls") == [(call(1), BODY), (call(2, learning_rate=1e-4), b""), (call(3), b"")]
    assert logged(tmp_path / "calls", ends[0]) == [(call(2, learning_rate=1e-4), b""), (call(3), b"")]
    assert logged(tmp_path / "calls", ends[2]) == []


def test_the_log_is_empty_before_the_first_request(tmp_path: Path) -> None:
    assert logged(tmp_path) == []


def test_a_repeated_request_is_kept_once_also_after_a_restart(tmp_path: Path) -> None:
    assert RequestLog(tmp_path).append(call(1), BODY)
    again = RequestLog(tmp_path)
    assert [again.append(call(1), BODY), again.append(call(1), BODY), again.append(call(2))] == [False, False, True]
    assert logged(tmp_path) == [(call(1), BODY), (call(2), b"")]


@pytest.mark.parametrize(("other", "body"), [(call(1), BODY + b"!"), (call(1, learning_rate=1.0), BODY)])
def test_another_request_of_the_same_id_is_refused(tmp_path: Path, other: TrainingCall, body: bytes) -> None:
    RequestLog(tmp_path).append(call(1), BODY)
    with pytest.raises(TrackwayError, match="expected a repeated request s:train:0:1 with its first content") as raised:
        RequestLog(tmp_path).append(other, body)
    assert raised.value.code is ErrorCode.CONFLICT
    assert logged(tmp_path) == [(call(1), BODY)]


def test_a_record_that_a_killed_service_left_at_any_byte_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "requests.log"
    RequestLog(tmp_path).append(call(1), BODY)
    whole = file.stat().st_size
    RequestLog(tmp_path).append(call(2), BODY)
    content = file.read_bytes()
    for size in range(whole, len(content)):
        file.write_bytes(content[:size])
        assert logged(tmp_path) == [(call(1), BODY)], size
    assert RequestLog(tmp_path).append(call(2), BODY)
    assert file.read_bytes() == content


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\0" * 7, b"\xff" * 100])
def test_a_tail_that_is_no_record_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    file = tmp_path / "requests.log"
    RequestLog(tmp_path).append(call(1), BODY)
    with file.open("ab") as end:
        end.write(tail)
    assert logged(tmp_path) == [(call(1), BODY)]
    RequestLog(tmp_path).append(call(2))
    assert logged(tmp_path) == [(call(1), BODY), (call(2), b"")]


def test_a_damaged_last_record_is_cut_off_and_one_before_others_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "requests.log"
    RequestLog(tmp_path).append(call(1), BODY)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert logged(tmp_path) == []

    content[-1] ^= 1
    file.write_bytes(content)
    RequestLog(tmp_path).append(call(2))
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    for use in (lambda: logged(tmp_path), lambda: RequestLog(tmp_path).append(call(3))):
        with pytest.raises(TrackwayError, match="expected a whole request at byte 8") as raised:
            use()
        assert raised.value.code is ErrorCode.CHECKPOINT_CORRUPT
    assert file.read_bytes() == content


def test_a_failed_write_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RequestLog(tmp_path)
    log.append(call(1), BODY)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(TrackwayError, match="to write a request") as raised:
        patched.setattr(os, "fsync", full)
        log.append(call(2), BODY)
    assert raised.value.code is ErrorCode.DISK_FULL
    assert logged(tmp_path) == [(call(1), BODY)]
    assert log.append(call(2), BODY)


def test_a_reader_of_a_compacted_log_gets_what_is_left_and_then_what_is_new(tmp_path: Path) -> None:
    log, size = RequestLog(tmp_path), []
    for seq_id in range(1, 5):
        log.append(call(seq_id), BODY)
    ends = [end for end, *_ in log.read()]
    for needed in ({3, 4}, {4}):
        size.append(log.size)
        log.compact(lambda call, needed=needed: call.seq_id in needed)
    log.append(call(5), BODY)

    read = [*log.read(ends[3])]
    assert [request.seq_id for _, request, _ in read] == [4, 5] and {body for *_, body in read} == {BODY}
    assert logged(tmp_path, read[0][0]) == [(call(5), BODY)] and read[0][0] > ends[3]
    assert log.size == 8 + 2 * (ends[1] - ends[0]) and size[0] > size[1]
    assert [RequestLog(tmp_path).append(call(seq_id), BODY) for seq_id in (4, 5, 3)] == [False, False, True]


def test_a_request_that_is_repeated_in_another_trace_is_the_same(tmp_path: Path) -> None:
    traced = call(1).model_copy(update={"traceparent": "00-1-2-01", "links": {"q:0": "00-3-4-01"}})
    assert [RequestLog(tmp_path).append(request, BODY) for request in (call(1), traced)] == [True, False]
    RequestLog(tmp_path / "other").append(traced)
    assert logged(tmp_path / "other") == [(traced, b"")]


@pytest.mark.parametrize("size", range(9))
def test_a_log_whose_service_died_before_its_first_request_is_empty(tmp_path: Path, size: int) -> None:
    (tmp_path / "requests.log").write_bytes(bytes(size))
    assert logged(tmp_path) == []
    RequestLog(tmp_path).append(call(1), BODY)
    assert logged(tmp_path) == [(call(1), BODY)]


def test_a_log_beyond_its_bound_is_refused(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, max_bytes=1000)
    log.append(call(1), BODY)
    with pytest.raises(TrackwayError, match="expected a log of requests of at most 1000 bytes, got 17") as raised:
        log.append(call(2), BODY)
    assert raised.value.code is ErrorCode.PAYLOAD_TOO_LARGE
    assert logged(tmp_path) == [(call(1), BODY)]
