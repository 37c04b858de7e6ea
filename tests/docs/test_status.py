"""The status page fits a screen, and the commands and tests that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/status.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"][2:]


def test_the_table_fits_a_screen() -> None:
    assert len(ROWS) <= 25
    assert [cell for row in ROWS for cell in row if len(cell.split()) > 15] == []


def test_what_proves_a_part_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make\s([a-z-]+)`", PAGE)) - targets == set()
    assert [path for path in re.findall(r"`(tests/[\w/.]+)`", PAGE) if not (ROOT / path).exists()] == []
    assert [part for part, proven, _ in ROWS if not re.search(r"`(make|tests/)|\]\(", proven)] == []
