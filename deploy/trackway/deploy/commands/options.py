"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from trackway.deploy.local.settings import UpSettings

Outputs = Annotated[Path, typer.Option(help="Folder of runs, weights and logs.", envvar="TRACKWAY_UP_OUTPUTS")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the plan and start nothing; status 2 when it could not run on any machine.",
    ),
]
Preflight = Annotated[
    bool,
    typer.Option(
        "--preflight",
        help="Load what training would load, start no service, and report every problem; status 2 when there is one.",
    ),
]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for attached services that do not answer yet.")]
OUTPUTS = Path("outputs")
DEMO_OUTPUTS = Path("outputs/demo")


def up_settings(**given: Any) -> UpSettings:
    """Settings from the options that were given; the others keep their defaults."""
    return UpSettings.read(**{name: value for name, value in given.items() if value is not None})
