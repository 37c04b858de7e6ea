"""Every replica must run on our own interpreter and packages; a mismatch is named, with both sides and the remedy.

A run's own process compares itself with the trainer service likewise, when it starts (`trackway.trainer.worker`).
"""

from collections.abc import Iterable

from trackway.deploy.deployment.status import replicas_at
from trackway.serving.environment_check import REMEDY, difference, installation
from trackway.system.user_error import UserError


def check_interpreters(base_url: str, services: Iterable[str]) -> None:
    """Ask every replica what it runs on and compare with this process; raises UserError or TrackwayError."""
    here = installation()
    for service in services:
        for replica in replicas_at(f"{base_url}/{service}"):
            different = difference(here, replica.health)
            if different:
                name = replica.health.replica
                raise UserError(f"{service} replica {name} runs on another installation: {different}; {REMEDY}")
