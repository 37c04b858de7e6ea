"""The user's own code in a Serve config: its folders and files, its versions, and what has changed since a start."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trackway.agent.settings import AgentSettings
from trackway.deploy.config import serve_config
from trackway.reward.settings import RewardSettings
from trackway.serving.user_code import OwnCodeSettings, roots_of
from trackway.tools.settings import ToolsSettings
from trackway.wire.service import OwnCode

_SETTINGS: dict[str, type[OwnCodeSettings]] = {
    "agent": AgentSettings,
    "tools": ToolsSettings,
    "reward": RewardSettings,
}


def own_code(config: dict[str, Any]) -> dict[str, OwnCodeSettings]:
    """The settings of each service that loads own code. Invalid ones, which Serve reports, are left out."""
    found: dict[str, OwnCodeSettings] = {}
    names = [application["name"] for application in config["applications"]]
    for name in (name for name in _SETTINGS if name in names):
        required = {"model_path": ""} if name == "agent" else {}
        with suppress(ValidationError):
            found[name] = _SETTINGS[name](**{**required, **serve_config.args_of(config, name)})
    return found


def watched(config: dict[str, Any]) -> list[Path]:
    """The folders and files of all own code; those that exist."""
    paths: dict[Path, None] = {}
    for settings in own_code(config).values():
        paths |= dict.fromkeys([*roots_of(settings.modules, settings.code_path), *settings.own_files])
    return [path for path in paths if path.exists()]


def with_versions(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the version of each service's own code, so that deploying it restarts those that changed."""
    for service, settings in own_code(config).items():
        version = settings.version()
        if version is not None:
            config = serve_config.with_options(config, service, {"code_version": version.digest})
    return config


def changed_since_start(config: dict[str, Any], loaded: Mapping[str, OwnCode | None]) -> list[str]:
    """A sentence for each service whose own code on this disk is not what it has loaded."""
    problems = []
    for service, settings in own_code(config).items():
        here = settings.version()
        there = loaded.get(service)
        if here is not None and there is not None and here.digest != there.digest:
            problems.append(
                f"own code: expected the {service} service to have loaded the files as they are now ({here.digest}), "
                f"got an earlier version ({there.digest}); run `trackway up --reload`, or `trackway down` and "
                "start again"
            )
    return problems
