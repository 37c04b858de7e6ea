"""Check before the first step that services exist for the agent loops, data sources and tools named in the rows.

A trajectory of a row with an unknown name always fails, so the run is refused with all unknown names and their rows.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from trackway.clients import AgentClient, CallPolicy, RewardClient, ToolsClient
from trackway.run_config import RunConfig
from trackway.trainer.data.dataset import WITHOUT_TOOLS, Rows
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import Sample
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ANY_DATA_SOURCE

T = TypeVar("T")

CHECK_POLICY = CallPolicy.question(10.0, attempts=3)
"""For cheap requests to services that should be running."""

_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
_REGISTER = "name the module that registers it in trackway.modules"
_AGENTS = f"correct the rows, or {_REGISTER}"
_SCORERS = "correct the rows, or add a scorer for it: custom_reward_function, or @scorer in one of trackway.modules"
_TOOLS = "correct the rows' extra_info.tool_selection, or add it to the tool server"

logger = logging.getLogger("trackway.trainer")


@dataclass(frozen=True)
class Served:
    """The names that the services know, or None where a service did not answer."""

    agents: frozenset[str] | None = None
    data_sources: frozenset[str] | None = None
    tools: frozenset[str] | None = None
    schemas: tuple[ToolSchema, ...] = ()
    """Schemas of the tools."""
    tool_agents: frozenset[str] = frozenset()
    """The agents that show these tools to the model."""
    without_tools: str = ""
    """Why the model's chat template carries no tools. Empty when it does."""


async def ask_services(urls: ServiceUrls) -> tuple[Served, dict[str, TrackwayError]]:
    """The names that the services know, and the error of each service that did not answer, by its name."""
    tools, agents = ToolsClient(urls.tools_url, policy=CHECK_POLICY), AgentClient(urls.agent_url, policy=CHECK_POLICY)
    rewards = RewardClient(urls.reward_url, policy=CHECK_POLICY) if urls.reward_url else None
    errors: dict[str, TrackwayError] = {}

    async def answer_of(name: str, call: Callable[[], Awaitable[T]]) -> T | None:
        try:
            return await call()
        except TrackwayError as error:
            errors[name] = error
            return None

    offered, loops, scorers = await asyncio.gather(
        answer_of("tools", tools.list),
        answer_of("agent", agents.agents),
        answer_of("reward", rewards.scorers) if rewards else _none(),
    )
    served = Served(
        agents=None if loops is None else frozenset(loop.name for loop in loops.agents),
        data_sources=None if scorers is None else frozenset(name for scorer in scorers for name in scorer.data_sources),
        tools=None if offered is None else frozenset(tool.function.name for tool in offered),
        schemas=tuple(offered or ()),
        tool_agents=frozenset(loop.name for loop in loops.agents if loop.offers_tools) if loops else frozenset(),
        without_tools=loops.without_tools if loops else "",
    )
    return served, errors


async def check_names(config: RunConfig, rows: Mapping[str, Rows], urls: ServiceUrls) -> tuple[ToolSchema, ...]:
    """Check the names in the rows, given by configuration key, against those that the services know.

    Returns the schemas of the tools, empty when the tool server does not answer.

    An unreachable service is logged and does not fail the check: the run itself waits for its services.

    Raises:
        TrackwayError: INVALID_REQUEST with each unknown name and its rows.
    """
    served, errors = await ask_services(urls)
    schemas = served.schemas
    if not _asks_for_tools(config, rows.values()):
        served = replace(served, tools=None)
        errors.pop("tools", None)
    for name, error in errors.items():
        logger.warning("the names that the %s service knows cannot be checked, as it did not answer: %s", name, error)
    problems = unserved(config, rows, served)
    if problems:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, "; ".join(problems))
    return schemas


def unserved(config: RunConfig, rows: Mapping[str, Rows], served: Served) -> list[str]:
    """A message for each name, in the configuration or in the rows by configuration key, that no service knows."""
    problems = _of_config(config, rows.values(), served)
    sources = None if ANY_DATA_SOURCE in (served.data_sources or ()) else served.data_sources
    for key, key_rows in rows.items():
        problems += _of_rows(key, key_rows, "agent_name", served.agents, _agent, _AGENTS)
        problems += _of_rows(key, key_rows, "data_source", sources, _data_source, _SCORERS)
        problems += _of_template(key, key_rows, config, served)
        problems += _of_rows(key, key_rows, "tool_selection", served.tools, _selection(config), _TOOLS)
    return problems


def _of_config(config: RunConfig, rows: Iterable[Rows], served: Served) -> list[str]:
    problems = []
    loop, unnamed = config.default_agent, sum(not row.agent_name for part in rows for row in part.samples)
    if served.agents is not None and loop not in served.agents and unnamed:
        problems.append(
            f"{_LOOP}: expected one of {_list(served.agents)}, got {loop!r}, the loop of {unnamed} rows without "
            f"agent_name; correct it, or {_REGISTER}"
        )
    missing = [name for name in config.trackway.tools or () if served.tools is not None and name not in served.tools]
    if missing:
        assert served.tools is not None
        problems.append(
            f"trackway.tools: expected tools out of {_list(served.tools)}, got {', '.join(map(repr, missing))}; "
            "correct it, or add them to the tool server"
        )
    return problems


def _of_rows(
    key: str,
    rows: Rows,
    column: str,
    known: frozenset[str] | None,
    names: Callable[[Sample], Iterable[str]],
    remedy: str,
) -> list[str]:
    if known is None:
        return []
    positions_by_name: dict[str, list[int]] = {}
    for position, row in enumerate(rows.samples):
        for name in set(names(row)) - known:
            positions_by_name.setdefault(name, []).append(position)
    return [
        f"{key}: expected {column} out of {_list(known)}, got {name} in {len(positions)} of "
        f"{len(rows.samples)} rows ({rows.describe(positions)}); {remedy}"
        for name, positions in _reported_names(positions_by_name)
    ]


def _of_template(key: str, rows: Rows, config: RunConfig, served: Served) -> list[str]:
    """The rows whose agent offers tools to a model whose chat template shows none."""
    if not served.without_tools or not served.schemas or config.trackway.tools == []:
        return []
    agents = [row.agent_name or config.default_agent for row in rows.samples]
    positions = [place for place, agent in enumerate(agents) if agent in served.tool_agents]
    if not positions:
        return []
    where = f"{len(positions)} of {len(agents)} rows ({rows.describe(positions)})"
    return [f"{key}: {served.without_tools}. An agent of {where} offers tools."]


_NAMES_SHOWN = 5
"""Most unknown names reported per column. The others are counted."""


def _reported_names(positions_by_name: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
    by_count = sorted(positions_by_name.items(), key=lambda item: (-len(item[1]), item[0]))
    ordered = [(_short(name), positions) for name, positions in by_count]
    if len(ordered) <= _NAMES_SHOWN:
        return ordered
    shown, rest = ordered[:_NAMES_SHOWN], ordered[_NAMES_SHOWN:]
    together = sorted({position for _, positions in rest for position in positions})
    return [*shown, (f"{len(rest)} further names", together)]


def _agent(row: Sample) -> Iterable[str]:
    return [row.agent_name] if row.agent_name else []


def _data_source(row: Sample) -> Iterable[str]:
    return [row.data_source]


def _selection(config: RunConfig) -> Callable[[Sample], Iterable[str]]:
    def selected(row: Sample) -> Iterable[str]:
        chosen = row.extra_info.get("tool_selection")
        if (row.agent_name or config.default_agent) == WITHOUT_TOOLS or not isinstance(chosen, list):
            return []
        return [str(name) for name in chosen]

    return selected


def _asks_for_tools(config: RunConfig, rows: Iterable[Rows]) -> bool:
    selected = _selection(config)
    return bool(config.trackway.tools) or any(selected(row) for part in rows for row in part.samples)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _short(name: str) -> str:
    return ascii(name) if len(name) <= 80 else f"{name[:80]!a}..."


async def _none() -> None:
    return None
