"""Which packages of an extra this environment lacks, by the package's own metadata."""

import re
from importlib.metadata import PackageNotFoundError, distribution, requires

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*;.*\bextra == ['\"](?P<extra>[\w-]+)['\"]")
"""`jinja2>=3.1; extra == 'agent'`. The build has replaced extras inside extras by their packages."""


def missing_packages(extra: str) -> list[str]:
    """The packages that `trackway[extra]` names and that are not installed, sorted. Versions are not compared.

    Raises ValueError for an extra that does not exist.
    """
    lines = [match for line in requires("trackway") or [] if (match := _REQUIREMENT.match(line))]
    named = {line["name"] for line in lines if line["extra"] == extra}
    if not named:
        raise ValueError(f"expected an extra of trackway, got {extra!r}")
    return sorted(name for name in named if not _installed(name))


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
