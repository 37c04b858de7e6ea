"""Check that every replica runs on the same interpreter and packages as this process.

A run's worker makes the same comparison with the trainer service when it starts (`trackway.trainer.worker`).
"""

from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.status import replicas_at
from trackway.serving.environment_check import REMEDY, difference, installation
from trackway.system.user_error import UserError


def check_interpreters(deployment: Deployment) -> None:
    """Compare the installation of every replica with this process. Raises UserError or TrackwayError."""
    here = installation()
    for service in deployment.services:
        for replica in replicas_at(deployment.url(service)):
            different = difference(here, replica.health)
            if different:
                name = replica.health.replica
                raise UserError(f"{service} replica {name} runs on a different installation: {different}; {REMEDY}")
