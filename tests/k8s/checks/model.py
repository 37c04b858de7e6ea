"""Manifests as parsed YAML, and faults in them."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import yaml

Object = dict[str, Any]
"""A manifest, or a part of one."""


class Fault(NamedTuple):
    """A fault in an object."""

    where: str
    path: str
    expected: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.path}: expected {self.expected}, got {self.got}; {self.remedy}"


def title(manifest: Object) -> str:
    """Kind/name."""
    return f"{manifest.get('kind', '?')}/{part(manifest, 'metadata.name') or '?'}"


def part(node: object, path: str) -> Any:
    """The value at a dotted path, or None."""
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


@cache
def parsed(text: str) -> Any:
    """Parsed YAML, cached: do not modify."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def walk(node: object, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, key, value) of every nested entry; list entries are identified by their names."""
    if isinstance(node, dict):
        for key, value in node.items():
            below = f"{path}.{key}" if path else str(key)
            yield below, key, value
            yield from walk(value, below)
    elif isinstance(node, list):
        for at, value in enumerate(node):
            yield from walk(value, f"{path}[{called(value, at)}]")


def called(entry: object, at: int) -> str:
    """The identifier of a list entry in a path."""
    name = (entry.get("name") or entry.get("groupName")) if isinstance(entry, dict) else None
    return str(name or at)
