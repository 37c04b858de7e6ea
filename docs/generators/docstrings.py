"""The docstrings below the fields of a class, which Python itself does not keep."""

import inspect
from functools import cache
from pathlib import Path

import griffe

from generators.markdown import sentence


def field_docstrings(cls: type) -> dict[str, str]:
    """Docstring by field of a class and of the project's classes that it derives from, as Markdown on one line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("trackway."):
            members = _parsed(inspect.getfile(base)).members[base.__name__].members
            found |= {
                name: sentence(" ".join(member.docstring.value.split()))
                for name, member in members.items()
                if member.docstring
            }
    return found


@cache
def _parsed(file: str) -> griffe.Module:
    path = Path(file)
    return griffe.visit(path.stem, filepath=path, code=path.read_text())
