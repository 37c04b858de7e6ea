"""The command lines of an external agent in a container: one that runs it, one that removes it whatever became of it.

Variables are named, not given: their values come from the engine's own environment, so that no key is in a list of
processes.
"""

import shutil
from collections.abc import Iterable

from trackway.agent.settings import ExternalSettings
from trackway.wire.errors import ErrorCode, TrackwayError

_ENGINES = ("podman", "docker")


def run_command(settings: ExternalSettings, name: str, variables: Iterable[str]) -> list[str]:
    """Runs the image as the container `name` with these variables; the row comes on its standard input."""
    container = settings.container
    assert container is not None
    memory = settings.max_memory_bytes
    return [
        *(_engine(container.engine), "run", "--rm", "--interactive", "--init", f"--name={name}"),
        f"--network={container.network}",
        *([] if memory is None else [f"--memory={memory}b", f"--memory-swap={memory}b"]),
        *(f"--env={variable}" for variable in variables),
        *container.options,
        container.image,
        *container.command,
    ]


def remove_command(settings: ExternalSettings, name: str) -> list[str]:
    """Ends and removes the container; docker's goes on when the process that ran it is killed."""
    assert settings.container is not None
    return [_engine(settings.container.engine), "rm", "--force", name]


def _engine(wanted: str | None) -> str:
    """The engine's program. INVALID_REQUEST when there is none."""
    names = _ENGINES if wanted is None else (wanted,)
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        message = f"external.container: expected {' or '.join(names)} on the agent service's PATH, got none; install it"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return found
