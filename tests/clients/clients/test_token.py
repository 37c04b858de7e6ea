"""Which token a call carries, and that it goes nowhere else."""

import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel, SecretStr

from trackway.clients import CallPolicy, ServiceClient
from trackway.tracing import Tracing, TracingSettings, trajectory_span
from trackway.tracing.span_handle import activated
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Tags

pytestmark = pytest.mark.anyio

GIVEN, OTHER = "given-0123456789abcdef", "other-0123456789abcdef"
FAST = CallPolicy(attempts=3, backoff_s=0.001, max_backoff_s=0.002)
TAGS = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=3)


class Answer(BaseModel):
    value: int


class Service:
    """Gives one answer again and again and keeps the requests."""

    def __init__(self, answer: Callable[[], httpx.Response], follow_redirects: bool = False) -> None:
        self.answer = answer
        self.requests: list[httpx.Request] = []
        self.http = httpx.AsyncClient(transport=httpx.MockTransport(self.take), follow_redirects=follow_redirects)

    def take(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.answer()

    def client(self, token: str | None = None) -> ServiceClient:
        return ServiceClient("http://s/x", self.http, FAST, SecretStr(token) if token else None)

    @property
    def tokens(self) -> list[str | None]:
        return [request.headers.get("authorization") for request in self.requests]


def ok() -> httpx.Response:
    return httpx.Response(200, json={"value": 7})


def refusal(code: ErrorCode, why: str = "why") -> httpx.Response:
    error = TrackwayError(code, why, have=1)
    return httpx.Response(error.status, json=error.to_reply().model_dump(mode="json"))


@pytest.mark.parametrize(
    ("environment", "given", "sent"),
    [
        (None, None, None),
        ("", None, None),
        (OTHER, None, f"Bearer {OTHER}"),
        (f"{OTHER}\n", None, f"Bearer {OTHER}"),
        (OTHER, GIVEN, f"Bearer {GIVEN}"),
    ],
)
async def test_the_token_given_wins_over_the_environments(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, given: str | None, sent: str | None
) -> None:
    if environment is not None:
        monkeypatch.setenv("TRACKWAY_TOKEN", environment)
    service = Service(ok)
    client = service.client(given)
    await client.call("POST", "/y", reply=Answer)
    async with client.stream("GET", "/y"):
        pass
    assert service.tokens == [sent, sent]


def test_a_token_that_no_header_can_carry_is_refused_without_being_shown() -> None:
    with pytest.raises(TrackwayError, match="TRACKWAY_TOKEN: expected printable ASCII without spaces") as caught:
        Service(ok).client(f"{GIVEN} \n{OTHER}")
    assert GIVEN not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "mode", "sent"),
    [(None, 0o400, f"Bearer {GIVEN}"), ("", 0o640, f"Bearer {GIVEN}"), (OTHER, 0o644, f"Bearer {OTHER}")],
)
async def test_the_token_may_be_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: str | None, mode: int, sent: str
) -> None:
    if environment is not None:
        monkeypatch.setenv("TRACKWAY_TOKEN", environment)
    (file := tmp_path / "token").write_text(f"{GIVEN}\n")
    file.chmod(mode)
    monkeypatch.setenv("TRACKWAY_TOKEN_FILE", str(file))
    service = Service(ok)
    await service.client().call("POST", "/y", reply=Answer)
    assert service.tokens == [sent]


def test_a_token_file_that_other_users_can_read_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "token").write_text(GIVEN)
    file.chmod(0o604)
    monkeypatch.setenv("TRACKWAY_TOKEN_FILE", str(file))
    for _ in range(2):
        Service(ok).client()
    assert [record.getMessage() for record in caplog.records] == [
        f"TRACKWAY_TOKEN_FILE {file}: every user of this machine can read it; chmod o-r (defaultMode: 0400)"
    ]


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "No such file or directory; set it to a file that this process can read"),
        (b" \n", "expected a token, got nothing; write the token into it"),
        (b"to\xffken", "expected printable ASCII without spaces, got other characters; copy the token again"),
    ],
)
def test_a_token_file_of_no_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, got: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("TRACKWAY_TOKEN_FILE", str(file))
    with pytest.raises(TrackwayError) as caught:
        Service(ok).client()
    assert (caught.value.code, caught.value.message) == (ErrorCode.UNAUTHORIZED, f"TRACKWAY_TOKEN_FILE {file}: {got}")


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (refusal(ErrorCode.UNAUTHORIZED), ErrorCode.UNAUTHORIZED, "why"),
        (refusal(ErrorCode.FORBIDDEN), ErrorCode.FORBIDDEN, "why"),
        (httpx.Response(401, text="<html>nginx"), ErrorCode.UNAUTHORIZED, "<html>nginx"),
        (httpx.Response(403, text="<html>nginx"), ErrorCode.FORBIDDEN, "<html>nginx"),
    ],
)
async def test_a_refused_token_is_not_sent_again_and_the_error_says_where_it_comes_from(
    answer: httpx.Response, code: ErrorCode, message: str
) -> None:
    service = Service(lambda: answer)
    with pytest.raises(TrackwayError) as caught:
        await service.client(GIVEN).call("POST", "/y", reply=Answer)
    assert (caught.value.code, len(service.requests)) == (code, 1)
    assert caught.value.message == f"POST http://s/x/y: {message} (set the token in TRACKWAY_TOKEN)"


@pytest.mark.parametrize("follow_redirects", [False, True])
async def test_no_redirect_is_followed(follow_redirects: bool) -> None:
    service = Service(lambda: httpx.Response(307, headers={"location": "http://elsewhere/y"}), follow_redirects)
    with pytest.raises(TrackwayError, match="HTTP 307") as called:
        await service.client(GIVEN).call("POST", "/y", reply=Answer)
    with pytest.raises(TrackwayError, match="HTTP 307"):
        async with service.client(GIVEN).stream("GET", "/y"):
            pass
    assert called.value.code is ErrorCode.INVALID_REQUEST
    assert [request.url.host for request in service.requests] == ["s", "s"]


@pytest.mark.parametrize("answer", [ok, lambda: refusal(ErrorCode.UNAUTHORIZED), lambda: httpx.Response(500, text="!")])
async def test_the_token_is_in_no_span_log_or_error(
    answer: Callable[[], httpx.Response], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(), exporter)
    client, said = Service(answer).client(GIVEN), ""
    with activated(tracing), trajectory_span(TAGS, "t", "a", [], record=True):
        try:
            await client.call("POST", "/y", reply=Answer)
        except TrackwayError as error:
            said = f"{error!r} {error.detail}"
    tracing.flush(5)
    spans = [span.to_json() for span in exporter.get_finished_spans()]
    assert len(spans) == 1
    assert GIVEN not in f"{spans}{said}{caplog.text}{client!r}{vars(client)}"
