"""All checks of one overlay, in order."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.k8s.checks import (
    addresses,
    applications,
    budgets,
    collector,
    defaults,
    drain,
    folders,
    monitoring,
    network,
    placement,
    policy,
    ports,
    probes,
    rayservice,
    references,
    schemas,
    selectors,
    serve,
    settings,
    versions,
)
from tests.k8s.checks.model import Fault
from tests.k8s.checks.render import Render

Check = Callable[[Render], Iterator[Fault]]

STAGES: tuple[dict[str, Check], ...] = (
    {"schemas": schemas.faults},
    {"references": references.faults, "serve": serve.faults},
    {"applications": applications.faults},
    {
        "settings": settings.faults,
        "placement": placement.faults,
        "ports": ports.faults,
        "probes": probes.faults,
        "drain": drain.faults,
        "folders": folders.faults,
        "addresses": addresses.faults,
        "collector": collector.faults,
        "network": network.faults,
        "monitoring": monitoring.faults,
        "selectors": selectors.faults,
        "budgets": budgets.faults,
        "defaults": defaults.faults,
        "policy": policy.faults,
        "rayservice": rayservice.faults,
        "versions": versions.faults,
    },
)
"""The checks of a stage rely on what those before it found in order."""
NAMES = [name for stage in STAGES for name in stage]


class Found(NamedTuple):
    """A fault, the overlay that has it, and the check that found it."""

    overlay: str
    check: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.overlay}: {self.fault} [{self.check}]"


def found(render: Render) -> list[Found]:
    """The faults of an overlay: all from the first stage that finds any."""
    for checks in STAGES:
        faults = [Found(render.name, name, fault) for name, check in checks.items() for fault in check(render)]
        if faults:
            return list(dict.fromkeys(faults))
    return []
