"""Tools of MCP servers in our tool server: real servers, over HTTP and as processes."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.tools.mcp_servers import STDIO, serving_notes, yaml_for
from tests.services.tools.notes_server import NOTE_SCHEMA, NotesServer
from tests.serving import port_of
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.tools.base import ToolLimits
from trackway.tools.core.instances import InstanceTable
from trackway.tools.core.server import ToolServer
from trackway.tools.loading import load_tools
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import CreateInstance, ExecuteRequest, OneShotRequest

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


class Started:
    """A tool server with the tools of one YAML, started and closed with the block."""

    def __init__(self, path: Path, **limits: float) -> None:
        tools = load_tools([], [], {}, tool_config_path=path)
        self.server = ToolServer(tools, ToolLimits.model_validate(limits), InstanceTable("replica0", 8, ttl_s=60.0))

    async def __aenter__(self) -> "Started":
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    async def made(self, tool: str, session: str = "run/1/0/0") -> str:
        return (await self.server.create(CreateInstance(tool=tool, session_id=session))).instance_id

    async def call(self, instance_id: str, **arguments: str) -> str:
        return (await self.server.execute(instance_id, ExecuteRequest(arguments={**arguments}))).text

    async def refusal(self, instance_id: str, **arguments: str) -> tuple[ErrorCode, str]:
        with pytest.raises(TrackwayError) as caught:
            await self.call(instance_id, **arguments)
        return caught.value.code, caught.value.message


async def test_a_servers_tools_appear_with_their_schemas_whole_and_names_that_openai_allows(tmp_path: Path) -> None:
    async with serving_notes(NotesServer()) as url, Started(yaml_for(tmp_path, {"notes": {"url": url}})) as started:
        functions = {schema.function.name: schema.function for schema in started.server.schemas()}

    assert list(functions) == ["note", "notes", "picture", "refuse", "stall", "die", "env_names"]
    assert functions["note"].parameters == NOTE_SCHEMA
    assert functions["note"].description == "Write a note."


async def test_the_tools_of_one_trajectory_share_a_session_that_others_do_not_see(tmp_path: Path) -> None:
    notes = NotesServer()
    async with serving_notes(notes) as url, Started(yaml_for(tmp_path, {"notes": {"url": url}})) as started:
        writer, reader = await started.made("note", "a"), await started.made("notes", "a")
        stranger = await started.made("notes", "b")
        await started.call(writer, text="one")
        assert await started.call(writer, text="two") == "2 kept"
        assert [await started.call(reader), await started.call(stranger)] == ["one two", ""]

        before = notes.deleted()
        await started.server.release(writer)
        assert notes.deleted() == before
        await started.server.release(reader)
        assert notes.deleted() == before + 1


async def test_a_server_without_sessions_is_asked_over_one_connection_and_its_tools_are_stateless(
    tmp_path: Path,
) -> None:
    notes = NotesServer(stateless=True)
    async with serving_notes(notes) as url, Started(yaml_for(tmp_path, {"notes": {"url": url}})) as started:
        handshakes = len(notes.requests)
        for _ in range(3):
            await started.server.one_shot("note", OneShotRequest(arguments={"text": "one"}))

        assert "note" in started.server.stateless()
        assert len(notes.requests) == handshakes + 3


async def test_text_parts_are_joined_and_a_marker_stands_for_an_image(tmp_path: Path) -> None:
    async with serving_notes(NotesServer()) as url, Started(yaml_for(tmp_path, {"notes": {"url": url}})) as started:
        assert await started.call(await started.made("picture")) == "before\n[image: image/png]\nafter"


async def test_an_error_result_is_an_observation_for_the_model(tmp_path: Path) -> None:
    async with serving_notes(NotesServer()) as url, Started(yaml_for(tmp_path, {"notes": {"url": url}})) as started:
        refusal = await started.refusal(await started.made("refuse"))

    assert refusal == (ErrorCode.INVALID_REQUEST, "no such page, try 1 to 9")


async def test_a_server_that_cannot_be_reached_keeps_the_tool_server_from_starting(tmp_path: Path) -> None:
    path = yaml_for(tmp_path, {"notes": {"url": "http://127.0.0.1:9/mcp?key=secret"}})

    with pytest.raises(
        ValueError, match=r"entry 1: MCP server 'notes' .*/mcp\): expected an answer, got .*All connection"
    ) as caught:
        await Started(path).server.start()
    assert "secret" not in str(caught.value)


async def test_a_command_that_never_answers_is_given_up_and_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "pid"
    command = {"command": "sh", "args": ["-c", f"echo $$ > {marker}; exec sleep 60"]}

    with pytest.raises(ValueError, match=r"'notes' \(command sh\): expected an answer within 0.5 s, got none"):
        await Started(yaml_for(tmp_path, {"notes": command}, connect_timeout_s=0.5)).server.start()
    await eventually_dead(int(marker.read_text()))
    gc.collect()
    assert caplog.records == []


async def test_a_restarted_server_has_lost_the_instance_and_serves_new_ones(tmp_path: Path) -> None:
    async with serving_notes(NotesServer()) as url:
        path, port = yaml_for(tmp_path, {"notes": {"url": url}}), port_of(url)
        started = Started(path)
        await started.server.start()
        writer = await started.made("note")
        await started.call(writer, text="one")
    async with serving_notes(NotesServer(), port):
        with pytest.raises(TrackwayError, match="create the instance again and replay") as caught:
            await started.call(writer, text="two")
        again = await started.call(await started.made("note"), text="two")
        await started.server.close()

    assert (caught.value.code, again) == (ErrorCode.INSTANCE_LOST, "1 kept")


async def test_a_shared_server_that_is_down_is_a_retryable_error_until_it_is_back(tmp_path: Path) -> None:
    async with serving_notes(NotesServer()) as url:
        path, port = yaml_for(tmp_path, {"notes": {"url": url}}, sessions="shared"), port_of(url)
        started = Started(path)
        await started.server.start()
    request = OneShotRequest(arguments={"text": "one"})
    for _ in range(2):
        with pytest.raises(TrackwayError) as caught:
            await started.server.one_shot("note", request)
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    async with serving_notes(NotesServer(), port):
        assert (await started.server.one_shot("note", request)).text == "1 kept"
        await started.server.close()


async def test_a_process_serves_one_trajectory_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "x")
    given = {**STDIO, "env": {"NOTES_KEY": "${SECRET_OF_THE_SERVICE}"}}
    async with Started(yaml_for(tmp_path, {"notes": given})) as started:
        first, second = await started.made("note", "a"), await started.made("note", "b")
        assert [await started.call(first, text="x"), await started.call(second, text="x")] == ["1 kept", "1 kept"]
        names = (await started.call(await started.made("env_names", "a"))).split()
        assert "NOTES_KEY" in names
        assert "SECRET_OF_THE_SERVICE" not in names
        assert len(children()) == 2
        await started.server.release(second)
        assert len(children()) == 1
    assert children() == []


async def test_a_process_that_dies_during_a_call_has_lost_the_instance(tmp_path: Path) -> None:
    async with Started(yaml_for(tmp_path, {"notes": STDIO})) as started:
        code, _ = await started.refusal(await started.made("die"))

    assert code is ErrorCode.INSTANCE_LOST


@ENDS_SOON
async def test_a_call_over_its_deadline_leaves_the_session_usable(tmp_path: Path) -> None:
    async with (
        serving_notes(NotesServer()) as url,
        Started(yaml_for(tmp_path, {"notes": {"url": url}}, timeout=2)) as started,
    ):
        writer, staller = await started.made("note"), await started.made("stall")
        await started.call(writer, text="one")
        code, _ = await started.refusal(staller)
        assert code is ErrorCode.TOOL_TIMEOUT
        assert await started.call(writer, text="two") == "2 kept"


async def test_trajectories_over_the_bound_are_told_to_come_back(tmp_path: Path) -> None:
    async with (
        serving_notes(NotesServer()) as url,
        Started(yaml_for(tmp_path, {"notes": {"url": url}}, max_sessions=1)) as started,
    ):
        first, second = await started.made("notes", "a"), await started.made("notes", "b")
        await started.call(first)
        assert (await started.refusal(second))[0] is ErrorCode.OVERLOADED
        await started.server.release(first)
        assert await started.call(second) == ""


async def test_token_headers_and_affinity_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES_TOKEN", "t0ken")
    notes = NotesServer()
    async with serving_notes(notes) as url:
        server = {"type": "http", "url": url, "auth_token": "${NOTES_TOKEN}", "headers": {"x-team": "${TEAM:-rl}"}}
        async with Started(yaml_for(tmp_path, {"notes": server})) as started:
            await started.call(await started.made("notes", "run/1/0/0"))

    sent = [headers for method, headers in notes.requests if method == "POST"]
    assert all((headers["authorization"], headers["x-team"]) == ("Bearer t0ken", "rl") for headers in sent)
    assert sent[-1]["x-session-id"] == "run/1/0/0"


async def test_only_the_selected_tools_are_offered_under_the_servers_prefix(tmp_path: Path) -> None:
    async with serving_notes(NotesServer()) as url:
        server = {"url": url, "name_prefix": "team_"}
        async with Started(yaml_for(tmp_path, {"notes": server}, selected=["note", "env.names"])) as started:
            names = [schema.function.name for schema in started.server.schemas()]
            assert await started.call(await started.made("team_note"), text="one") == "1 kept"

        with pytest.raises(ValueError, match=r"expected tool_selected_list out of note, .*, got recall"):
            await Started(yaml_for(tmp_path, {"notes": server}, selected=["recall"])).server.start()

    assert names == ["team_note", "team_env_names"]


async def test_two_servers_with_tools_of_one_name_are_refused_by_both_names(tmp_path: Path) -> None:
    async with serving_notes(NotesServer()) as url:
        path = yaml_for(tmp_path, {"mine": {"url": url}, "yours": {"url": url}})
        with pytest.raises(ValueError, match=r"two named 'note': from .*server 'mine' and from .*server 'yours'"):
            await Started(path).server.start()


async def test_a_server_that_is_busy_for_a_moment_is_asked_again_in_the_same_session(tmp_path: Path) -> None:
    notes = NotesServer()
    async with serving_notes(notes) as url, Started(yaml_for(tmp_path, {"notes": {"url": url}})) as started:
        writer = await started.made("note")
        await started.call(writer, text="one")
        notes.statuses.append(503)
        code, message = await started.refusal(writer, text="two")
        again = await started.call(writer, text="two")

    assert (code, "HTTP 503" in message, again) == (ErrorCode.UNAVAILABLE, True, "2 kept")


async def test_a_server_that_refuses_our_token_says_so_at_the_start(tmp_path: Path) -> None:
    async with serving_notes(NotesServer(statuses=[401])) as url:
        with pytest.raises(
            ValueError, match=r"expected an answer, got MCPError: .* \(HTTP 401\); start it, or correct"
        ):
            await Started(yaml_for(tmp_path, {"notes": {"url": url}})).server.start()


async def test_a_server_of_the_protocol_without_sessions_is_shared(tmp_path: Path) -> None:
    notes = NotesServer(without_handshake=True)
    async with serving_notes(notes) as url, Started(yaml_for(tmp_path, {"notes": {"url": url}})) as started:
        assert (await started.server.one_shot("note", OneShotRequest(arguments={"text": "one"}))).text == "1 kept"
        assert "note" in started.server.stateless()


async def test_parallel_calls_of_one_trajectory_open_one_session(tmp_path: Path) -> None:
    notes = NotesServer()
    async with serving_notes(notes) as url, Started(yaml_for(tmp_path, {"notes": {"url": url}})) as started:
        instances = [await started.made(tool) for tool in ("notes", "picture", "notes")]
        await asyncio.gather(*(started.call(instance) for instance in instances))
        sessions = {
            headers["mcp-session-id"]
            for _, headers in notes.requests
            if "x-session-id" in headers and "mcp-session-id" in headers
        }

    assert len(sessions) == 1


def children() -> list[int]:
    """The processes of ours that run the notes server."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and b"notes_server" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
async def no_process_awaited() -> AsyncIterator[None]:
    """A test ends once asyncio knows the end of each command that it started; the MCP client does not wait for it."""
    yield
    await async_until(lambda: not any("waitpid" in thread.name for thread in threading.enumerate()))
    await asyncio.sleep(0)  # asyncio's thread has scheduled the callback


async def eventually_dead(pid: int) -> None:
    await async_until(lambda: not Path(f"/proc/{pid}").exists())
