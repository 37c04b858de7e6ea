"""Results of requests on disk: whole, by an id that never becomes a path."""

from pathlib import Path

import pytest

from trackway.trainer.calls.results import Result, Results
from trackway.wire.errors import ErrorCode, TrackwayError


@pytest.mark.parametrize(
    "result", [Result("json", b'{"a": 1}'), Result("protobuf", b"\n\x00json\n\xff"), Result.of_error("no", "user")]
)
def test_a_result_is_read_as_it_was_written(tmp_path: Path, result: Result) -> None:
    results = Results(tmp_path / "calls")
    assert results.read("s:train:0:1") is None
    results.write("s:train:0:1", result)
    assert results.read("s:train:0:1") == result
    assert Results(tmp_path / "calls").read("s:train:0:2") is None


def test_an_error_names_its_message_and_category() -> None:
    assert Result.of_error("expected a, got b", "server") == (
        "error",
        b'{"error": "expected a, got b", "category": "server"}',
    )


def test_an_id_never_leaves_the_folder(tmp_path: Path) -> None:
    Results(tmp_path / "calls").write("../../etc/x\0:1", Result("json", b"{}"))
    [file] = (tmp_path / "calls" / "results").iterdir()
    assert (len(file.name), [path.name for path in tmp_path.iterdir()]) == (34, ["calls"])


@pytest.mark.parametrize("content", [b"", b"json", b"other\n{}"])
def test_a_damaged_result_is_an_error(tmp_path: Path, content: bytes) -> None:
    results = Results(tmp_path)
    results.write("m:1", Result("json", b"{}"))
    [file] = (tmp_path / "results").iterdir()
    file.write_bytes(content)
    with pytest.raises(TrackwayError, match="expected the result of request m:1") as raised:
        results.read("m:1")
    assert raised.value.code is ErrorCode.CHECKPOINT_CORRUPT


def test_the_results_of_a_model_are_listed_in_order_and_removed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for id in ("m:10", "m:2", "m:0", "n:5"):
        results.write(id, Result("json", b"{}"))
    results.remove("m:2")
    results.remove("m:2")
    assert (results.seq_ids("m"), results.seq_ids("n"), results.seq_ids("o")) == ([0, 10], [5], [])
