"""The OpenTelemetry collector's configuration, merged from its arguments, against its pod."""

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import yaml

from tests.k8s.checks.environment import environment, filled, mounted_files
from tests.k8s.checks.model import Fault, Object, parsed, part, walk
from tests.k8s.checks.pods import Container, Pod
from tests.k8s.checks.render import Render

_PARTS = ("receivers", "processors", "exporters")
_VARIABLE = re.compile(r"\$\{env:(\w+)\}")
_LISTENS = re.compile(r"0\.0\.0\.0:(\d+)")


def faults(render: Render) -> Iterator[Fault]:
    """Missing components, unset variables, ports that the pod does not open, and read-only folders."""
    for pod in render.pods:
        for container in pod.containers:
            files = mounted_files(render, pod, container)
            for file in files.keys() & set(_sources(container)):
                if not isinstance(_read(files[file]), dict):
                    path, got = f"{container.path}.args[--config]", file
                    yield Fault(pod.owner, path, "a file with a mapping in YAML", got, "correct its ConfigMap")
            config = in_use(render, pod, container)
            if config:
                yield from _of_container(render, pod, container, config)


def in_use(render: Render, pod: Pod, container: Container) -> Object | None:
    """The components that the pipelines use; None for a container that is not a collector."""
    config: Object = {}
    for source in _sources(container):
        if source.startswith("yaml:"):
            path, _, value = source.removeprefix("yaml:").rpartition(": ")
            laid: Any = _read(value)
            for key in reversed(path.split("::")):
                laid = {key: laid}
            config = _merged(config, laid)
        elif source in (files := mounted_files(render, pod, container)):
            content = _read(files[source])
            config = _merged(config, content if isinstance(content, dict) else {})
    return _used(config) if "pipelines" in config.get("service", {}) else None


def _of_container(render: Render, pod: Pod, container: Container, config: Object) -> Iterator[Fault]:
    path = f"{container.path}.args[--config]"
    known = environment(render, container)
    declared = {port["containerPort"] for port in container.spec.get("ports") or []}
    mounts = container.spec.get("volumeMounts") or []
    writable = [mount["mountPath"].rstrip("/") for mount in mounts if not mount.get("readOnly")]
    for missing in config["missing"]:
        yield Fault(pod.owner, path, "a part that the configuration has", missing, "add it, or leave it out")
    for below, key, value in walk(config):
        if not isinstance(value, str):
            continue
        for name in set(_VARIABLE.findall(value)) - known.keys():
            yield Fault(pod.owner, f"{path}.{below}", f"${name} in the container's env", "none", "set the variable")
        for port in _LISTENS.findall(value):
            if int(port) not in declared:
                got, expected = str(port), f"a port of the container ({', '.join(map(str, sorted(declared)))})"
                yield Fault(pod.owner, f"{path}.{below}", expected, got, "declare it")
        if key == "directory" and not any(f"{value}/".startswith(f"{mount}/") for mount in writable):
            expected = f"a folder on a volume that it may write ({', '.join(writable) or 'there is none'})"
            yield Fault(pod.owner, f"{path}.{below}", expected, value, "mount one there")


def text(render: Render, container: Container, config: Object) -> str:
    """The configuration with the container's variables filled in."""
    return filled(json.dumps(config), environment(render, container))


def _sources(container: Container) -> list[str]:
    arguments = [
        str(argument) for argument in [*(container.spec.get("command") or []), *(container.spec.get("args") or [])]
    ]
    joined = [argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")]
    apart = [after for before, after in pairwise(arguments) if before == "--config"]
    return joined + apart


def _read(text: str) -> Any:
    """The parsed YAML; None if it is invalid."""
    with contextlib.suppress(yaml.YAMLError):
        return parsed(text)


def _merged(below: Object, above: Object) -> Object:
    made = copy.deepcopy(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = _merged(made[key], value) if both else value
    return made


def _used(config: Object) -> Object:
    """The configuration without components that no pipeline uses."""
    pipelines = config["service"]["pipelines"].values()
    named = {kind: {name for pipeline in pipelines for name in pipeline.get(kind) or []} for kind in _PARTS}
    parts = {kind: config.get(kind) or {} for kind in _PARTS}
    idle = [exporter for name, exporter in parts["exporters"].items() if name not in named["exporters"]]
    only_idle = {part(exporter, "auth.authenticator") for exporter in idle}
    extensions = set(config["service"].get("extensions") or [])
    missing = sorted(name for kind in _PARTS for name in named[kind] - parts[kind].keys())
    missing += sorted(extensions - (config.get("extensions") or {}).keys())
    return {
        **{
            kind: {name: component for name, component in parts[kind].items() if name in named[kind]} for kind in _PARTS
        },
        "extensions": {
            name: component
            for name, component in (config.get("extensions") or {}).items()
            if name in extensions and name not in only_idle
        },
        "telemetry": config["service"].get("telemetry") or {},
        "missing": missing,
    }
