"""The names that services will offer once started: their registries, loaded as a replica loads them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from trackway.chat.tool_formats import tool_format
from trackway.clients import run
from trackway.deploy.checks.findings import Findings
from trackway.deploy.config import serve_config
from trackway.serving.user_code import described, run_user_code
from trackway.tools.base import BaseTool, ToolSource
from trackway.tools.core.registry import ToolRegistry
from trackway.trainer.data.name_check import Served

T = TypeVar("T")

START_S = 60.0
"""Longest wait for one tool, or for a source of tools such as an MCP server, to start."""


def offered_by(config: dict[str, Any], findings: Findings, start: bool) -> Served:
    """The agents, scorers and tools of a Serve config. Load errors are added to the findings.

    With `start`, tools and MCP servers are started as the tool server starts them, and closed again. Without it, the
    tools of MCP servers are unknown.
    """
    agents = _loaded("agent loops", findings, lambda: _agents(serve_config.args_of(config, "agent")))
    sources = _loaded("scorers", findings, lambda: _data_sources(serve_config.args_of(config, "reward")))
    known_agents = None if agents is None else frozenset(agents)
    tools = _loaded("tools", findings, lambda: _tools(serve_config.args_of(config, "tools")))
    if tools is None:
        return Served(known_agents, sources)
    if start:
        offered, problems = run(_started(tools))
        findings.missing_here += problems
    else:
        offered = [tool for tool in tools if isinstance(tool, BaseTool)]
        problems = [
            f"tools of {source.origin}: known only to the running MCP server"
            for source in tools
            if source not in offered
        ]
        findings.not_checked += problems
    schemas = tuple(tool.tool_schema for tool in offered)
    names = None if problems else frozenset(tool.name for tool in offered)
    tool_agents = frozenset(name for name, offers_tools in (agents or {}).items() if offers_tools)
    return Served(known_agents, sources, names, schemas, tool_agents)


def _loaded(what: str, findings: Findings, load: Callable[[], T]) -> T | None:
    try:
        return load()
    except Exception as error:  # user code and files may fail in any way
        problems, reason = findings.missing_here if _is_missing(error) else findings.wrong, f": {_reason(error)}"
        same = next((text for text in problems if text.endswith(reason)), None)
        if same is None:
            problems.append(f"{what}{reason}")
        else:  # several services import the project's modules
            problems[problems.index(same)] = f"{same.removesuffix(reason)}, {what}{reason}"
        return None


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return described(error)
    return "; ".join(f"setting {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())


def _is_missing(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, is a missing package or file."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return any(isinstance(exception, ImportError | OSError) for exception in causes)


def _agents(args: dict[str, Any]) -> dict[str, bool]:
    """Each agent, and whether it offers tools."""
    from trackway.agent.environments.loop import register_environments
    from trackway.agent.loop import agents
    from trackway.agent.sessions.external import register_external
    from trackway.agent.settings import AgentSettings
    from trackway.agent.verl.loading import load_loops

    settings = AgentSettings(**{"model_path": "", **args})
    load_loops(settings)
    register_external(settings)
    register_environments(settings)
    if settings.tool_parser is not None:
        tool_format(settings.tool_parser)
    return {loop.name: loop.offers_tools for loop in agents()}


def _data_sources(args: dict[str, Any]) -> frozenset[str]:
    from trackway.reward.scorers import ScorerRegistry, scorers_of
    from trackway.reward.settings import RewardSettings

    registry = ScorerRegistry(scorers_of(RewardSettings(**args)))
    return frozenset(source for scorer in registry.infos() for source in scorer.data_sources)


def _tools(args: dict[str, Any]) -> list[BaseTool | ToolSource]:
    from trackway.tools.loading import tools_of
    from trackway.tools.settings import ToolsSettings

    return tools_of(ToolsSettings(**args))


async def _started(tools: Sequence[BaseTool | ToolSource]) -> tuple[list[BaseTool], list[str]]:
    """The tools that started, and the reasons why others did not. All are closed again."""
    registry, started, problems = ToolRegistry(), list[BaseTool](), list[str]()
    waiting = [*tools]
    for tool in waiting:  # a source appends its tools
        try:
            async with asyncio.timeout(START_S):
                if isinstance(tool, ToolSource):
                    waiting += await tool.open()
                    continue
                await run_user_code(tool.start)
            registry.add(tool)
            started.append(tool)
        except Exception as error:
            problems.append(f"tool server: {tool.origin} does not start: {str(error) or type(error).__name__}")
    for tool in reversed(waiting):
        try:
            async with asyncio.timeout(START_S):
                await run_user_code(tool.close)
        except Exception as error:
            problems.append(f"tool server: {tool.origin} does not close: {str(error) or type(error).__name__}")
    return started, problems
