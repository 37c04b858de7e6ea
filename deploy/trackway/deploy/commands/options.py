"""Options shared by several commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trackway.deploy.local.settings import UpSettings

Outputs = Annotated[Path, typer.Option(help="Folder of runs, weights and logs.", envvar="TRACKWAY_UP_OUTPUTS")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the plan and start nothing; exit status 2 if a value is invalid or a path leads nowhere.",
    ),
]
Preflight = Annotated[
    bool,
    typer.Option(
        "--preflight",
        help="Load the model's tokenizer, data and tools, start no service, report problems; exit status 2 if any.",
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep services and MLflow running afterwards.")]
ConfigName = Annotated[
    str,
    typer.Option(
        "--config-name",
        "-cn",
        help="Preset: default, grpo, dr_grpo, ppo, rloo, reinforce_plus_plus, gspo, dapo, sft, tiny_demo; verl's: "
        "ppo_trainer, one_step_off_ppo_trainer, fully_async_ppo_trainer.",
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, as `trackway runs list` shows it.")]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for attached services to become reachable.")]
OUTPUTS = Path("outputs")
DEMO_MEMORY_GB = 4.0


def json_of(document: str) -> Any:
    """The option `--json`. `document` says what is printed."""
    return typer.Option(
        "--json", help=f"Print one JSON document and nothing else: {document}. An error is a document as well."
    )


def up_settings(**options: Any) -> "UpSettings":
    """Settings from the options that are not None. The others keep their defaults."""
    from trackway.deploy.local.settings import UpSettings

    return UpSettings.read(**{name: value for name, value in options.items() if value is not None})
