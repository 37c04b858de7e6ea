"""The page about Tinker's API lists the routes that there are, and its bounds."""

import re
from pathlib import Path

from trackway.trainer.app import create_app
from trackway.trainer.settings import TrainerSettings
from trackway.trainer.tinker import sessions
from trackway.trainer.tinker.sampling import MAX_DRAWS
from trackway.wire.tinker import MAX_SAMPLES

PAGE = (Path(__file__).parents[2] / "docs/guides/tinker.md").read_text()


def test_every_route_is_listed(tmp_path: Path) -> None:
    paths = create_app(TrainerSettings(outputs_dir=str(tmp_path))).openapi()["paths"]
    routes = {path.removeprefix("/api/v1/") for path in paths if path.startswith("/api/v1/")}
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert {*re.findall(r"`([^`]+)`", " ".join(rows))} == routes


def test_the_bounds_are_those_of_the_code() -> None:
    settings = TrainerSettings()
    for text in (
        f"`tinker_idle_s` ({settings.tinker_idle_s:g}) seconds",
        f"`tinker_max_sessions` ({settings.tinker_max_sessions}) are open, with {sessions.MAX_MODELS} models each",
        f"at most {MAX_SAMPLES} sequences",
        f"At most {MAX_DRAWS} requests are drawn at once",
        f"once it reaches {sessions.COMPACT_BYTES // 2**20} MiB",
        f"but the newest {sessions.KEPT_RESULTS} are kept",
        f"never fetched, the newest {sessions.MAX_RESULTS:,} are kept",
        f"unnamed weights, the newest {sessions.KEPT_SNAPSHOTS} are kept",
    ):
        assert text in " ".join(PAGE.split())
