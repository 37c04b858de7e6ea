"""Watching own code: each change is seen, and a deployment without own code has nothing to watch."""

import threading
from pathlib import Path

import pytest

from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.config import serve_config
from trackway.deploy.local.reload import changes
from trackway.system.user_error import UserError


def write_until(file: Path, seen: threading.Event) -> None:
    """Write the file again and again, as the watch begins at a time that nothing tells."""
    number = 0
    while not seen.wait(0.1):
        number += 1
        file.write_text(f"VERSION = {number}")


def test_a_change_of_own_code_is_seen_and_the_watch_ends_on_demand(tmp_path: Path) -> None:
    package = tmp_path / "my_agent"
    package.mkdir()
    (package / "__init__.py").write_text("")
    own = {"modules": ["my_agent"], "code_path": str(tmp_path)}
    config = serve_config.with_options(serve_config.load(CPU_CONFIG), "reward", own)
    seen, stop = threading.Event(), threading.Event()
    writer = threading.Thread(target=write_until, args=(package / "__init__.py", seen), daemon=True)

    for number, _ in enumerate(changes(config, stop)):
        if number == 0:  # the watch has begun
            writer.start()
        else:
            seen.set()
            stop.set()

    writer.join(10.0)
    assert seen.is_set()
    assert not writer.is_alive()


def test_without_own_code_there_is_nothing_to_watch() -> None:
    with pytest.raises(UserError, match=r"--reload: expected own code to watch .* got none; start without it"):
        next(changes(serve_config.load(CPU_CONFIG)))
