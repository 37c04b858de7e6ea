"""Who may call the services that `trackway up` starts: one setting for all five, refused early when it cannot work."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from trackway.deploy.graph import Replica
from trackway.deploy.local import up
from trackway.deploy.local.access import address_of, check_access
from trackway.deploy.local.settings import UpSettings
from trackway.reward.settings import RewardSettings
from trackway.system.process import UserError
from trackway.tools.settings import ToolsSettings

OPERATOR = "operator-0123456789abcdef"
SERVICES = ["rollout", "tools", "reward", "agent", "trainer"]


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"ops": {"secret": OPERATOR, "scopes": ["admin"]}}))
    file.chmod(0o400)
    return file


def config(host: str, **args: dict[str, Any]) -> dict[str, Any]:
    """A Serve config as `up` completes it."""
    return {
        "http_options": {"host": host},
        "applications": [{"name": name, "args": args.get(name, {})} for name in SERVICES],
    }


def test_one_setting_gives_every_service_the_tokens(tokens_file: Path) -> None:
    settings = UpSettings(tokens_file=tokens_file)
    applications: Any = up._completed(config("127.0.0.1"), settings, "http://here", 1, "http://mlflow")["applications"]
    assert [app["args"]["auth"] for app in applications] == [{"tokens_file": str(tokens_file)}] * 5


def test_what_the_serve_config_says_of_a_service_is_added(tokens_file: Path) -> None:
    given = config("127.0.0.1", tools={"auth": {"trust_loopback": False}})
    applications: Any = up._completed(given, UpSettings(tokens_file=tokens_file), "", 1, "")["applications"]
    assert applications[1]["args"]["auth"] == {"tokens_file": str(tokens_file), "trust_loopback": False}


def test_this_machine_only_needs_no_tokens() -> None:
    check_access(config("127.0.0.1"))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::"])
def test_other_machines_are_let_in_with_tokens_only(host: str, tokens_file: Path, monkeypatch) -> None:
    with pytest.raises(UserError, match=f"http_options.host {host} is reachable from other machines.* --tokens-file"):
        check_access(config(host))
    monkeypatch.setenv("TRACKWAY_TOKEN", OPERATOR)
    auth = {"auth": {"tokens_file": str(tokens_file)}}
    with pytest.raises(UserError, match="service agent has no tokens"):
        check_access(config(host, **dict.fromkeys(["rollout", "tools", "reward", "trainer"], auth)))
    check_access(config(host, **dict.fromkeys(SERVICES, auth)))


def test_tokens_of_the_environment_are_those_of_every_service(monkeypatch) -> None:
    monkeypatch.setenv("TRACKWAY_AUTH__TOKENS__OPS__SECRET", OPERATOR)
    monkeypatch.setenv("TRACKWAY_TOKEN", OPERATOR)
    check_access(config("0.0.0.0"))


@pytest.mark.parametrize("token", [None, "another-0123456789abcdef"])
def test_services_with_tokens_need_one_for_their_own_calls(token: str | None, tokens_file: Path, monkeypatch) -> None:
    if token is not None:
        monkeypatch.setenv("TRACKWAY_TOKEN", token)
    with pytest.raises(UserError, match="service rollout: expected TRACKWAY_TOKEN to be one of its tokens") as caught:
        check_access(config("127.0.0.1", rollout={"auth": {"tokens_file": str(tokens_file)}}))
    assert token is None or token not in str(caught.value)


def test_a_file_of_no_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"service tools: auth.tokens_file .*missing.json: No such file"):
        check_access(config("127.0.0.1", tools={"auth": {"tokens_file": str(tmp_path / "missing.json")}}))


@pytest.mark.parametrize(("host", "address"), [("0.0.0.0", "127.0.0.1"), ("10.1.2.3", "10.1.2.3")])
def test_this_machine_calls_what_it_started_at_an_address_of_its_own(host: str, address: str) -> None:
    assert address_of(host) == address


def local_client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000")


@pytest.mark.anyio
async def test_a_replica_asks_itself_without_a_token(tokens_file: Path) -> None:
    settings = ToolsSettings.model_validate({"auth": {"tokens_file": tokens_file, "trust_loopback": False}})
    replica = Replica("tools", settings)
    await replica.check_health()
    described = await replica.describe()
    async with local_client(replica._app) as client:
        assert (await client.get("/replicas")).status_code == 401
    assert (described.ready.ready, described.health.service) == (True, "tools")


@pytest.mark.anyio
@pytest.mark.parametrize(("haproxy", "status"), [("0", 200), ("1", 401)])
async def test_behind_rays_haproxy_no_caller_counts_as_local(haproxy: str, status: int, monkeypatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", haproxy)
    replica = Replica("reward", RewardSettings())
    async with local_client(replica._app) as client:
        assert (await client.get("/scorers")).status_code == status
    await replica.check_health()
