"""A manifest as YAML gives it, and one thing that is wrong with it."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import yaml

Object = dict[str, Any]
"""A manifest, or a part of one."""


class Fault(NamedTuple):
    """One thing that is wrong in an object."""

    where: str
    path: str
    expected: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.path}: expected {self.expected}, got {self.got}; {self.remedy}"


def title(one: Object) -> str:
    """Kind/name."""
    return f"{one.get('kind', '?')}/{part(one, 'metadata.name') or '?'}"


def part(one: object, path: str) -> Any:
    """What stands at a dotted path, or None."""
    for key in path.split("."):
        one = one.get(key) if isinstance(one, dict) else None
    return one


@cache
def parsed(text: str) -> Any:
    """YAML, read once: not to be changed."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def walk(node: object, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, key, value) of every entry below; the entries of a list are called by their names."""
    if isinstance(node, dict):
        for key, value in node.items():
            below = f"{path}.{key}" if path else str(key)
            yield below, key, value
            yield from walk(value, below)
    elif isinstance(node, list):
        for at, value in enumerate(node):
            yield from walk(value, f"{path}[{called(value, at)}]")


def called(entry: object, at: int) -> str:
    """How a path names an entry of a list."""
    name = (entry.get("name") or entry.get("groupName")) if isinstance(entry, dict) else None
    return str(name or at)
