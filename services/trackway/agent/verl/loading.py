"""Loads a project's agent loops: those that its modules register, and those of verl's agent_loop_config_path."""

import pkgutil
from pathlib import Path
from typing import Any

import yaml

from trackway.agent.loop import AgentLoop, register
from trackway.agent.settings import AgentSettings
from trackway.agent.verl.adapter import adapted
from trackway.agent.verl.interface import registered
from trackway.serving.own_code import import_modules, loading


def load_loops(settings: AgentSettings) -> None:
    """Register the loops that the settings name.

    OwnCodeError for a module or class that cannot be imported; FileNotFoundError; ValueError for a wrong file;
    TypeError for a class that is no agent loop.
    """
    import_modules(settings.modules, settings.code_path)
    if settings.agent_loop_config_path is not None:
        _load_file(settings.agent_loop_config_path)
    for name, loop_class in registered(settings.modules):
        register(name)(adapted(loop_class))


def _load_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"agent_loop_config_path: expected a YAML file, got {str(path)!r}; correct the path")
    try:
        entries = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML, got: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of agent loops, got {type(entries).__name__}")
    for number, entry in enumerate(entries, start=1):
        _load_entry(f"{path}, entry {number}", entry)


def _load_entry(place: str, entry: Any) -> None:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
        raise ValueError(
            f"{place}: expected the keys name and _target_ with a class such as my_agent.MyLoop, got {entry}"
        )
    arguments = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
    with loading(f"{place}, {entry['_target_']!r}"):
        loop_class = pkgutil.resolve_name(entry["_target_"])
    if isinstance(loop_class, type) and issubclass(loop_class, AgentLoop):
        if arguments:
            raise ValueError(f"{place}: expected no arguments for an AgentLoop of trackway, got {sorted(arguments)}")
        register(entry["name"])(type(loop_class.__name__, (loop_class,), {"__doc__": loop_class.__doc__}))
        return
    try:
        register(entry["name"])(adapted(loop_class, arguments))
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from error
