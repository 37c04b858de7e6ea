"""What the clients import before they call a service."""

import subprocess
import sys

HEAVY = ["aiohttp", "opentelemetry.sdk.trace", "pydantic_settings", "psutil"]


def test_the_clients_import_no_tracing_sdk_and_no_aiohttp_before_a_call() -> None:
    program = f"import sys, trackway.clients; print([name for name in {HEAVY} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout == "[]\n"


def test_every_name_of_tracing_is_there_although_most_are_imported_late() -> None:
    program = "import trackway.tracing as t; print([name for name in t.__all__ if not callable(getattr(t, name))])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout == "[]\n"
