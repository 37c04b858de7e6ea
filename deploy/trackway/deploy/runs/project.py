"""A project: a folder with `trackway.yaml`, a run's configuration whose relative paths are relative to that file.

The project's folder is on the Python path of the services that import `trackway.modules`, unless the configuration sets
`trackway.code_path`. A path given on the command line is relative to the working folder, as everywhere.

A resumed run continues with its own settings, and does not read the file.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs import launch
from trackway.trainer.config import RunConfig, UnsupportedKey, compose

FILE_NAME = "trackway.yaml"
_DEFAULT = "default"


def project_file(config: Path | None, config_name: str = _DEFAULT) -> Path | None:
    """The project's file that a command takes: the named one, or the working folder's `trackway.yaml`.

    A file of another name is a project's if it sets `trackway.modules`.
    """
    if config is not None:
        return config if config.name == FILE_NAME or _names_modules(config) else None
    return Path(FILE_NAME) if config_name == _DEFAULT and Path(FILE_NAME).is_file() else None


def configured(
    overrides: Sequence[str],
    config: Path | None,
    config_name: str,
    deployment: Deployment | None = None,
    unsupported: list[UnsupportedKey] | None = None,
) -> RunConfig:
    """The configuration of a command line, with paths as the machines of the services see them.

    `unsupported` as in `compose`.

    Raises:
        UserError: the deployment is attached, and a path is local.
        TrackwayError: the configuration is not valid.
    """
    file = project_file(config, config_name)
    composed = compose([*overrides], file or config, config_name, unsupported)
    if file is None:
        return launch.placed(composed, deployment)
    folder = file.absolute().parent
    if composed.trackway.code_path is None:
        composed = composed.with_values({"trackway.code_path": str(folder)})
    return launch.placed(composed, deployment, folder, _keys_of(overrides))


def _names_modules(file: Path) -> bool:
    try:
        tree = yaml.safe_load(file.read_text()) if file.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        return False  # reading the configuration names the fault
    own = tree.get("trackway") if isinstance(tree, dict) else None
    return isinstance(own, dict) and bool(own.get("modules"))


def _keys_of(overrides: Sequence[str]) -> frozenset[str]:
    parsed = OverridesParser.create().parse_overrides([*overrides])
    return frozenset(override.key_or_group.lstrip("+") for override in parsed)
