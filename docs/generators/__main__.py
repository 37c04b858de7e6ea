"""`python -m generators`: write the Reference pages into docs/reference, in place of what is there."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from generators.cli import command_line
from generators.config_keys import configuration_keys
from generators.errors import error_codes
from generators.http_api import http_api
from generators.metrics import metrics_page
from generators.python_api import PACKAGES, overview, python_api
from generators.settings import settings_page
from generators.wire import wire_page

PAGES: dict[str, Callable[[], str]] = {
    "cli": command_line,
    "settings": settings_page,
    "configuration": configuration_keys,
    "errors": error_codes,
    "metrics": metrics_page,
    "http-api": http_api,
    "wire": wire_page,
    "python-api": overview,
    **{name: partial(python_api, package, title) for name, (title, package) in PACKAGES.items()},
}


def write(folder: Path) -> None:
    """Write every page into the folder, in place of what it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in PAGES.items():
        (folder / f"{name}.md").write_text(text())


if __name__ == "__main__":
    write(Path(__file__).parents[1] / "reference")
