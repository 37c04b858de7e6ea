"""The docstrings below the fields of a class, which Python itself does not keep."""

import inspect
from functools import cache
from pathlib import Path

import griffe


def field_docstrings(cls: type) -> dict[str, str]:
    """Docstring by field of a class and of the project's classes that it derives from; each on one line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("trackway."):
            members = _parsed(inspect.getfile(base)).members[base.__name__].members
            found |= {name: " ".join(one.docstring.value.split()) for name, one in members.items() if one.docstring}
    return found


@cache
def _parsed(file: str) -> griffe.Module:
    path = Path(file)
    return griffe.visit(path.stem, filepath=path, code=path.read_text())
