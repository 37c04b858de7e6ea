"""The command lines of an external agent in a container: one that runs it, one that removes it whatever became of it.

Variables are named, not given: their values come from the engine's own environment, so that no key is in a list of
processes.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from trackway.agent.settings import ContainerSettings
from trackway.system.experimental import Experimental, warn_experimental
from trackway.wire.errors import ErrorCode, TrackwayError

_ENGINES = ("podman", "docker")


def run_command(
    container: ContainerSettings, name: str, variables: Iterable[str], max_memory_bytes: int | None
) -> list[str]:
    """Runs the image as the container `name` with these variables; the row comes on its standard input."""
    return [
        *(_engine(container.engine), "run", "--rm", "--interactive", "--init", f"--name={name}"),
        f"--network={container.network}",
        *([] if max_memory_bytes is None else [f"--memory{kind}={max_memory_bytes}b" for kind in ("", "-swap")]),
        *(f"--env={variable}" for variable in variables),
        *container.options,
        container.image,
        *container.command,
    ]


def remove_command(container: ContainerSettings, name: str) -> list[str]:
    """Ends and removes the container; docker's goes on when the process that ran it is killed."""
    return [_engine(container.engine), "rm", "--force", name]


def _engine(wanted: str | None) -> str:
    """The engine's program. INVALID_REQUEST when there is none."""
    names = _ENGINES if wanted is None else (wanted,)
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        message = f"external.container: expected {' or '.join(names)} on the agent service's PATH, got none; install it"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    if Path(found).name == "docker":
        warn_experimental(Experimental.DOCKER)
    return found
