"""How tokens are configured, compared, changed while the service runs, and kept to themselves."""

import hashlib
import hmac
import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.services.serving.service_with_tokens import (
    AGENT,
    OPERATOR,
    TOKENS,
    app_with,
    bearer,
    client_from,
    write_tokens,
)
from trackway.serving import AuthSettings, ServiceSettings
from trackway.serving.auth import AuthScope, Caller, Token, TokenTable, digest_of

SHORT, ODD = "short-0123456789"[:15], "0123456789 abcdef"


class Clock:
    """Seconds that pass only when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def settings(**auth: object) -> ServiceSettings:
    return ServiceSettings.model_validate({"auth": auth})


def names(table: TokenTable, *secrets: str) -> list[str | None]:
    return [found.name if (found := table.find(secret.encode())) else None for secret in secrets]


def test_a_token_may_be_given_by_its_sha256() -> None:
    digest = hashlib.sha256(AGENT.encode()).hexdigest()
    table = TokenTable(settings(tokens={"agents": {"sha256": digest}}).auth)
    assert names(table, AGENT, digest, OPERATOR) == ["agents", None, None]


@pytest.mark.parametrize(
    ("auth", "given"), [({}, False), ({"tokens": TOKENS}, True), ({"tokens_file": "tokens.json"}, True)]
)
def test_tokens_are_asked_for_where_there_are_some_and_callers_on_this_machine_are_known_by_their_address(
    auth: dict[str, object], given: bool
) -> None:
    found = AuthSettings.model_validate(auth)
    assert (found.given, found.trust_loopback) == (given, True)


def test_admin_includes_execute() -> None:
    table = TokenTable(settings(tokens=TOKENS).auth)
    both = frozenset({AuthScope.ADMIN, AuthScope.EXECUTE})
    assert table.find(OPERATOR.encode()) == Caller("ops", both)
    assert table.find(AGENT.encode()) == Caller("agents", frozenset({AuthScope.EXECUTE}))


def test_a_pass_opens_what_its_token_does_at_one_process_alone() -> None:
    here, there = (TokenTable(settings(tokens=TOKENS).auth) for _ in range(2))
    passes = [here.pass_for(digest_of(secret.encode())) for secret in (AGENT, OPERATOR, "nobody's-0123456789")]
    assert [here.find(issued.encode()) for issued in passes[:2]] == [
        here.find(AGENT.encode()),
        here.find(OPERATOR.encode()),
    ]
    assert (names(here, passes[2]), names(there, *passes)) == ([None], [None] * 3)


def test_a_pass_ends_with_its_token(tmp_path: Path) -> None:
    file, clock = tmp_path / "tokens.json", Clock()
    write_tokens(file, json.dumps(TOKENS))
    table = TokenTable(AuthSettings(tokens_file=file), clock=clock)
    passes = [table.pass_for(digest_of(secret.encode())) for secret in (AGENT, OPERATOR)]
    write_tokens(file, json.dumps({"ops": TOKENS["ops"]}))
    clock.now += 1.0
    assert names(table, *passes) == [None, "ops"]


@pytest.mark.parametrize("presented", [AGENT, OPERATOR, "nobody's", ""])
def test_every_token_is_compared_whichever_is_presented(presented: str) -> None:
    compared: list[tuple[int, int]] = []

    def compare(known: bytes, digest: bytes) -> bool:
        compared.append((len(known), len(digest)))
        return hmac.compare_digest(known, digest)

    TokenTable(settings(tokens=TOKENS).auth, compare).find(presented.encode())
    assert compared == [(32, 32)] * 4  # each token, and its pass


def test_tokens_come_from_the_environment_each_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKWAY_AUTH__TOKENS__AGENTS__SECRET", AGENT)
    monkeypatch.setenv("TRACKWAY_AUTH__TOKENS__OPS__SECRET", OPERATOR)
    monkeypatch.setenv("TRACKWAY_AUTH__TOKENS__OPS__SCOPES", '["admin"]')
    table = TokenTable(settings(tokens={"third": {"secret": "third-0123456789"}}).auth)
    assert names(table, AGENT, OPERATOR, "third-0123456789") == ["agents", "ops", "third"]


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ({"secret": SHORT}, "expected at least 16 characters, got 15; try `openssl rand -hex 32`"),
        ({"secret": ODD}, "expected letters, digits and"),
        ({"sha256": SHORT}, "String should match pattern"),
        ({"secret": AGENT, "sha256": "0" * 64}, "expected either secret or sha256"),
        ({}, "expected either secret or sha256"),
        ({"secret": AGENT, "scopes": []}, "at least 1 item"),
        ({"secret": AGENT, "scopes": ["root"]}, "Input should be 'execute' or 'admin'"),
        ({"secrets": AGENT}, "Extra inputs are not permitted"),
        (AGENT, "Input should be (a valid dictionary|an object)"),
    ],
)
def test_a_token_that_cannot_be_one_is_refused_without_being_shown(token: object, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=problem) as from_settings:
        settings(tokens={"agents": token})
    with pytest.raises(ValidationError, match=problem) as from_auth:
        AuthSettings.model_validate({"tokens": {"agents": token}})
    with pytest.raises(ValidationError, match=problem) as alone:
        Token.model_validate(token)
    write_tokens(tmp_path / "tokens.json", json.dumps({"agents": token}))
    with pytest.raises(ValueError, match=problem) as from_file:
        TokenTable(settings(tokens_file=tmp_path / "tokens.json").auth)
    for said in map(str, (from_settings.value, from_auth.value, alone.value, from_file.value)):
        assert [word for word in (AGENT, SHORT, ODD) if word in said] == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file or directory"), ("{}", "expected at least one token, got none"), (f'{{"{AGENT}"', "JSON")],
)
def test_a_file_of_no_use_keeps_the_service_from_starting(content: str | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    if content is not None:
        write_tokens(file, content)
    with pytest.raises(ValueError, match=problem) as caught:
        app_with({"tokens_file": file})
    assert str(file) in str(caught.value) and AGENT not in str(caught.value)


def test_a_changed_file_is_taken_without_a_restart_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "tokens.json", Clock()
    write_tokens(file, json.dumps({"old": {"secret": AGENT}}))
    table = TokenTable(AuthSettings(tokens_file=file), clock=clock)
    seen = [names(table, AGENT, OPERATOR)]
    new, last = (json.dumps({name: {"secret": OPERATOR}}) for name in ("new", "last"))
    for content in (new, "{}", f'{{"{AGENT}', None, last):
        file.unlink() if content is None else write_tokens(file, content)
        clock.now += 0.5
        before = names(table, AGENT, OPERATOR)
        clock.now += 0.5
        seen += [before, names(table, AGENT, OPERATOR)]
    assert seen[:3] == [["old", None], ["old", None], [None, "new"]]
    assert seen[3:] == [[None, "new"]] * 7 + [[None, "last"]]
    assert caplog.text.count("the tokens are unchanged") == 3 and AGENT not in caplog.text


@pytest.mark.anyio
async def test_a_running_service_takes_a_new_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens.json"
    write_tokens(file, json.dumps({"old": {"secret": AGENT}}))
    monkeypatch.setattr("trackway.serving.auth.CHECK_EVERY_S", 0.0)
    async with client_from("10.1.2.3", app_with({"tokens_file": file})) as client:
        before = [(await client.post("/work", headers=bearer(token))).status_code for token in (AGENT, OPERATOR)]
        write_tokens(file, json.dumps({"new": {"secret": OPERATOR}}))
        after = [(await client.post("/work", headers=bearer(token))).status_code for token in (AGENT, OPERATOR)]
    assert (before, after) == ([200, 401], [401, 200])


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o604, True), (0o641, False), (0o400, False)])
def test_a_file_that_everybody_reads_is_a_warning(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens.json"
    write_tokens(file, json.dumps(TOKENS))
    os.chmod(file, mode)
    TokenTable(AuthSettings(tokens_file=file))
    assert ("every user of this machine can read it" in caplog.text) is warned


@pytest.mark.anyio
async def test_no_secret_is_in_a_repr_a_dump_or_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKWAY_TOKEN", OPERATOR)
    digest = hashlib.sha256(b"third").hexdigest()
    tokens = {"agents": {"secret": AGENT}, "third": {"sha256": digest}}
    made = settings(tokens=tokens)
    async with client_from("127.0.0.1", app_with({"tokens": tokens})) as client:
        health = (await client.get("/health")).text
    said = f"{made!r} {made} {made.model_dump()} {made.auth!r} {health}"
    assert made.token is not None and made.token.get_secret_value() == OPERATOR
    assert [word for word in (AGENT, OPERATOR) if word in said or word in made.model_dump_json()] == []
    assert digest not in f"{made!r} {made} {health}"
