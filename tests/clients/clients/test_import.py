"""What the clients import, and when."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ALL_NAMES = "from trackway.clients import *"


def imported(program: str, modules: list[str]) -> list[str]:
    """Those of the modules that are imported once the program has run in a process of its own."""
    program = f"import sys; {program}; print(*[name for name in {modules} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return ended.stdout.split()


def test_the_package_alone_imports_no_client_and_no_library() -> None:
    heavy = ["httpx", "pydantic", "asyncio", "opentelemetry", "trackway.wire", "trackway.clients.base"]

    assert imported("import trackway.clients", heavy) == []


def test_the_clients_import_no_tracing_sdk_and_no_aiohttp_before_a_call() -> None:
    heavy = ["aiohttp", "opentelemetry.sdk.trace", "pydantic_settings", "psutil"]

    assert imported(ALL_NAMES, [*heavy, "httpx"]) == ["httpx"]


def test_a_client_imports_no_other_client() -> None:
    clients = [f"trackway.clients.{name}" for name in ("agent", "reward", "rollout", "tools", "trainer")]

    assert imported("from trackway.clients import TrainerClient", clients) == ["trackway.clients.trainer"]


@pytest.mark.parametrize("package", ["trackway.clients", "trackway.tracing"])
def test_every_name_is_there_although_most_are_imported_late(package: str) -> None:
    program = f"import {package} as p; print([name for name in p.__all__ if not callable(getattr(p, name))])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout == "[]\n"
