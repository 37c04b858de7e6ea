"""An error is of a size that any answer, log line and span can carry."""

import pytest
from pydantic import JsonValue

from trackway.wire.errors import ERRORS, ErrorCode, ModelSees, TrackwayError, shortened


@pytest.mark.parametrize("size", [0, 4095, 4096])
def test_a_message_within_the_limit_is_kept(size: int) -> None:
    assert TrackwayError(ErrorCode.INTERNAL, "x" * size).message == "x" * size


def test_a_longer_message_keeps_its_start_and_its_remedy() -> None:
    error = TrackwayError(ErrorCode.INTERNAL, f"expected a, got {'x' * 100_000}; send b")
    assert len(error.message) <= 4096
    assert error.message.startswith("expected a, got xxx")
    assert error.message.endswith("xxx; send b")
    assert f"[...{100_000 + len('expected a, got ; send b') - 4056} characters...]" in error.message
    assert str(error) == error.message == TrackwayError.from_reply(error.to_reply()).message


def test_what_was_cut_out_is_counted() -> None:
    assert shortened("a" * 50 + "b" * 50, 64) == "a" * 18 + "[...76 characters...]" + "b" * 6


@pytest.mark.parametrize(
    ("detail", "kept"),
    [
        ({"seconds": 1.5, "param": "n", "known": ["a", "b"]}, {"seconds": 1.5, "param": "n", "known": ["a", "b"]}),
        ({"param": "é" * 257}, {"param": shortened("é" * 257, 256)}),
        ({"known": ["x" * 100] * 100, "tool": "t"}, {"tool": "t"}),
        ({"inner": {"x" * 10_000: 1}, "bound": 3}, {"bound": 3}),
    ],
)
def test_a_detail_is_bounded(detail: dict[str, JsonValue], kept: dict[str, JsonValue]) -> None:
    error = TrackwayError(ErrorCode.INTERNAL, "m", **detail)
    assert error.detail == kept


def test_the_largest_error_fits_64_kb() -> None:
    detail = {f"k{number}": "\x00" * 1000 for number in range(100)}
    error = TrackwayError(ErrorCode.INTERNAL, "\x00" * 1_000_000, **detail)
    assert len(error.to_reply().model_dump_json()) < 40_000


def test_the_model_sees_the_errors_of_its_calls_and_no_other_ones() -> None:
    codes = {how: {code.value for code, spec in ERRORS.items() if spec.model_sees is how} for how in ModelSees}

    assert codes[ModelSees.YES] == {"invalid_request", "payload_too_large", "tool_failed", "tool_timeout"}
    assert codes[ModelSees.WITHOUT_AGENT] == {"unknown_tool", "instance_not_found", "instance_lost"}
