"""A project: a folder with `trackway.yaml`, a run's configuration whose relative paths are relative to that file.

The project's folder is on the Python path of the services that import `trackway.modules`, unless the configuration sets
`trackway.code_path`. A path given on the command line is relative to the working folder, as everywhere.

A run records the settings of the file that it begins with. When it is resumed, what was edited since is known from
them: `edits`, and `resumed` for a run that has services of its own.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs import launch
from trackway.system.user_error import UserError
from trackway.trainer.config import RunConfig, UnsupportedKey, compose
from trackway.trainer.config.changes import CHANGEABLE, PROJECT_SETTINGS
from trackway.trainer.config.compose import Tree, given, leaves, resolve
from trackway.trainer.config.unsupported_keys import MOVED

FILE_NAME = "trackway.yaml"
_DEFAULT = "default"


def project_file(config: Path | None, config_name: str = _DEFAULT) -> Path | None:
    """The `trackway.yaml` that a command takes: the one named, or that of the working folder when none is named."""
    if config is not None:
        return config if config.name == FILE_NAME else None
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
    own: dict[str, object] = {PROJECT_SETTINGS: [f"{key}={value}" for key, value in _settings(file).items()]}
    if composed.trackway.code_path is None:
        own["trackway.code_path"] = str(folder)
    return launch.placed(composed.with_values(own), deployment, folder, _keys_of(overrides))


def edits(file: Path, name: str, began_with: Sequence[str]) -> Tree:
    """The new values, for a run that is resumed, of what was edited in `trackway.yaml` since the run began.

    `began_with` is `trackway.project_settings` of the run. Raises UserError, with the keys, for an edit of what a
    resumed run keeps, and TrackwayError for a file that is not valid.
    """
    config = leaves(compose([], file).model_dump(mode="json"))
    now, then = _settings(file), _values(began_with)
    edited = _differing(now, then)
    kept = [
        f"{key}={now.get(key, 'none')} instead of {then.get(key, 'none')}" for key in edited if key not in CHANGEABLE
    ]
    if kept:
        raise UserError(
            f"{file}: expected what run {name} began with, got {', '.join(kept)}; put that back; or resume it from "
            f"a folder without {FILE_NAME}, with --outputs, and it goes on as it was; or start another run: with "
            "trainer.resume_mode=resume_path and trainer.resume_from_path it begins at a checkpoint of this one. Only "
            f"{', '.join(CHANGEABLE)} may change"
        )
    recorded: Tree = {PROJECT_SETTINGS: [f"{key}={value}" for key, value in now.items()]} if edited else {}
    return {**{key: config[key] for key in edited}, **recorded}


def resumed(now: RunConfig, began: RunConfig, file: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run that is resumed: its own, but for what its command gives and what was edited since.

    `began` is the run's own configuration, and `now` that of the file with the command's overrides. Of a run that did
    not begin with the file, nothing of the file is taken.
    """
    began_with = began.trackway.project_settings
    edited = [] if began_with is None else _differing(_settings(file), _values(began_with))
    taken = tuple(MOVED.get(key, key) for key in (*edited, *given(overrides)))
    values = leaves(now.model_dump(mode="json"))
    new = {key: value for key, value in values.items() if any(f"{key}.".startswith(f"{name}.") for name in taken)}
    return resolve({**leaves(began.model_dump(mode="json")), **new})


def _values(began_with: Sequence[str]) -> dict[str, str]:
    """Key -> value of `trackway.project_settings`."""
    return dict(setting.split("=", 1) for setting in began_with)


def _differing(now: dict[str, str], then: dict[str, str]) -> list[str]:
    return sorted(key for key in {**then, **now} if then.get(key) != now.get(key))


def _settings(file: Path) -> dict[str, str]:
    """The value as JSON of each dotted key that the file gives, before anything is filled in or made absolute."""
    tree = cast(Tree, OmegaConf.to_container(OmegaConf.load(file)))
    return {key: json.dumps(value) for key, value in sorted(leaves(tree).items())}


def _keys_of(overrides: Sequence[str]) -> frozenset[str]:
    parsed = OverridesParser.create().parse_overrides([*overrides])
    return frozenset(override.key_or_group.lstrip("+") for override in parsed)
