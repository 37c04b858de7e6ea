"""`trackway serve`: one service alone answers, and what is wrong with its settings is one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from trackway.deploy.local.single_service import app_of
from trackway.serving.settings import ServiceName
from trackway.system.process import UserError
from trackway.wire.errors import TrackwayError

pytestmark = pytest.mark.slow  # a process of its own


@pytest.fixture(autouse=True)
def without_the_suites_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite has variables of its own, which are no settings."""
    for name in [name for name in os.environ if name.startswith("TRACKWAY_TEST_")]:
        monkeypatch.delenv(name)


def test_the_tool_server_alone_answers_and_its_page_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trackway.deploy.cli", "serve", "tools", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+(?=/docs)", process.stdout.readline())
        assert address is not None
        transport = httpx.HTTPTransport(retries=8)
        with httpx.Client(base_url=address[0], transport=transport, follow_redirects=True, timeout=30) as client:
            page = client.get("/")
            files = re.findall(r'(?:href|src)="([^"]+)"', page.text)
            sizes = [len(client.get(f"/{file}").raise_for_status().content) for file in files]
            tools = client.get("/tools").json()
    finally:
        process.terminate()
        status = process.wait(30)
        process.stdout.close()

    assert status == 0
    assert page.url.path == "/docs"
    assert len(files) == 3
    assert min(sizes) > 100
    assert "://" not in " ".join(files)
    assert "calculator" in str(tools)


def test_the_address_of_a_service_is_one_json_document(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trackway.deploy.cli", "serve", "tools", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            document = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
            transport = httpx.HTTPTransport(retries=8)
            with httpx.Client(base_url=document["url"], transport=transport, timeout=30) as client:
                health = client.get("/health").json()
        finally:
            process.terminate()
            rest = process.stdout.read() if process.stdout is not None else ""

    assert (document["service"], health["service"], rest) == ("tools", "tools", "")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TRACKWAY_TOOLS_ULR", "x", "got TRACKWAY_TOOLS_ULR; did you mean TRACKWAY_TOOLS_URL?"),
        ("TRACKWAY_QQQQQQQQ_XXXX", "x", "got TRACKWAY_QQQQQQQQ_XXXX; remove it"),
        (
            "TRACKWAY_MAX_BODY_BYTES",
            "abc",
            r"reward: max_body_bytes \(TRACKWAY_MAX_BODY_BYTES\): Input should be",
        ),
        ("TRACKWAY_AUTH__TOKENS", "3", r"reward: auth\.tokens \(TRACKWAY_AUTH__TOKENS\): Input should be"),
        ("TRACKWAY_EXTRA_SCORERS", '["nowhere:Scorer"]', "reward: .*nowhere"),
    ],
)
def test_a_wrong_setting_is_one_line(variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(UserError, match=message):
        app_of("reward")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TRACKWAY_TRACING__TOKEN2TEXT", "false"),
        ("TRACKWAY_TOKEN", "a-token-0123456789"),
        ("TRACKWAY_UP_PORT", "1"),
        ("TRACKWAY_MODEL_PATH", "/models/other"),
    ],
)
def test_settings_of_other_parts_are_no_mistake(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)

    assert app_of("reward").title == "Trackway reward"


def test_settings_come_from_the_serve_config(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        "applications:\n- name: reward\n  route_prefix: /reward\n  import_path: trackway.deploy.graph:reward\n"
        "  args: {max_body_bytes: 2048}\n"
    )

    assert app_of("reward", config).state.settings.max_body_bytes == 2048


@pytest.mark.parametrize("service", ["rollout", "agent"])
def test_a_service_without_a_model_names_the_variable(
    service: ServiceName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRACKWAY_MODEL_PATH", raising=False)

    with pytest.raises((UserError, TrackwayError), match=r"model_path \(TRACKWAY_MODEL_PATH\)"):
        app_of(service)
