"""A log has one line for each message, whatever the message quotes."""

import io
import logging
from collections.abc import Iterator

import pytest

from trackway.system import escape_log_records


class Described(Exception):
    def __str__(self) -> str:
        return "bad\n2026-01-01 INFO forged\x1b[0m"


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    before = logging.getLogRecordFactory()
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.Logger("anyone's")
    logger.addHandler(handler)
    escape_log_records()
    yield logger, written
    logging.setLogRecordFactory(before)


def test_text_from_outside_stays_in_its_line(log) -> None:
    logger, written = log
    logger.warning("session %s of %r: %s", "a\nINFO forged\x1b[2J", "b\nc", Described())

    expected = "session a\\nINFO forged\\x1b[2J of 'b\\nc': bad\\n2026-01-01 INFO forged\\x1b[0m"
    assert written.getvalue() == f"WARNING {expected}\n"


def test_every_line_of_a_traceback_is_indented_and_escaped(log) -> None:
    logger, written = log
    try:
        raise Described
    except Described:
        logger.exception("failed")

    first, *lines = written.getvalue().splitlines()
    assert first == "ERROR failed"
    assert lines[0] == "  Traceback (most recent call last):"
    assert lines[-1] == "  2026-01-01 INFO forged\\x1b[0m"
    assert all(line.startswith("  ") for line in lines)


def test_another_librarys_records_keep_what_it_gave_them(log) -> None:
    logger, written = log
    ours = logging.getLogRecordFactory()

    def stamped(*args: object, **kwargs: object) -> logging.LogRecord:
        record = ours(*args, **kwargs)
        record.stamp = 7
        return record

    logging.setLogRecordFactory(stamped)
    escape_log_records()
    logger.handlers[0].setFormatter(logging.Formatter("%(stamp)d %(message)s"))
    logger.info("not shown")
    logger.warning("a\nb")

    assert written.getvalue().endswith("7 a\\nb\n")


def test_escaping_twice_changes_nothing(log) -> None:
    factory = logging.getLogRecordFactory()
    escape_log_records()

    assert logging.getLogRecordFactory() is factory


def test_a_record_is_bounded(log) -> None:
    logger, written = log
    logger.warning("got %s; send less", "x" * 1_000_000)
    try:
        raise ValueError("y" * 1_000_000)
    except ValueError:
        logger.exception("failed")
    first, _, rest = written.getvalue().partition("\n")
    assert first.startswith("WARNING got xxx") and first.endswith("xxx; send less")
    assert len(first) < 17_000
    assert "Traceback" in rest and len(rest) < 17_000
