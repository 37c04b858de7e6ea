"""Without tokens only callers on this machine are answered, and no browser page or proxy passes for one."""

import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from tests.services.serving.service_with_tokens import AGENT, NEEDS_TOKEN, TOKENS, app_with, bearer, client_from
from tests.serving import port_of, served

pytestmark = pytest.mark.anyio

REFUSAL = {
    "error": {
        "code": "unauthorized",
        "message": "this service has no tokens and so answers callers on its own machine only; call it there by "
        "127.0.0.1 and without a proxy, or have its operator give it tokens (TRACKWAY_AUTH__TOKENS_FILE)",
        "retryable": False,
        "detail": {},
    }
}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
async def test_a_caller_on_this_machine_may_do_everything(address: str) -> None:
    async with client_from(address, app_with({})) as client:
        assert (await client.post("/pause")).json() == "paused"


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "::ffff:10.1.2.3", "fe80::1%eth0", "1270.0.0.1", "localhost", "", None]
)
@pytest.mark.parametrize("path", ["/work", "/nowhere", "/health", "/docs"])
async def test_any_other_is_told_the_remedy(address: str | None, path: str) -> None:
    async with client_from(address, app_with({})) as client:
        answer = await client.post(path)
    assert (answer.status_code, answer.json()) == (401, REFUSAL)
    assert answer.headers["www-authenticate"] == "Bearer" and "x-trackway-replica" not in answer.headers


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Forwarded-Proto", "http"),
        ("X-Real-IP", "127.0.0.1"),
        ("Forwarded", "for=127.0.0.1"),
        ("Via", "1.1 proxy"),
        ("Origin", "http://evil.example"),
        ("Origin", "https://127.0.0.1.evil.example"),
        ("Origin", "http://testclient"),
        ("Origin", "null"),
        ("Origin", "http://[::1"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Host", "rebound.example:8000"),
        ("Host", "127.0.0.1.evil.example"),
        ("Host", "[fd00::2]:8000"),
        ("Host", "10.1.2.3:8000"),
    ],
)
async def test_a_proxy_and_a_page_of_another_host_are_not_this_machine(header: str, value: str) -> None:
    async with client_from("127.0.0.1", app_with({})) as client:
        answer = await client.post("/work", headers={header: value})
    assert (answer.status_code, answer.json()) == (401, REFUSAL)


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "http://localhost:3000", "http://[::1]:1", None])
@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "service", "tools.localhost:80"])
async def test_a_page_of_this_machine_is_this_machine(host: str, origin: str | None) -> None:
    async with client_from("127.0.0.1", app_with({}), host) as client:
        answer = await client.post("/work", headers={"origin": origin} if origin else {})
    assert answer.json() == "worked"


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "cross-site", "origin": "http://localhost:3000"},
    ],
)
async def test_a_browser_on_this_machine_is_local(headers: dict[str, str]) -> None:
    async with client_from("127.0.0.1", app_with({})) as client:
        assert (await client.post("/work", headers=headers)).json() == "worked"


async def test_behind_a_proxy_that_hides_its_clients_nobody_is_local() -> None:
    async with client_from("127.0.0.1", app_with({"trust_loopback": False})) as client:
        assert (await client.get("/health")).json() == REFUSAL
    async with client_from("127.0.0.1", app_with({"trust_loopback": False, "tokens": TOKENS})) as client:
        assert (await client.get("/health")).content == NEEDS_TOKEN
        assert (await client.get("/health", headers=bearer(AGENT))).status_code == 200


def test_starlettes_test_client_is_this_process() -> None:
    assert TestClient(app_with({})).post("/work").json() == "worked"


@pytest.fixture
def own_address() -> Iterator[str]:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        yield probe.getsockname()[0]


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """Port of a real server on every address of this machine."""
    async with served(app_with(request.param), host="0.0.0.0") as url:
        yield port_of(url)


@pytest.mark.parametrize("server", [{}], indirect=True)
async def test_a_real_server_without_tokens_answers_its_own_machine_only(server: int, own_address: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        outside = await client.post(f"http://{own_address}:{server}/work")
        spoofed = await client.post(f"http://{own_address}:{server}/work", headers={"host": "127.0.0.1"})
        forwarded = await client.post(f"http://127.0.0.1:{server}/work", headers={"x-forwarded-for": "127.0.0.1"})
        inside = await client.post(f"http://127.0.0.1:{server}/work")
    assert [reply.json() for reply in (outside, spoofed, forwarded, inside)] == [REFUSAL, REFUSAL, REFUSAL, "worked"]


@pytest.mark.parametrize("server", [{"tokens": TOKENS}], indirect=True)
async def test_a_real_server_with_tokens_answers_who_has_one(server: int, own_address: str) -> None:
    async with httpx.AsyncClient(trust_env=False, base_url=f"http://{own_address}:{server}") as client:
        refused = [await client.request(method, "/x") for method in ("GET", "POST", "HEAD", "OPTIONS")]
        large = await client.post("/work", content=b"[" * 1_000_000)
        welcome = await client.post("/work", headers=bearer(AGENT))
    assert {reply.status_code for reply in refused} == {401}
    assert len({tuple(sorted({**reply.headers, "date": ""}.items())) for reply in [*refused, large]}) == 1
    assert (large.content, welcome.json()) == (NEEDS_TOKEN, "worked")
