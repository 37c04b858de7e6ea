"""From a Hydra command line, or from nested keys, to a validated RunConfig.

    defaults (the typed models) <- preset or YAML file <- overrides  ->  nested keys
    nested keys: old spellings moved, known keys without effect collected, unknown ones refused  ->  RunConfig

A feature of verl that Trackway lacks (UnsupportedKey) is refused for a run. A dry run lists it.

Hydra parses and merges; the models define the keys. `+key` and `++key` of a known key mean the same as `key`, because
verl's users write `+` for keys that some releases lack.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from trackway.run_config.asynchronous import translate
from trackway.run_config.models import RunConfig
from trackway.run_config.rollout_correction import BOUND_KEYS, RolloutCorrectionConfig
from trackway.run_config.rollout_correction import PRESETS as PRESETS_OF_CORRECTION
from trackway.run_config.supervised import GROUPS, ROWS, misplaced, renamed, spelled
from trackway.run_config.unsupported_keys import (
    DEPLOYMENT,
    MOVED,
    NO_EFFECT,
    ONLY,
    OTHER_LOGGERS,
    REPEATED,
    UnsupportedError,
    UnsupportedKey,
    limited,
    other_value,
    shown,
    without_effect,
)
from trackway.wire.errors import ErrorCode, TrackwayError

PRESETS = Path(__file__).parent / "presets"

_REWARD_KWARGS = "custom_reward_function.reward_kwargs"
FREE_KEYS = (
    _REWARD_KWARGS,
    *("actor_rollout_ref.rollout.engine_kwargs.vllm", "actor_rollout_ref.rollout.engine_kwargs.sglang"),
    "data.apply_chat_template_kwargs",
    "distillation.teacher_models",
)
"""The keys below which any key is allowed."""

CORRECTION = "algorithm.rollout_correction"
"""A section that may be given as the name of a preset."""

MAX_KEYS = 4096
"""Most keys in a configuration. About 600 are known."""
MAX_KEY_CHARS = 200
MAX_UNKNOWN = 10
"""Most unknown keys reported."""
MAX_LENGTH = 16_384
"""Longest list in items, longest string in characters."""

TRACE_BACKEND = "actor_rollout_ref.rollout.trace.backend"
NO_TRACES: "Tree" = {
    "trackway.trace_prompts_per_step": 0,
    "trackway.trace_validation_samples": 0,
    "trainer.log_val_generations": 0,
}
"""Settings of `trace.backend=dummy`, verl's name for no tracing."""

Tree = dict[str, JsonValue]
A = TypeVar("A")
R = TypeVar("R")


def compose(
    overrides: list[str],
    config_file: Path | None = None,
    config_name: str = "default",
    unsupported: list[UnsupportedKey] | None = None,
) -> RunConfig:
    """The configuration of a command line.

    `config_file` is a YAML file, or a folder in which `config_name` is looked up. None takes the preset `config_name`.
    A file may extend a preset (`defaults: [ppo_trainer]`). `unsupported` as in `resolve`. Raises
    TrackwayError(INVALID_REQUEST).
    """
    folder, name = _location(config_file, config_name)
    problems: list[TrackwayError] = []
    given = [line for override in overrides if override not in GROUPS for line in _preset_keys(override)]
    lines = [set_line for line in given if (set_line := _noted(problems, _as_set, line)) is not None]
    _store_defaults()
    try:
        tree = _composed(folder, name, lines)
        changed = [line for line in lines if line.lstrip("+").startswith(f"{CORRECTION}.")]
        if changed and isinstance(_correction(tree), dict):
            others = [line for line in lines if line not in changed]
            problems += _lost_preset(_correction(_composed(folder, name, others)), _correction(tree))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        problems.append(TrackwayError(ErrorCode.INVALID_REQUEST, f"the configuration does not compose: {error}"))
        raise together(problems) from error
    found: list[UnsupportedKey] | None = None if unsupported is None else []
    config = _noted(problems, lambda tree: resolve(tree, found), tree)
    if config is None or problems:
        raise together(problems)
    if unsupported is not None:
        unsupported += found or ()
    return config


def _composed(folder: Path, name: str, lines: Sequence[str]) -> Tree:
    """The nested keys of a file with these overrides."""
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        composed = hydra_compose(name, overrides=[f"hydra.searchpath=[file://{PRESETS}]", *lines])
    return cast(Tree, OmegaConf.to_container(composed, resolve=True))


def together(problems: Sequence[TrackwayError]) -> TrackwayError:
    """The errors combined into one. A single error is returned unchanged."""
    if len(problems) == 1:
        return problems[0]
    return TrackwayError(ErrorCode.INVALID_REQUEST, "; ".join(problem.message for problem in problems))


def _noted(problems: list[TrackwayError], function: Callable[[A], R], argument: A) -> R | None:
    """The function's result. An error is appended to `problems` instead, so that all errors are reported together."""
    try:
        return function(argument)
    except TrackwayError as error:
        problems.append(error)
        return None


def resolve(tree: Tree, unsupported: list[UnsupportedKey] | None = None) -> RunConfig:
    """The configuration of nested keys. Missing keys take their default.

    Keys that ask for what Trackway does not have are added to `unsupported`, and take their default. Without that list
    they are refused. Raises TrackwayError(INVALID_REQUEST) naming the key, what was expected and the nearest known
    keys.
    """
    given = {_free_keys_moved(key): value for key, value in leaves(tree).items()}
    _check_size(given)
    supervised = given.get(ROWS) == "rows"
    if supervised:
        given = renamed(given, _defaults())
    moved = {key for key in MOVED if key in given}
    for key in moved:
        _move(given, key)
    honoured = known_keys()
    others = [key for key in given if key not in honoured]
    ignored = {key: None for key in others if limited(key) is None and without_effect(key) is not None}
    problems: list[TrackwayError] = []
    not_known: list[TrackwayError] = []
    found: list[UnsupportedKey] = []
    for key in others:
        if limited(key) is not None:
            found += _noted(problems, _not_allowed, (key, given.pop(key))) or ()
        elif key not in ignored:
            _noted(not_known, _must_be_known, key)
        if len(not_known) == MAX_UNKNOWN:
            break
    problems += not_known
    if len(not_known) == MAX_UNKNOWN:
        raise together([*(key.error for key in found), *problems])
    unknown = {str(problem.detail["key"]) for problem in not_known}
    kept = {key: value for key, value in given.items() if key not in ignored and key not in unknown}
    kept = {key: value for key, value in kept.items() if value is not None or key not in MOVED.values()}
    other_values = [other for key, value in kept.items() if (other := other_value(key, value)) is not None]
    found += other_values
    for other in other_values:
        del kept[other.key]
    if kept.get(TRACE_BACKEND) in ("dummy", ["dummy"]):
        kept |= {TRACE_BACKEND: None, **NO_TRACES}
    kept = _noted(problems, translate, kept) or kept
    notes = [*_earlier_notes(kept), *sorted(moved), *ignored, *_other_loggers(kept)]
    kept["trackway.ignored_keys"] = list[JsonValue](dict.fromkeys(notes))
    config = _noted(problems, lambda kept: _validated(kept, found), kept)
    if config is not None:
        problems += _disagreements(config, given)
        problems += misplaced(leaves(config.model_dump(mode="json")), _defaults(), supervised=supervised)
    if unsupported is None:
        problems = [*(key.error for key in found), *problems]
    if config is None or problems:
        raise together(problems)
    if unsupported is not None:
        unsupported += found
    return config


def _check_size(given: Tree) -> None:
    if len(given) > MAX_KEYS:
        message = f"expected a configuration of at most {MAX_KEYS} keys, got {len(given)}; leave out what is not needed"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    for key, value in given.items():
        if len(key) > MAX_KEY_CHARS:
            message = f"expected keys of at most {MAX_KEY_CHARS} characters, got {key[:40]!r} of {len(key)}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        if isinstance(value, list | str) and len(value) > MAX_LENGTH:
            kind = "items" if isinstance(value, list) else "characters"
            message = f"{key}: expected at most {MAX_LENGTH} {kind}, got {len(value)}; give less, or a file"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message, key=key)


def given(overrides: Sequence[str]) -> Tree:
    """The keys and values of a command line. Raises TrackwayError(INVALID_REQUEST) for unknown keys and deletions."""
    values: Tree = {}
    for line in overrides:
        override = OverridesParser.create().parse_override(_as_set(line))
        if override.is_delete():
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"expected key=value, got the deletion {line!r}")
        values[override.key_or_group] = cast(JsonValue, override.value())
    return values


def leaves(tree: Tree, prefix: str = "") -> dict[str, JsonValue]:
    """Dotted key -> value for each leaf. An empty mapping has no leaves."""
    flat: dict[str, JsonValue] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        flat |= leaves(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, str]:
    """Dotted key -> description for each key that has an effect."""
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys |= known_keys(inner, f"{prefix}{name}.")
        else:
            keys[f"{prefix}{name}"] = field.description or ""
    return keys


def given_to_deployment(config: RunConfig) -> list[str]:
    """The given keys that affect only the deployment of services, and so not services that already run."""
    values = leaves(config.model_dump(mode="json"))
    given = [key for key, value in values.items() if value is not None]
    return [name for key in DEPLOYMENT for name in given if key in (name, free_key(name))]


def _location(config_file: Path | None, config_name: str) -> tuple[Path, str]:
    if config_file is None:
        folder, name = PRESETS, config_name
    elif config_file.is_dir():
        folder, name = config_file.resolve(), config_name
    else:
        folder, name = config_file.resolve().parent, config_file.stem
    name = name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"expected a file {name}.yaml in {folder}, found: {names}")
    return folder, name


def _as_set(line: str) -> str:
    """The override with `+` or no prefix rewritten to `++`. Deletions are unchanged."""
    try:
        override = OverridesParser.create().parse_override(line)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST, f"expected key=value in Hydra's grammar, got {line!r}: {reason}"
        ) from error
    if override.key_or_group.startswith("hydra.") or override.key_or_group == "hydra":
        return line
    _must_be_known(spelled(override.key_or_group))
    _must_keep_bounds(override)
    return line if override.is_delete() else f"++{line.lstrip('+')}"


def _preset_keys(line: str) -> list[str]:
    """The overrides that a preset of CORRECTION stands for, so that a later override can change one of its keys."""
    key, _, value = line.lstrip("+").partition("=")
    if key != CORRECTION or value not in (*PRESETS_OF_CORRECTION, "null"):
        return [line]
    values = RolloutCorrectionConfig.model_validate("disabled" if value == "null" else value).model_dump()
    return [f"{CORRECTION}.{name}={json.dumps(value)}" for name, value in values.items()]


def _correction(tree: Tree) -> JsonValue:
    """The value of CORRECTION: the name of a preset, keys, or nothing."""
    algorithm = tree.get("algorithm")
    return algorithm.get("rollout_correction") if isinstance(algorithm, dict) else None


def _lost_preset(in_file: JsonValue, composed: JsonValue) -> list[TrackwayError]:
    """An error when keys on the command line replaced a preset in the file, unless they are all keys of a preset."""
    section = composed if isinstance(composed, dict) else {}
    if not isinstance(in_file, str) or section.keys() == RolloutCorrectionConfig.model_fields.keys():
        return []
    message = (
        f"{CORRECTION}: expected a preset or keys, got a preset in the file and {', '.join(section)} on the "
        f"command line; give the preset there too, first: {CORRECTION}=<preset>"
    )
    return [TrackwayError(ErrorCode.INVALID_REQUEST, message, key=CORRECTION)]


def _must_keep_bounds(override: Override) -> None:
    """Raises TrackwayError for bounds such as 0.5_2, which Hydra's grammar reads as the number 0.52."""
    value, text = override.value(), str(override.input_line).partition("=")[2].strip()
    if override.key_or_group in BOUND_KEYS and isinstance(value, int | float) and "_" in text:
        message = (
            f"{override.key_or_group}: expected 'lo_hi' with decimals or in quotes, got {text}, which is the number "
            f"{value} in Hydra's grammar; write \"'{text}'\""
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, key=override.key_or_group)


def _free_keys_moved(key: str) -> str:
    """The key in our spelling if it is below _REWARD_KWARGS, which has two, else the key."""
    return key.removeprefix("reward.") if f"{key}.".startswith(f"reward.{_REWARD_KWARGS}.") else key


def free_key(key: str) -> str | None:
    """The one of FREE_KEYS that `key` is below, or None."""
    return next((free for free in FREE_KEYS if key.startswith(f"{free}.")), None)


def _must_be_known(key: str) -> None:
    known = _known_names()
    if key in known or without_effect(key) or limited(key) or any(name.startswith(f"{key}.") for name in known):
        return
    if free_key(_free_keys_moved(key)):
        return
    raise unknown_key(key, known)


def _disagreements(config: RunConfig, given: Tree) -> list[TrackwayError]:
    """An error for each given key of REPEATED that does not repeat the other one."""
    values = leaves(config.model_dump(mode="json"))
    return [
        TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"{key}: expected the value of {other}, which is {shown(values[other])}, got {shown(given[key])}; set "
            f"{other} alone",
            key=key,
        )
        for key, other in REPEATED.items()
        if given.get(key) is not None and given[key] != values[other]
    ]


def _not_allowed(given: tuple[str, JsonValue]) -> list[UnsupportedKey]:
    """The key, if it has a value of verl's that ONLY does not allow. Raises TrackwayError for one that verl has not."""
    key, value = given
    only = ONLY[limited(key) or key]
    if value is None or value in only.values:
        return []
    unsupported = UnsupportedKey(key=key, expected=only.allowed, got=shown(value), remedy=only.remedy)
    if not only.is_verls(value):
        raise unsupported.error
    return [unsupported]


@lru_cache(maxsize=1)
def _known_names() -> tuple[str, ...]:
    return (*known_keys(), *(name.removesuffix(".*") for name in (*NO_EFFECT, *ONLY)), *MOVED)


def unknown_key(key: str, known: Iterable[str]) -> TrackwayError:
    """The error for an unknown key, with the nearest known keys by last part or by whole name."""
    names = [name for name in known if name not in MOVED]
    close = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    last = {name.rpartition(".")[2] for name in names}
    alike = difflib.get_close_matches(key.rpartition(".")[2], last, n=1, cutoff=0.8)
    same = [name for name in names if name.rpartition(".")[2] in alike]
    found = dict.fromkeys([*(name for name in close if name in same), *same, *close])
    nearest = sorted(found, key=lambda name: name in NO_EFFECT or name in ONLY)[:3]
    remedy = f"did you mean {' or '.join(nearest)}?" if nearest else "`trackway config explain` lists every key"
    return TrackwayError(
        ErrorCode.INVALID_REQUEST, f"unknown key {key!r}: {remedy}", key=key, nearest=list[JsonValue](nearest)
    )


@lru_cache(maxsize=1)
def _defaults() -> Tree:
    return leaves(RunConfig().model_dump(mode="json"))


@lru_cache
def _store_defaults() -> None:
    """Let Hydra find every key with its default, under the name that presets extend.

    A key with an old name is null, so that it is known which of the two was set.
    """
    defaults = _defaults()
    tree = _nested({key: None if key in MOVED.values() else value for key, value in defaults.items()})
    ConfigStore.instance().store(name="trackway_defaults", node=tree)


def _move(given: dict[str, JsonValue], old: str) -> None:
    new, value = MOVED[old], given.pop(old)
    if value is None:
        return
    if given.get(new) is not None and _as_list(given[new]) != _as_list(value):
        message = f"{old}={shown(value)} and {new}={shown(given[new])} disagree; give only {new}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, key=old)
    given[new] = value


def _as_list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else [value]


def _earlier_notes(given: dict[str, JsonValue]) -> list[str]:
    """Keys collected by an earlier composition, when the configuration was sent over the wire."""
    notes = given.get("trackway.ignored_keys")
    return [str(key) for key in notes] if isinstance(notes, list) else []


def _other_loggers(given: dict[str, JsonValue]) -> list[str]:
    names = given.get("trainer.logger")
    return [f"trainer.logger.{name}" for name in _as_list(names) if name in OTHER_LOGGERS]


def _validated(given: dict[str, JsonValue], unsupported: list[UnsupportedKey]) -> RunConfig:
    """The configuration of these keys. Those that a validator calls unsupported are collected and left out."""
    try:
        return RunConfig.model_validate(_nested(given))
    except ValidationError as error:
        causes = [details.get("ctx", {}).get("error") for details in error.errors()]
        found = [cause.unsupported for cause in causes if isinstance(cause, UnsupportedError)]
        kept = {key: value for key, value in given.items() if key not in {lacking.key for lacking in found}}
        if len(found) == len(causes) and len(kept) == len(given) - len(found):
            unsupported += found
            return _validated(kept, unsupported)
        problems = "; ".join(_problem(details) for details in error.errors())
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"the configuration is not valid: {problems}") from error


def _problem(error: ErrorDetails) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error":  # from one of our validators, whose message includes the value
        reason = str(error.get("ctx", {}).get("error", error["msg"]))
        return f"{where}: {reason}" if where else reason
    return f"{where}: {error['msg']}, got {error['input']!r}"


def _nested(flat: dict[str, JsonValue]) -> Tree:
    tree: Tree = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = cast(Tree, node.setdefault(part, {}))
        node[name] = value
    return tree


_ACTOR = "actor_rollout_ref.actor"
CHANGEABLE = (
    "trainer.total_training_steps",
    *("trackway.learner_ranks", "trainer.nnodes", "trainer.n_gpus_per_node"),
    *("trackway.rank_timeout_s", "trackway.placement_timeout_s"),
    f"{_ACTOR}.ulysses_sequence_parallel_size",
    *(f"{_ACTOR}.{name}" for name in ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")),
    *(f"{_ACTOR}.fsdp_config.{name}" for name in ("fsdp_size", "param_offload", "optimizer_offload", "offload_policy")),
)
"""Keys that may change when a run is resumed: steps, ranks, nodes, timeouts, micro-batch sizes and CPU offload."""
RECORDED = ("trackway.ignored_keys",)
"""Keys that are filled in when a configuration is made, and that no command line sets."""


def changed(config: RunConfig, changes: Mapping[str, JsonValue]) -> RunConfig:
    """The configuration with other values of CHANGEABLE keys. Raises TrackwayError(INVALID_REQUEST) for others."""
    refused = sorted(changes.keys() - {*CHANGEABLE})
    if refused:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"{', '.join(refused)}: expected no other value for a resumed run, which may change "
            f"{', '.join(CHANGEABLE)}; leave it out, or start a run from a checkpoint with trainer.resume_mode="
            "resume_path and trainer.resume_from_path",
        )
    return resolve({**leaves(config.model_dump(mode="json")), **changes}) if changes else config
