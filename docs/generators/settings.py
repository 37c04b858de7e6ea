"""The page of settings: of the services, of `trackway up`, and of the tools that have a config of their own."""

import dataclasses
import json
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python
from pydantic_settings import BaseSettings

from generators.docstrings import field_docstrings
from generators.markdown import breakable, code, page, table
from trackway.agent.settings import AgentSettings, EnvironmentSettings, ExternalSettings
from trackway.deploy.local.settings import UpSettings
from trackway.reward.models import JudgeSettings, RewardModelSettings
from trackway.reward.settings import RewardSettings
from trackway.reward.weighted import WeightedScorers
from trackway.rollout.settings import RolloutSettings
from trackway.serving import ServiceSettings
from trackway.tools.base import ToolLimits
from trackway.tools.builtin.python import PythonSettings
from trackway.tools.builtin.search import SearchConfig
from trackway.tools.mcp.connection import McpServer
from trackway.tools.mcp.source import McpLimits
from trackway.tools.settings import ToolsSettings
from trackway.trainer.settings import TrainerSettings

REPOSITORY = Path(__file__).parents[2]
SERVICES: dict[str, type[ServiceSettings]] = {
    "Agent": AgentSettings,
    "Rollout": RolloutSettings,
    "Tools": ToolsSettings,
    "Reward": RewardSettings,
    "Trainer": TrainerSettings,
}


class Setting(NamedTuple):
    """One row of a table; `name` is dotted where settings are nested."""

    name: str
    default: str
    meaning: str


def settings_page() -> str:
    """Every setting with its environment variable, its default and its sentence."""
    shared = {setting.name for setting in settings_of(ServiceSettings)}
    own = {
        service: [setting for setting in settings_of(cls) if setting.name not in shared]
        for service, cls in SERVICES.items()
    }
    return page(
        "Settings",
        "A setting comes from the Serve config (`args` of the application), else from its environment variable, else "
        "from its default. Lists and mappings are JSON in the environment. A required setting has no default.",
        "## All services",
        _with_variables(ServiceSettings, settings_of(ServiceSettings)),
        *(f"## {name} service\n\n{_with_variables(cls, own[name])}" for name, cls in SERVICES.items()),
        "## `trackway up`",
        "Read by `trackway up`, `trackway demo` and `python -m trackway.main_ppo`, whose options come first.",
        _with_variables(UpSettings, settings_of(UpSettings)),
        "## Tools",
        "Keys of a tool's entry in the tool server's `tool_config`, or of its `config` in a tool file; they have no "
        "environment variables. Every tool takes these limits, which can only be lowered:",
        table(("Key", "Default", "Meaning"), _cells(settings_of(ToolLimits))),
        "### `python`",
        table(("Key", "Default", "Meaning"), _cells(settings_of(PythonSettings))),
        "### `search`",
        table(("Key", "Default", "Meaning"), _cells(settings_of(SearchConfig))),
        "### MCP servers",
        "Keys of the `config` of an entry with `type: mcp`:",
        table(("Key", "Default", "Meaning"), _cells(settings_of(McpLimits))),
        "Keys of a server in its JSON file:",
        table(("Key", "Default", "Meaning"), _cells(settings_of(McpServer))),
        "## External agents and environments",
        "Keys of the agent service's `external`, and of the entries of `external_agents`:",
        table(("Key", "Default", "Meaning"), _cells(settings_of(ExternalSettings))),
        "Keys of the entries of its `environments`:",
        table(("Key", "Default", "Meaning"), _cells(settings_of(EnvironmentSettings))),
        "## Judges and sums of scorers",
        "Keys of the entries of the reward service's `judges`:",
        table(("Key", "Default", "Meaning"), _cells(settings_of(JudgeSettings))),
        "Keys of the entries of its `weighted_scorers`:",
        table(("Key", "Default", "Meaning"), _cells(settings_of(WeightedScorers))),
        "Keys of its `reward_model`:",
        table(("Key", "Default", "Meaning"), _cells(settings_of(RewardModelSettings))),
    )


def settings_of(cls: type) -> list[Setting]:
    """The settings of a pydantic model or a dataclass, with those of nested ones in their place.

    Defaults are those of an empty environment.
    """
    with patch.dict(os.environ, clear=True):
        return [*_settings(cls, {}, "")]


def _settings(cls: type, given: dict[str, object], prefix: str) -> Iterator[Setting]:
    sentences = field_docstrings(cls)
    for name, default in _defaults(cls).items():
        value = given.get(name, default)
        if isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            yield from _settings(type(value), dict(vars(value)), f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, _shown(value), sentences.get(name, ""))


def _defaults(cls: type) -> dict[str, object]:
    """Default by field; PydanticUndefined for a required one, `...` for one that is drawn at random."""
    if not issubclass(cls, BaseModel):
        return {field.name: field.default for field in dataclasses.fields(cls)}
    return {name: _default(field) for name, field in cls.model_fields.items()}


def _default(field: FieldInfo) -> object:
    first, second = (field.get_default(call_default_factory=True, validated_data={}) for _ in range(2))
    return first if first == second else ...


def _shown(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is ...:
        return "random"
    if isinstance(value, Path):
        return breakable(str(value.relative_to(REPOSITORY) if value.is_relative_to(REPOSITORY) else value))
    if isinstance(value, str) and not isinstance(value, Enum):
        first, *more = value.splitlines() or [""]
        return code(first + (" ..." if more else "")) if first else "empty"
    return code(json.dumps(to_jsonable_python(value)))


def _with_variables(cls: type[BaseSettings], settings: list[Setting]) -> str:
    """A table of the class's own settings, then one for each group of nested ones."""
    prefix, delimiter = cls.model_config.get("env_prefix", ""), cls.model_config.get("env_nested_delimiter") or "__"
    groups: dict[str, list[tuple[str, str, str]]] = {"": []}
    for setting in settings:
        variable = prefix + setting.name.replace(".", delimiter).upper()
        row = (f"{breakable(setting.name)}<br>{breakable(variable)}", setting.default, setting.meaning)
        groups.setdefault(setting.name.rpartition(".")[0], []).append(row)
    header = ("Setting, environment variable", "Default", "Meaning")
    return "\n".join((f"### `{group}`\n\n" if group else "") + table(header, rows) for group, rows in groups.items())


def _cells(settings: list[Setting]) -> list[tuple[str, str, str]]:
    return [(breakable(setting.name), setting.default, setting.meaning) for setting in settings]
