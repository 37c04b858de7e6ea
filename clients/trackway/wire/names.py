"""Rules for the names of runs and projects.

A run's name is a folder and the first part of each trajectory's id: letters and digits of any script, without spaces
and slashes. The label of a project or an experiment is only displayed and sent to a backend, so it may have those.
"""

import re
import unicodedata
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

LONGEST_RUN_NAME = 128
"""Most bytes of a run's name in UTF-8."""
RESERVED_NAMES = frozenset({"mlflow", "spool", "weights"})
"""Folders of an outputs folder that are not runs."""
LONGEST_LABEL = 256
"""Characters."""


def checked_run_name(name: str) -> str:
    """The name, if it is valid for a run. Raises ValueError otherwise."""
    fits = 1 <= len(name) <= LONGEST_RUN_NAME and name[0].isalnum() and all(map(_in_a_run_name, name))
    if not fits or len(name.encode()) > LONGEST_RUN_NAME:
        raise ValueError(
            f"expected a run name of letters, digits, '.', '_' and '-' that begins with a letter or a digit and has at "
            f"most {LONGEST_RUN_NAME} bytes, got {_shown(name)}; rename it"
        )
    if name in RESERVED_NAMES:
        raise ValueError(f"expected a run name other than {', '.join(sorted(RESERVED_NAMES))}, got {name!r}; rename it")
    return name


def checked_label(label: str) -> str:
    """The label, if it is valid for a project or an experiment. Raises ValueError otherwise."""
    parts = re.split(r"[/\\]", label)
    if not 1 <= len(label) <= LONGEST_LABEL or label != label.strip() or not label.isprintable() or ".." in parts:
        raise ValueError(
            f"expected a name of 1 to {LONGEST_LABEL} printable characters without spaces at its ends and without "
            f"'..' as a part, got {_shown(label)}; rename it"
        )
    return label


RunName = Annotated[str, AfterValidator(checked_run_name)]
RunNameInPath = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_RUN_NAME, pattern=r"^\w[\w.-]*$")]
"""Shows a pattern in OpenAPI; the complete rule, with a better message, is checked after it."""
Label = Annotated[str, AfterValidator(checked_label)]


def _in_a_run_name(character: str) -> bool:
    """Whether the character is a letter, a digit, a combining mark, `.`, `_` or `-`."""
    return character.isalnum() or character in "._-" or unicodedata.category(character) in ("Mn", "Mc")


def _shown(name: str) -> str:
    """The beginning of the name in ASCII, for logs."""
    return ascii(name) if len(name) <= LONGEST_LABEL else f"{name[:40]!a} of {len(name)} characters"
