"""`trackway config explain`: what a key means."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackway.deploy.commands.options import Json
from trackway.deploy.terminal.console import print_json, stdout

if TYPE_CHECKING:
    from trackway.trainer.config import Explanation

app = typer.Typer(no_args_is_help=True, help="Look up the keys of a run's configuration.")


@app.callback()
def _config() -> None:
    """Typer would drop the name of an only command."""


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A key, a section such as actor_rollout_ref.rollout, or nothing.")] = "",
    config: Annotated[Path | None, typer.Option(help="YAML file, or a folder with --config-name in it.")] = None,
    config_name: Annotated[str, typer.Option(help="Also show what this preset or file says.")] = "default",
    as_json: Json = False,
) -> None:
    """Show a key's meaning and default, and whether verl has it.  Example: trackway config explain data.truncation"""
    from trackway.deploy.runs.report import table, wide
    from trackway.trainer.config import compose
    from trackway.trainer.config import explain as explanations
    from trackway.trainer.config.compose import leaves

    found = explanations(key)
    values = leaves(compose([], config, config_name).model_dump(mode="json"))
    rows = [_row(one, values.get(one.key), config_name) for one in found]
    if as_json:
        print_json([*rows])
    elif len(rows) == 1:
        wide(stdout).print(table("", ("", ""), [*rows[0].items()]), soft_wrap=True)
    else:
        wide(stdout).print(table("", [*rows[0]], [[*row.values()] for row in rows]))


def _row(one: "Explanation", value: object, config_name: str) -> dict[str, str]:
    from trackway.deploy.runs.report import shown

    default = shown(one.default) if one.honoured else ""
    told = {"key": one.key, "default": default, "meaning": one.meaning, "source": one.source}
    if one.honoured and shown(value) != default:
        told["source"] += f"; {shown(value)} in {config_name}"
    return told
