"""The pages for people who come from another library name keys that exist."""

import re
from pathlib import Path

import pytest

from trackway.run_config import RunConfig
from trackway.run_config.compose import known_keys

PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming-from").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_of_the_table_exists(page: Path):
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    words = re.findall(r"`([a-z_]+\.[a-z0-9_.]+)`", " ".join(rows))
    keys = [word for word in words if word.partition(".")[0] in RunConfig.model_fields]

    assert len(keys) > 5
    assert [key for key in keys if key not in known_keys() and not key.endswith(".val_only")] == []
