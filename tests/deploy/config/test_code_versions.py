"""Own code in a Serve config: its version restarts the services that load it, and no other."""

from pathlib import Path
from typing import Any

import pytest

from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.config import serve_config
from trackway.deploy.config.code_versions import changed_since_start, own_code, watched, with_versions

SERVICES = ("rollout", "tools", "reward", "agent", "trainer")


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    package = tmp_path / "my_agent"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "rewards.py").write_text("")
    config = serve_config.load(CPU_CONFIG)
    for service in ("agent", "tools", "reward"):
        config = serve_config.with_options(config, service, {"modules": ["my_agent"], "code_path": str(tmp_path)})
    function = {"custom_reward_function": {"path": str(tmp_path / "rewards.py")}}
    return serve_config.with_options(config, "reward", function)


def versions(config: dict[str, Any]) -> dict[str, object]:
    return {name: serve_config.args_of(config, name).get("code_version") for name in SERVICES}


def test_a_config_without_own_code_stays_as_it_is() -> None:
    config = serve_config.load(CPU_CONFIG)

    assert with_versions(config) == config
    assert watched(config) == []


def test_a_change_is_a_new_version_for_the_services_that_load_it(config: dict[str, Any], tmp_path: Path) -> None:
    first = versions(with_versions(config))
    (tmp_path / "rewards.py").write_text("changed = True")
    second = versions(with_versions(config))
    (tmp_path / "my_agent" / "__init__.py").write_text("changed = True")
    third = versions(with_versions(config))

    def changed(before: dict[str, object], after: dict[str, object]) -> set[str]:
        return {name for name in SERVICES if before[name] != after[name]}

    assert {name for name in SERVICES if first[name] is None} == {"rollout", "trainer"}
    assert changed(first, second) == {"reward"}
    assert changed(second, third) == {"agent", "tools", "reward"}


def test_packages_and_files_are_watched_once(config: dict[str, Any], tmp_path: Path) -> None:
    assert watched(config) == [tmp_path / "my_agent", tmp_path / "rewards.py"]


def test_services_with_earlier_files_are_told(config: dict[str, Any], tmp_path: Path) -> None:
    loaded = {name: settings.version() for name, settings in own_code(config).items()}
    (tmp_path / "rewards.py").write_text("changed = True")

    [problem] = changed_since_start(config, loaded)

    assert "expected the reward service to have loaded the files as they are now" in problem
    assert "run `trackway up --reload`" in problem
    assert changed_since_start(config, {}) == []


def test_settings_that_are_not_valid_are_left_to_serve(config: dict[str, Any]) -> None:
    assert "tools" not in own_code(serve_config.with_options(config, "tools", {"tool_concurrency": 0}))
