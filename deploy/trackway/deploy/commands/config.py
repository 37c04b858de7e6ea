"""`trackway config explain`: look up configuration keys."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackway.deploy.commands.options import json_of
from trackway.deploy.terminal.progress import print_json, stdout

if TYPE_CHECKING:
    from trackway.run_config import Explanation

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _config() -> None:
    """Keep `explain` as a sub-command: Typer drops the name of a sole command."""


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A key or a section such as actor_rollout_ref.rollout; default all.")] = "",
    config: Annotated[Path | None, typer.Option(help="YAML file, or the folder that has --config-name.")] = None,
    config_name: Annotated[str, typer.Option(help="Preset or file whose values are shown too.")] = "default",
    as_json: Annotated[bool, json_of("the keys with their defaults and meanings")] = False,
) -> None:
    """Show a key's meaning, default and origin in verl.  Example: trackway config explain data.truncation"""
    from trackway.deploy.terminal.tables import table, wide
    from trackway.run_config import compose
    from trackway.run_config import explain as explanations
    from trackway.run_config.compose import leaves

    explained = explanations(key)
    values = leaves(compose([], config, config_name).model_dump(mode="json"))
    rows = [_row(explanation, values.get(explanation.key), config_name) for explanation in explained]
    if as_json:
        print_json([*rows])
    elif len(rows) == 1:
        wide(stdout).print(table("", ("", ""), [*rows[0].items()]), soft_wrap=True)
    else:
        wide(stdout).print(table("", [*rows[0]], [[*row.values()] for row in rows]))


def _row(explanation: "Explanation", value: object, config_name: str) -> dict[str, str]:
    from trackway.deploy.runs.report import shown

    default = shown(explanation.default) if explanation.honoured else ""
    row = {"key": explanation.key, "default": default, "meaning": explanation.meaning, "source": explanation.source}
    if explanation.honoured and shown(value) != default:
        row["source"] += f"; {shown(value)} in {config_name}"
    return row
