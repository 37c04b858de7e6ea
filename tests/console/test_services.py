"""The pages over running services: what is passed on to them, with whose token, and what is not."""

from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from tests.console import accessibility
from tests.console.browser import Browser
from tests.console.conftest import Serve
from tests.console.example_run import rollout
from tests.console.walk import walk
from trackway.console.app import create_app
from trackway.reward.app import create_app as reward_app
from trackway.serving import AuthSettings, ServiceSettings
from trackway.serving.auth import Token
from trackway.tools.app import create_app as tools_app
from trackway.tools.settings import ToolsSettings

SECRET = "a-secret-of-people"
KNOWN = {"authorization": f"Bearer {SECRET}"}
AUTH = AuthSettings(tokens={"people": Token(secret=SecretStr(SECRET))})
URLS = {"tools": "http://tools/tools", "reward": "http://reward", "rollout": "http://gone"}


@pytest.fixture
def http() -> httpx.AsyncClient:
    """Reaches a tool server with tokens at a prefix, a reward service without, and none at other addresses."""
    tools = tools_app(ToolsSettings(auth=AUTH))

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no one listens", request=request)

    return httpx.AsyncClient(
        mounts={
            "all://tools": httpx.ASGITransport(_below("/tools", tools)),
            "all://reward": httpx.ASGITransport(reward_app()),
            "all://": httpx.MockTransport(gone),
        }
    )


@pytest.fixture
def client(tmp_path: Path, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """The console before these services."""
    monkeypatch.setenv("TRACKWAY_TOKEN", SECRET)  # the console's own environment must not let anyone in
    return TestClient(create_app(tmp_path, services=URLS, http=http))


def _below(prefix: str, app):
    async def below(scope, receive, send) -> None:
        await app({**scope, "path": scope["path"].removeprefix(prefix)}, receive, send)

    return below


def test_a_call_and_a_score_reach_the_services_with_the_token_of_the_caller(client: TestClient) -> None:
    call = {"tool": "calculator", "arguments": {"expression": "6*7"}}
    score = {"data_source": "openai/gsm8k", "solution_str": "#### 42", "ground_truth": "42"}

    assert client.post("/api/try/tool", json=call).status_code == 401
    answer = client.post("/api/try/tool", json=call, headers=KNOWN).json()
    assert (answer["text"], answer["facts"]["reward"]) == ("42", 0.0)
    scored = client.post("/api/try/score", json=score).json()
    assert (scored["text"], scored["facts"]["correct"]) == ("1", 1.0)


def test_only_the_named_routes_are_passed_on(client: TestClient) -> None:
    for tool in ("../instances", "calculator/execute?x=", "a b", "http://elsewhere.test/"):
        reply = client.post("/api/try/tool", json={"tool": tool, "arguments": {}}, headers=KNOWN)
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "invalid_request")
    assert client.post("/api/try/tool", json={"tool": "calculator", "url": "http://elsewhere.test"}).status_code == 422
    for path in ("/api/try/instances", "/api/tools/instances", "/tools/instances"):
        assert client.post(path, json={}, headers=KNOWN).status_code in (404, 405)
    assert client.post("/api/try/tool", json={"tool": "x"}, headers={"origin": "http://evil.test"}).status_code == 401


def test_what_can_be_tried_is_what_answers(client: TestClient) -> None:
    assert client.get("/api/try").status_code == 401
    offer = client.get("/api/try", headers=KNOWN).json()

    assert [tool["function"]["name"] for tool in offer["tools"]] == ["calculator", "calc_gsm8k_reward"]
    assert (offer["model"], offer["scorers"][0]["name"]) == (None, "gsm8k")
    prompt = client.post("/api/try/prompt", json={"prompt": "hello"}, headers=KNOWN).json()
    assert prompt["error"]["code"] == "unavailable"


def test_the_system_page_has_each_service_and_no_token(client: TestClient) -> None:
    reply = client.get("/api/system", headers=KNOWN)
    services = {service["service"]: service for service in reply.json()["services"]}

    assert {name: service["answers"] for name, service in services.items()} == {
        "tools": True,
        "reward": True,
        "rollout": False,
    }
    [replica] = services["tools"]["replicas"]
    assert (replica["ready"], replica["spans_lost"], replica["version"]) == (True, 0, None)
    assert replica["queues"] == {"in_flight": 0.0, "tool_instances": 0.0}
    assert "no one listens" in services["rollout"]["message"]
    assert "passes" not in reply.text and SECRET not in reply.text


@pytest.mark.slow
@pytest.mark.program("chromium")
def test_a_browser_shows_the_services_and_tries_them_with_the_token_of_its_user(
    tmp_path: Path, http: httpx.AsyncClient, serve: Serve, browser: Browser
) -> None:
    url = serve(tmp_path, services=URLS, http=http)
    browser.open(f"{url}#/")
    browser.settled(lambda: browser.click("#tools a[href='#/system']"))
    browser.write("input[name=token]", SECRET)
    browser.press("Enter")
    browser.wait("document.querySelectorAll('table.replicas tbody tr').length === 2")
    assert "1 of 3 do not answer" in browser.text() and "no one listens" in browser.text()
    assert accessibility.faults(browser) == []

    browser.settled(lambda: browser.click("#tools a[href='#/try']"))
    browser.evaluate("document.querySelector('[name=arguments]').value = '{\"expression\": \"6*7\"}'")
    browser.click("form:has([name=tool]) button.primary")
    browser.wait("document.querySelector('form:has([name=tool]) .answer pre')?.innerText === '42'")
    browser.write("[name=solution_str]", "#### 42")
    browser.write("[name=ground_truth]", "42")
    browser.press("Enter")
    browser.wait("document.querySelector('form:has([name=ground_truth]) .answer pre')?.innerText === '1'")
    assert accessibility.faults(browser) == []
    assert [address for address in browser.requests if not address.startswith((url, "data:"))] == []


@pytest.mark.slow
@pytest.mark.program("chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_pages_of_services_errors_and_the_token_fit_both_sizes_and_colour_schemes(
    tmp_path: Path, http: httpx.AsyncClient, serve: Serve, browser: Browser, width: int
) -> None:
    url = serve(tmp_path, services=URLS, http=http)

    def fits(view: str, text: str) -> None:
        for dark in (False, True):
            browser.size(width, dark=dark)
            browser.open(f"{url}#/{view}")
            browser.wait(f"document.getElementById('main').innerText.includes({text!r})")
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), (view, dark)
            tables = "[...document.querySelectorAll('.panel.scroll')]"
            assert browser.evaluate(f"{tables}.every((table) => table.scrollWidth <= table.clientWidth)"), (view, dark)
            assert accessibility.faults(browser) == [], (view, dark)

    browser.open(f"{url}#/")
    browser.evaluate("sessionStorage.clear()")
    fits("system", "This console asks for a token")
    browser.write("input[name=token]", SECRET)
    browser.settled(lambda: browser.press("Enter"))
    for view, text in (
        ("system", "1 of 3 do not answer"),
        ("try", "A tool call"),
        ("step?run=none&step=1", "Not found"),
        ("step?run=none&step=x", "This address cannot be opened"),
        ("runs", "There is no run"),
    ):
        fits(view, text)
    assert [address for address in browser.requests if not address.startswith((url, "data:"))] == []


@pytest.mark.slow
@pytest.mark.program("chromium")
def test_a_browser_goes_through_every_page_of_a_run_beside_its_services(
    outputs: Path, http: httpx.AsyncClient, serve: Serve, browser: Browser
) -> None:
    answering = {service: url for service, url in URLS.items() if service != "rollout"}
    url = serve(outputs, services=answering, http=http)
    browser.open(f"{url}#/")
    browser.evaluate(f"sessionStorage.setItem('trackway-token', {SECRET!r})")

    said = walk(browser, url, "tidy", rollout("tidy", 1, 7, 0).tags, rollout("tidy", 2, 7, 1).tags)

    assert "all ready" in said["system"] and "A score" in said["try"]
    browser.open(f"{url}#/run?run=tidy")
    tools = browser.evaluate("document.getElementById('tools').innerText").split()
    assert tools == ["Failures", "Search", "System", "Try"]
    assert said["compare"].startswith("2 trajectories") and "Failures" in said["failures"]


def test_a_console_alone_has_no_services(tmp_path: Path) -> None:
    client = TestClient(create_app(tmp_path))

    assert client.get("/api/console").json() == {"outputs": str(tmp_path), "services": []}
    assert client.get("/api/system").status_code == client.get("/api/try").status_code == 404
    assert client.post("/api/try/tool", json={"tool": "calculator"}).status_code == 404


def test_a_console_with_tokens_asks_for_one_before_anything_is_passed_on(tmp_path: Path) -> None:
    client = TestClient(create_app(tmp_path, ServiceSettings(auth=AUTH), services=URLS))

    for path in ("/api/console", "/api/system", "/api/try"):
        assert client.get(path).status_code == 401
    assert client.post("/api/try/score", json={}).status_code == 401
