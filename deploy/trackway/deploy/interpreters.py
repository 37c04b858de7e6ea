"""Every replica must run on our own interpreter and packages; a mismatch is named, with both sides.

People have lost days to workers that ran on another Python than the one they had prepared.
"""

from collections.abc import Iterable

from trackway.deploy.errors import UserError
from trackway.deploy.status import replicas_at
from trackway.serving.app import process_health
from trackway.wire.health import Health


def check_interpreters(base_url: str, services: Iterable[str]) -> None:
    """Ask every replica what it runs on and compare with this process; raises UserError or TrackwayError."""
    here = process_health("launcher", "here")
    for service in services:
        for replica in replicas_at(f"{base_url}/{service}"):
            difference = compare(here, replica.health)
            if difference:
                raise UserError(
                    f"{service} replica {replica.health.replica} runs on another installation: {difference}"
                )


def compare(here: Health, there: Health) -> str:
    """What differs between two processes, empty when nothing does."""
    differences = []
    if (here.executable, here.python) != (there.executable, there.python):
        ours, theirs = f"{here.executable} ({here.python})", f"{there.executable} ({there.python})"
        differences.append(f"Python: expected {ours}, got {theirs}")
    for package in sorted(here.versions.keys() | there.versions.keys()):
        ours, theirs = here.versions.get(package, "none"), there.versions.get(package, "none")
        if ours != theirs:
            differences.append(f"{package}: expected {ours}, got {theirs}")
    return "; ".join(differences)
