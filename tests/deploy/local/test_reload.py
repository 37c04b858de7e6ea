"""Watching own code: each change is seen, and a deployment without own code has nothing to watch."""

import threading
from pathlib import Path

import pytest

from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.config import serve_config
from trackway.deploy.config.code_versions import with_versions
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.reload import changes, reload
from trackway.system.process import UserError


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

    writer.join(60)
    assert seen.is_set()
    assert not writer.is_alive()


def test_without_own_code_there_is_nothing_to_watch() -> None:
    with pytest.raises(UserError, match=r"--reload: expected own code to watch .* got none; start without it"):
        next(changes(serve_config.load(CPU_CONFIG)))


def test_services_with_changed_code_are_not_restarted_beside_active_runs(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("")
    config = serve_config.with_options(
        serve_config.load(CPU_CONFIG), "tools", {"function_tool_path": str(tmp_path / "tools.py")}
    )
    here = Deployment(
        base_url="http://127.0.0.1:9", dashboard_url="", mlflow_uri="", outputs=tmp_path, serve_config=config
    )

    with pytest.raises(UserError) as caught:
        reload(here, lambda name, state: None, active_runs=lambda: ["first", "second"])

    assert str(caught.value) == (
        "tools: expected no active run to restart changed services, got first, second; save a file again "
        "once it has ended, or start with --reload --during-runs"
    )
    assert here.serve_config == config
    config = with_versions(config)
    assert reload(here.model_copy(update={"serve_config": config}), print, active_runs=lambda: ["first"]) == []
