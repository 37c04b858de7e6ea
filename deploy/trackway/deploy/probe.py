"""Readiness of the replicas on this machine, for a worker pod: `python -m trackway.deploy.probe`.

Each replica answers at a Unix socket in `$TRACKWAY_PROBE_DIR`. All of them must say that they are ready, and each
service named on the command line must have one here. Without names, one replica of any service is enough. A replica
that does not answer in time is stuck. A killed replica counts no more, and its socket is removed.

The exit status is 0 when ready. Imports the standard library only: it runs every few seconds.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def not_ready(folder: Path, services: Sequence[str], timeout_s: float) -> str:
    """Why the replicas with sockets in `folder` are not ready, or an empty string. Returns within `timeout_s`."""
    end, answered = time.monotonic() + timeout_s, set[str]()
    for path in sorted(folder.glob("*.sock")):
        try:
            state = asked(path, end)
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)  # its process was killed
            continue
        except (OSError, ValueError) as error:
            return f"replica {path.stem} does not answer: {error or type(error).__name__}"
        if not state["ready"]:
            return f"replica {path.stem}: {state['reason']}"
        answered.add(path.stem.partition("-")[0])
    missing = sorted(set(services) - answered)
    if missing or not answered:
        return f"no replica of {', '.join(missing) or 'any service'} runs here"
    return ""


def asked(path: Path, end: float) -> dict[str, Any]:
    """The answer of the replica at a socket. `end` is a time of `time.monotonic`. Raises OSError and ValueError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(max(0.001, end - time.monotonic()))
        connection.connect(str(path))
        parts: list[bytes] = []
        while part := connection.recv(65536):
            parts.append(part)
            connection.settimeout(max(0.001, end - time.monotonic()))
    answer: dict[str, Any] = json.loads(b"".join(parts))
    return answer


def main(arguments: list[str] | None = None) -> int:
    """Print why the replicas here are not ready, if they are not."""
    parser = argparse.ArgumentParser(prog="trackway.deploy.probe", description="Whether the replicas here are ready.")
    parser.add_argument("services", nargs="*", help="services that must have a replica here (default: any one)")
    parser.add_argument("--timeout", type=float, default=6.0, help="longest wait for all answers, in seconds")
    options = parser.parse_args(arguments)
    folder = os.environ.get("TRACKWAY_PROBE_DIR")
    if not folder:
        print("expected the folder of the replicas' sockets, got none; set TRACKWAY_PROBE_DIR", file=sys.stderr)
        return 2
    reason = not_ready(Path(folder), options.services, options.timeout)
    print(reason or "ready")
    return 1 if reason else 0


if __name__ == "__main__":
    raise SystemExit(main())
