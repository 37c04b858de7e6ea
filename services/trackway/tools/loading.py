"""Loads the tools named in the settings: built-in ones, import paths, modules, files, MCP servers."""

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trackway.serving.user_code import FunctionServer, FunctionsOutage, failure_of, import_modules, importing
from trackway.tools.base import BaseTool, ToolConfig, ToolSource
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.builtin.python import PythonTool
from trackway.tools.builtin.search import SearchTool
from trackway.tools.core.server import ToolRegistry
from trackway.tools.functions import FunctionTool, functions_of_file, functions_of_modules, is_function_tool
from trackway.tools.mcp.connection import McpServer
from trackway.tools.mcp.source import McpSource
from trackway.tools.settings import ToolsSettings
from trackway.tools.verl import MCP_CLASSES, ToolEntry, named_tool, read_tool_config

BUILT_IN: dict[str, type[BaseTool]] = {
    "calculator": CalculatorTool,
    "calc_gsm8k_reward": Gsm8kTool,
    "python": PythonTool,
    "search": SearchTool,
}


class _Planned(NamedTuple):
    """A tool to build. Its config is looked up by its name."""

    origin: str
    make: Callable[[ToolConfig], BaseTool]
    name: str | None
    """None if only the built tool knows its name."""


def tools_of(settings: ToolsSettings) -> list[BaseTool | ToolSource]:
    """The tools that the settings name; imports their `modules`. Errors as in `load_tools`, and OwnCodeError."""
    import_modules(settings.modules, settings.code_path)
    served = _served(settings.functions_file) if settings.functions_file else []
    own_tools = bool(functions_of_modules(settings.modules) or _classes_of(settings.modules) or served)
    return served + load_tools(
        settings.built_in(own_tools),
        settings.extra_tools,
        settings.tool_config,
        settings.tool_config_path,
        settings.function_tool_path,
        settings.modules,
    )


def load_tools(
    names: Sequence[str],
    paths: Sequence[str],
    configs: Mapping[str, ToolConfig],
    tool_config_path: Path | None = None,
    function_tool_path: Path | None = None,
    modules: Sequence[str] = (),
) -> list[BaseTool | ToolSource]:
    """The tools of these names, import paths, files and imported modules; MCP servers as sources.

    `configs` has configs by tool name.

    ValueError for an unknown name, a wrong file, a config without a tool or two tools of one name. TypeError for a
    class or function that is not a tool. The message names the setting or file, and the entry.
    """
    planned = [
        *(_built_in(name) for name in names),
        *(_imported(path) for path in paths),
        *(_entries(tool_config_path) if tool_config_path else []),
        *(_functions(function_tool_path) if function_tool_path else []),
        *(_function(function, f"module {function.__module__}") for function in functions_of_modules(modules)),
    ]
    tools = [tool if isinstance(tool, ToolSource) else _build(tool, configs) for tool in planned]
    named = {type(tool) for tool in tools}
    tools += [
        _build(_Planned(f"module {tool.__module__}", tool.default, _name_of(tool)), configs)
        for tool in _classes_of(modules)
        if tool not in named
    ]
    registry = ToolRegistry(tool for tool in tools if isinstance(tool, BaseTool))
    unused = sorted(set(configs) - set(registry.names()))
    if unused:
        raise ValueError(
            f"expected tool_config for loaded tools only, got {unused}; loaded: {registry.names()} "
            "(an MCP server's tools take their config from its entry in tool_config_path)"
        )
    return tools


def _served(path: Path) -> list[BaseTool | ToolSource]:
    """The tools of the process that wrote the file."""
    server = FunctionServer.read(path)
    if not server.has_tools:
        return []
    servers = {server.process: McpServer(url=f"{server.url}/tools/mcp", auth_token=server.token)}
    config: ToolConfig = {"sessions": "shared", "connect_timeout_s": 10.0}
    return [McpSource(f"functions_file {path}", servers, config, outage=FunctionsOutage(server.process))]


def _build(planned: _Planned, configs: Mapping[str, ToolConfig]) -> BaseTool:
    try:
        tool = planned.make(configs.get(planned.name or "", {}))
    except BaseException as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{planned.origin}: {failure_of(error)}") from error
    tool.origin = planned.origin
    return tool


def _classes_of(modules: Sequence[str]) -> list[type[BaseTool]]:
    """The tools with a schema that imported modules, or modules below them, define."""
    within = tuple(f"{name}." for name in modules)
    classes = [
        value
        for module in [module for name, module in sys.modules.items() if f"{name}.".startswith(within)]
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseTool) and value.__module__ == module.__name__
    ]
    return [tool for tool in classes if tool.default_schema is not None and not inspect.isabstract(tool)]


def _built_in(name: str) -> _Planned:
    if name not in BUILT_IN:
        raise ValueError(f"expected built-in tools out of {sorted(BUILT_IN)}, got {name!r}; name others in extra_tools")
    return _Planned(f"setting tools, {name!r}", BUILT_IN[name].default, _name_of(BUILT_IN[name]))


def _imported(path: str) -> _Planned:
    origin = f"setting extra_tools, {path!r}"
    with importing(origin):
        imported = pkgutil.resolve_name(path)
    if is_function_tool(imported):
        return _function(imported, origin)
    if not (isinstance(imported, type) and issubclass(imported, BaseTool)):
        raise TypeError(
            f"expected {path!r} to be a subclass of trackway.tools.base.BaseTool "
            f"or a function decorated with trackway.tools.function_tool, got {imported!r}"
        )
    return _Planned(origin, imported.default, _name_of(imported))


def _functions(path: Path) -> list[_Planned]:
    return [_function(function, f"function_tool_path {path}") for function in functions_of_file(path)]


def _function(function: Callable[..., object], origin: str) -> _Planned:
    return _Planned(origin, partial(FunctionTool, function), FunctionTool(function).name)


def _entries(path: Path) -> list[_Planned | McpSource]:
    entries = enumerate(read_tool_config(path), start=1)
    return [_entry(f"{path}, entry {number}", entry, path.parent) for number, entry in entries]


def _entry(origin: str, entry: ToolEntry, folder: Path) -> _Planned | McpSource:
    if entry.mcp is None:
        schema = entry.tool_schema.to_wire() if entry.tool_schema else None

        def make(config: ToolConfig) -> BaseTool:
            return named_tool(entry.class_name, {**entry.own_config, **config}, schema, BUILT_IN, folder)

        return _Planned(origin, make, schema.function.name if schema else None)
    if entry.class_name not in MCP_CLASSES:
        raise ValueError(
            f"{origin}: expected class_name to be one of {', '.join(filter(None, MCP_CLASSES))} or left out beside "
            f"'mcp', got {entry.class_name!r}; results are text, to change them wrap the server"
        )
    return McpSource.of_entry(origin, entry.mcp, entry.own_config, folder)


def _name_of(tool_class: type[BaseTool]) -> str | None:
    schema = tool_class.default_schema
    return schema.function.name if schema else None
