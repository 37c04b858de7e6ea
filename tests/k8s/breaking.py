"""Ways to break a rendered overlay in one place, as `mutations.yaml` says them.

A place is a path of words, `spec template spec containers mlflow image`; entries of a list go by name or number, and a
word that begins with $ stands for one of the file's `places`.
"""

import copy
from collections.abc import Mapping
from typing import Any

import yaml

from tests.k8s.checks.model import Object, title
from tests.k8s.checks.render import Render

RAY_SERVICE = "RayService/trackway"


def broken(render: Render, how: Mapping[str, Any], places: Mapping[str, str]) -> Render:
    """A copy, broken."""
    objects = list(render.objects)
    match how:
        case {"remove": where}:
            objects.remove(_find(objects, where))
        case {"object": one}:
            objects.append(one)
        case {"serve": path}:
            spec = _copied(objects, RAY_SERVICE)["spec"]
            config = yaml.safe_load(spec["serveConfigV2"])
            _apply(config, how, _spelt_out(path, places))
            spec["serveConfigV2"] = yaml.safe_dump(config)
        case _:
            path = next(how[kind] for kind in ("change", "drop", "rename", "add", "respell") if kind in how)
            _apply(_copied(objects, how.get("in", RAY_SERVICE)), how, _spelt_out(path, places))
    return Render(render.name, objects, render.secrets)


def _spelt_out(path: str, places: Mapping[str, str]) -> str:
    return " ".join(places[word[1:]] if word.startswith("$") else word for word in path.split())


def _apply(manifest: Object, how: Mapping[str, Any], path: str) -> None:
    *above, last = path.split()
    node: Any = manifest
    for word in above:
        node = node[_key(node, word)]
    key = _key(node, last)
    match how:
        case {"rename": _, "to": name}:
            node[name] = node.pop(key)
        case {"add": _, "entry": entry}:
            node[key].append(entry)
        case {"respell": _, "old": old, "new": new}:
            assert old in node[key]
            node[key] = node[key].replace(old, new)
        case {"to": value}:
            node[key] = value
        case _:
            del node[key]


def _copied(objects: list[Object], where: str) -> Object:
    """A copy of that object, in its place."""
    at = objects.index(_find(objects, where))
    objects[at] = copy.deepcopy(objects[at])
    return objects[at]


def _find(objects: list[Object], where: str) -> Object:
    """By Kind/name; `name-*` for one with kustomize's hash."""
    begins = where.removesuffix("*")
    [manifest] = [
        manifest
        for manifest in objects
        if title(manifest) == where or (begins != where and title(manifest).startswith(begins))
    ]
    return manifest


def _key(node: Any, word: str) -> str | int:
    if not isinstance(node, list):
        return word
    names = [item.get("name") or item.get("groupName") if isinstance(item, dict) else None for item in node]
    return names.index(word) if word in names else int(word)
