"""`trackway tools list | call`: list and call tools from the command line."""

import json
from typing import Annotated, Any

import typer
from rich.markup import escape

from trackway.clients import ToolsClient, run
from trackway.deploy.commands.options import OUTPUTS, Outputs, json_of
from trackway.deploy.deployment.running import load_running
from trackway.deploy.terminal.console import print_json, stdout
from trackway.system.user_error import UserError
from trackway.wire.tools import OneShotRequest

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def tools_list(
    outputs: Outputs = OUTPUTS, as_json: Annotated[bool, json_of("the schemas of the tools")] = False
) -> None:
    """List the tools.  Example: trackway tools list"""
    tools = run(ToolsClient(load_running(outputs).url("tools")).list())
    if as_json:
        print_json([tool.model_dump(mode="json") for tool in tools])
        return
    for tool in tools:
        parameters = ", ".join(dict(tool.function.parameters.get("properties") or {}))  # pyright: ignore
        stdout.print(f"{tool.function.name}({parameters})  {escape(tool.function.description)}", soft_wrap=True)


@app.command("call")
def tools_call(
    name: Annotated[str, typer.Argument(help="Name of the tool, as shown by `trackway tools list`.")],
    arguments: Annotated[str, typer.Argument(help="Arguments as JSON.")],
    create_kwargs: Annotated[str, typer.Option(help="Arguments that create the tool's state, as JSON.")] = "{}",
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the result of the call")] = False,
) -> None:
    """Call a tool once.  Example: trackway tools call calculator '{"expression": "12*7"}'"""
    request = OneShotRequest(
        arguments=_json("ARGUMENTS", arguments), create_kwargs=_json("--create-kwargs", create_kwargs)
    )
    result = run(ToolsClient(load_running(outputs).url("tools")).one_shot(name, request))
    print_json(result) if as_json else stdout.print(escape(result.text), soft_wrap=True)


def _json(what: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{what}: expected JSON, got {text!r} ({error}); quote it, e.g. '{{\"a\": 1}}'") from error
    if not isinstance(value, dict):
        raise UserError(f"{what}: expected a JSON object, got {text!r}; write e.g. '{{\"a\": 1}}'")
    return value
