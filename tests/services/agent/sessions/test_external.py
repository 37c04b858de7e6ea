"""Agents of the user's own, started for each rollout: what they are given, how they are bounded, what is trained."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import call, group, open_services
from tests.services.agent.scripted_model import END, Words
from tests.services.agent.sessions import own_function
from tests.services.agent.sessions.external_services import Serve
from tests.services.agent.sessions.test_session import ANSWER, COUNT, opened, row_of
from tests.services.trainer.learner_settings import learner_config
from tests.serving import served_in_thread
from tests.tiny_models import tiny_qwen3
from tests.waiting import async_until
from trackway.agent.sessions import external as external_agents
from trackway.agent.sessions.external import Program, guarded, run_program
from trackway.agent.sessions.session import SessionEpisode
from trackway.agent.settings import AgentSettings, ExternalSettings
from trackway.learner.filtering import filter_trajectories
from trackway.learner.learner import Learner
from trackway.wire.errors import ErrorCode
from trackway.wire.sessions import ExternalRollout, SessionAccess, SessionBounds
from trackway.wire.trajectory import StopReason

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[4] / "examples" / "agents"
SCRIPT = EXAMPLES / "openai_script.py"
AGAIN = call("calculator", '{"expression": "18*1"}') + END

LOOPS = [
    pytest.param(("asyncio", {"use_uvloop": is_uvloop}), id=name)
    for name, is_uvloop in (("asyncio", False), ("uvloop", True))
]
"""Ray Serve and uvicorn run the service under uvloop."""


def python(code: str, **settings: object) -> ExternalSettings:
    """An agent that runs this Python code."""
    return ExternalSettings.model_validate({"command": [sys.executable, "-c", code], **settings})


@pytest.mark.parametrize("name", ["openai_script.py", "anthropic_sdk.py"])
async def test_an_example_script_gives_the_rows_of_the_tool_agent(serving: Serve, name: str) -> None:
    scripts: dict[int, list[Words]] = {0: [ANSWER], 1: [COUNT, ANSWER], 2: [COUNT, AGAIN, ANSWER]}
    async with serving(ExternalSettings(command=[sys.executable, str(EXAMPLES / name)])) as services:
        services.model.scripts = scripts
        trajectories = await services.run(group("external", n=3))
        services.model.begin_again()
        of_loop = await services.run(group(n=3, sample__extra_info__tool_selection=["calculator"]))

        encode = services.model.encode
        observation = encode("\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n")
        assert [(own.error, own.log, own.further_rows) for own in trajectories] == [(None, "", [])] * 3
        assert trajectories[1].response_ids == encode(COUNT) + observation + encode(ANSWER)
        assert [sum(own.response_mask) for own in trajectories] == [
            sum(len(encode(str(text))) for text in said) for said in scripts.values()
        ]
        assert [row_of(own) for own in trajectories] == [row_of(own) for own in of_loop]
        ends = [
            (own.agent_name, own.stop_reason, own.num_turns, own.reward and own.reward.score) for own in trajectories
        ]
        assert ends == [("external", StopReason.ANSWERED, turns, 1.0) for turns in (2, 4, 6)]


async def test_the_learner_trains_on_the_rollouts_of_the_example_script(
    serving: Serve, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tiny_qwen3(tmp_path, vocab_size=len(tokenizer))
    async with serving(ExternalSettings(command=[sys.executable, str(SCRIPT)])) as services:
        services.model.scripts = {0: [COUNT, ANSWER], 1: [COUNT, "#### 17" + END]}
        trajectories = await services.run(group("external", n=2))
        sampled = len(services.model.encode(COUNT)) + len(services.model.encode(ANSWER))

    result = Learner(learner_config(tmp_path)).update(filter_trajectories(trajectories, 3, None).used)

    assert result.advantages == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert result.metrics["training/trained_tokens"] == 2 * sampled


async def test_a_program_gets_the_row_and_none_of_the_services_secrets(
    serving: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-service")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret-of-the-service@mlflow:5000")
    monkeypatch.setenv("INDEX", "--index https://secret-of-the-service@host/simple")
    monkeypatch.setenv("DATABASE", "postgres://reader@host/rows")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=secret-of-the-service")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret-of-the-service@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "model.example")
    monkeypatch.setenv("UNKNOWN", "secret-of-the-service")
    code = "import json, os, sys; print(json.load(sys.stdin)['prompt'][0]['content'], os.environ)"
    async with serving(python(code, environment={"MODE": "fast"}, variables=["DATABASE"])) as services:
        trajectory = await services.say(agent_name="external", trace=True)

    log = trajectory.log
    assert log.startswith("9+9? ") and "'MODE': 'fast'" in log and "secret-of-the-service" not in log
    assert "'DATABASE': 'postgres://reader@host/rows'" in log and "'NO_PROXY': 'model.example'" in log
    assert f"00-{trajectory.trace_id}-{trajectory.span_id}" in log
    assert "'OPENAI_AGENTS_DISABLE_TRACING': '1'" in log and "'DO_NOT_TRACK': '1'" in log
    assert "/sessions/s-" in log and "'ANTHROPIC_API_KEY': 'sk-s-" in log


SEARCH = """
import glob
texts = []
for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/task/*/environ'):
    try:
        texts.append(open(path, 'rb').read())
    except OSError:
        pass
print('sees itself', any(b'OPENAI_BASE_URL' in text for text in texts))
print('sees the service', any(b'secret-of-the-service' in text for text in texts))
"""
"""Reads the environments of all processes."""


@pytest.mark.skipif(not external_agents.can_hide_processes(), reason="needs PID namespaces")
async def test_a_program_reads_no_other_processs_environment(serving: Serve) -> None:
    secret = {**os.environ, "TRACKWAY_TOKEN": "secret-of-the-service"}
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE, env=secret
    )
    try:
        async with serving(python(SEARCH)) as services:
            trajectory = await services.say(agent_name="external")
        async with serving(python(SEARCH, hides_processes=False)) as services:
            unhidden = await services.say(agent_name="external")
    finally:
        service.kill()
        await service.wait()

    assert trajectory.log == "sees itself True\nsees the service False\n"
    assert unhidden.log == "sees itself True\nsees the service True\n"


async def test_a_host_without_pid_namespaces_is_told_once(
    serving: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    refuses = tmp_path / "guard.py"
    text = external_agents._GUARD.read_text()
    refuses.write_text(
        text.replace(
            "def _enter_namespace(libc: ctypes.CDLL) -> None:",
            "def _enter_namespace(libc):\n    raise OSError('none')\n\ndef _unused(libc):",
        )
    )
    monkeypatch.setattr(external_agents, "_GUARD", refuses)
    external_agents.can_hide_processes.cache_clear()
    try:
        async with serving(python("print('runs')")) as services:
            logs = [(await services.say(agent_name="external")).log for _ in range(2)]
    finally:
        external_agents.can_hide_processes.cache_clear()

    warnings_ = [record.getMessage() for record in caplog.records if "PID namespaces" in record.getMessage()]
    assert logs == ["runs\n"] * 2 and len(warnings_) == 1 and "got OSError: none:" in warnings_[0]


async def test_a_program_calls_the_model_at_the_replicas_own_port(serving: Serve) -> None:
    code = "import os; print(os.environ['OPENAI_BASE_URL'], os.environ['ANTHROPIC_BASE_URL'])"
    async with serving(python(code)) as services:
        services.agent.state.direct_url = "http://127.0.0.1:9"
        trajectory = await services.say(agent_name="external")
        access = await opened(services)

    openai_url, anthropic_url = trajectory.log.split()
    assert openai_url == f"{anthropic_url}/v1" and openai_url.startswith("http://127.0.0.1:9/sessions/s-")
    path = f"/sessions/{access.session_id}/v1"
    assert access.direct_url == f"http://127.0.0.1:9{path}"
    assert access.base_url.endswith(path) and not access.base_url.startswith("http://127.0.0.1:9/")


async def test_a_program_that_fails_leaves_its_trajectory_out_and_says_why(serving: Serve) -> None:
    async with serving(python("import sys; sys.exit('no such model')")) as services:
        trajectory = await services.say(agent_name="external")

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert "got 1; it said last: no such model" in trajectory.error.message


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_programs_that_end_at_once_fail_by_their_last_words(serving: Serve) -> None:
    command = ["sh", "-c", "echo bye >&2; exit 3"]
    large = "a row larger than a pipe: " + "x" * 200_000
    async with serving(ExternalSettings(command=command, max_running=6)) as services:
        trajectories = await services.run(group("external", n=6, sample__extra_info__note=large))

    said = "expected the agent's program 'sh' to exit with 0, got 3; it said last: bye"
    assert [own.error and (own.error.code, own.error.message) for own in trajectories] == [
        (ErrorCode.AGENT_FAILED, said)
    ] * 6
    assert [own.log for own in trajectories] == ["bye\n"] * 6


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_a_program_reads_a_row_larger_than_a_pipe(serving: Serve) -> None:
    code = "import json, sys; print(len(json.load(sys.stdin)['extra_info']['note']), repr(sys.stdin.read()))"
    async with serving(python(code)) as services:
        trajectory = await services.say(agent_name="external", sample__extra_info__note="x" * 200_000)

    assert trajectory.log == "200000 ''\n"


async def test_a_program_that_ends_without_a_call_fails_and_is_told_what_to_check(serving: Serve) -> None:
    async with serving(python("print('done')")) as services:
        trajectory = await services.say(agent_name="external")

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert (
        "it ended and made no call (one refused as invalid is none); let it use OPENAI_BASE_URL"
        in trajectory.error.message
    )
    assert trajectory.log == "done\n"


async def test_a_program_without_its_folder_fails_and_names_the_setting(serving: Serve, tmp_path: Path) -> None:
    async with serving(python("pass", folder=tmp_path / "gone")) as services:
        trajectory = await services.say(agent_name="external")

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert trajectory.error.message.startswith(f"external.folder: expected a folder, got '{tmp_path}/gone'")


async def test_a_program_that_cannot_start_fails_and_names_the_setting(serving: Serve, tmp_path: Path) -> None:
    async with serving(python("pass", environment={"MODE": "x" * 200_000})) as services:
        trajectory = await services.say(agent_name="external")

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert "to start, got OSError: [Errno 7]" in trajectory.error.message


async def test_a_program_is_ended_with_all_its_processes_at_the_time_limit(serving: Serve, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = (
        "import os, subprocess, sys, time;"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {str(begun)!r}]);"
        f"open({str(begun)!r}, 'w').close(); time.sleep(600)"
    )
    async with serving(python(code)) as services:
        trajectory = await services.say(agent_name="external", limits__timeout_s=3.0)
        await async_until(lambda: not _runs(begun))

    assert begun.exists()
    assert trajectory.error is not None and trajectory.error.code is ErrorCode.DEADLINE_EXCEEDED


def _runs(file: Path) -> bool:
    """Whether a process has the file in its command line. PIDs inside a program's namespace differ from ours."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(file).encode() in line.read_bytes():
                return True
    return False


def leaves_its_group(begun: Path, ignored: str = "()") -> str:
    """Code that starts a process in a session of its own, which ignores signals, and waits until it has begun."""
    child = (
        f"import signal, sys, time; [signal.signal(number, signal.SIG_IGN) for number in {ignored}];"
        "open(sys.argv[1], 'w').close(); time.sleep(600)"
    )
    return (
        f"import os, subprocess, sys, time; command = [sys.executable, '-c', {child!r}, {str(begun)!r}];"
        f"subprocess.Popen(command, start_new_session=True)\n"
        f"while not os.path.exists({str(begun)!r}): time.sleep(0.01)\n"
    )


async def test_a_child_that_left_the_process_group_is_ended_too(serving: Serve, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"{leaves_its_group(begun)}os._exit(0)"
    async with serving(python(code)) as services, asyncio.timeout(60):
        trajectory = await services.say(agent_name="external")

    assert trajectory.error is not None and "made no call" in trajectory.error.message
    assert begun.exists() and not _runs(begun)


@pytest.mark.parametrize("hides", [False, True] if external_agents.can_hide_processes() else [False])
async def test_a_program_ends_with_the_service_that_was_killed(tmp_path: Path, hides: bool) -> None:
    begun = tmp_path / "begun"
    ignored = "()" if hides else "[signal.SIGTERM]"  # a namespace ends with its first process
    program = f"{leaves_its_group(begun, ignored)}time.sleep(600)"
    guard = guarded(Program("", python(program).command, hides_processes=hides), 3)
    service = (
        "import os, subprocess, sys, time; held, holding = os.pipe(); os.dup2(held, 3);"
        f"guard = subprocess.Popen({guard!r}, stdin=subprocess.DEVNULL, pass_fds=(3,));"
        f"\nwhile not os.path.exists({str(begun)!r}): time.sleep(0.01)"
        "\nos.kill(os.getpid(), 9)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", service)
    assert await process.wait() == -9

    await async_until(lambda: not _runs(begun))


def test_nothing_stays_open_of_a_program_whose_processes_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_agents, "guarded", lambda settings, owner: settings.command)
    monkeypatch.setattr(external_agents, "_GUARD_S", 0.02)
    group_kills: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: group_kills.append(pid))
    settings = ExternalSettings(command=["sh", "-c", "setsid sleep 600 & echo $$ $!"])
    access = SessionAccess(session_id="s", base_url="http://127.0.0.1:9/v1", api_key="k")
    episode = SessionEpisode.begin(group("external"), 0, "external")

    async def run() -> None:
        async with asyncio.timeout(60):
            running = asyncio.create_task(run_program(settings, access, episode))
            await async_until(lambda: episode.log.endswith("\n"))
            await async_until(lambda: not Path(f"/proc/{episode.log.split()[0]}").exists())
            running.cancel()
            await asyncio.wait({running})

    gc.collect()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    os.kill(int(episode.log.split()[1]), signal.SIGKILL)

    assert group_kills == []  # the program's number may be another's once it was reaped
    assert [str(warning.message) for warning in warned if warning.category is ResourceWarning] == []


async def test_output_is_kept_from_its_end(serving: Serve) -> None:
    async with serving(python("print('x' * 100000 + 'end')", max_output_bytes=20)) as services:
        trajectory = await services.say(agent_name="external")

    assert trajectory.log == ("x" * 100 + "end\n")[-20:]


async def test_an_agent_is_chosen_by_its_name(settings: AgentSettings, tokenizer: PreTrainedTokenizerFast) -> None:
    agents = {name: python(f"print({name!r})") for name in ("coder", "other")}
    async with open_services(settings.model_copy(update={"external_agents": agents}), tokenizer) as services:
        said = [(await services.say(agent_name=f"external:{name}")).log for name in agents]
        listed = {agent["name"] for agent in (await services.client.get("/agents")).json()["agents"]}

    assert said == ["coder\n", "other\n"]
    assert {"external", "external:coder", "external:other"} <= listed


class Webhook:
    """An agent behind a URL: asks the model once, and scores itself."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[tuple[ExternalRollout, dict[str, str]]] = []
        self.app, self._status = FastAPI(), status
        self.app.post("/run")(self._run)

    async def _run(self, request: Request) -> JSONResponse:
        rollout = ExternalRollout.model_validate_json(await request.body())
        self.requests.append((rollout, dict(request.headers)))
        question: ChatCompletionUserMessageParam = {"role": "user", "content": rollout.sample.prompt[0].content}
        async with AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key) as client:
            await client.chat.completions.create(model="policy", messages=[question])
        return JSONResponse({"score": 0.5, "log": "asked once"}, status_code=self._status)


async def test_a_url_runs_the_agent_and_may_score(serving: Serve) -> None:
    webhook = Webhook()
    with served_in_thread(webhook.app) as url:
        external = ExternalSettings.model_validate({"url": f"{url}/run", "headers": {"authorization": "Bearer ours"}})
        async with serving(external) as services:
            trajectory = await services.say("I do not know" + END, agent_name="external", trace=True)

    [(rollout, headers)] = webhook.requests
    assert rollout.sample.prompt[0].content == "9+9?"
    assert headers["traceparent"] == rollout.traceparent
    assert headers["traceparent"].startswith(f"00-{trajectory.trace_id}-{trajectory.span_id}-")
    assert headers["authorization"] == "Bearer ours" and float(headers["x-request-timeout"]) > 0
    assert trajectory.error is None and trajectory.reward is not None
    assert (trajectory.reward.score, trajectory.log, len(trajectory.turns)) == (0.5, "asked once", 1)


async def test_a_url_that_fails_leaves_its_trajectory_out_and_says_why(serving: Serve) -> None:
    with served_in_thread(Webhook(status=500).app) as url:
        async with serving(ExternalSettings(url=f"{url}/run")) as services:
            trajectory = await services.say("18" + END, agent_name="external")

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert "HTTP 500" in trajectory.error.message


async def test_the_answer_of_a_url_is_read_up_to_a_bound(serving: Serve) -> None:
    app = FastAPI()
    app.post("/run")(lambda: {"log": "x" * 70_000})
    with served_in_thread(app) as url:
        async with serving(ExternalSettings(url=f"{url}/run", max_output_bytes=10)) as services:
            trajectory = await services.say(agent_name="external")

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert "got more than 65596 bytes; shorten the log" in trajectory.error.message


async def test_a_bound_of_the_session_names_the_end_though_the_program_fails_of_it(serving: Serve) -> None:
    bounds = SessionBounds(max_calls=1)
    async with serving(ExternalSettings(command=[sys.executable, str(SCRIPT)], bounds=bounds)) as services:
        trajectory = await services.say(COUNT, ANSWER, agent_name="external")

    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.MAX_TURNS)
    assert len(trajectory.turns) == 1 and "at most 1 calls" in trajectory.log


@pytest.mark.parametrize(("formats", "trained"), [("guide", 0), ("note", 1)])
async def test_a_program_that_sends_a_format_with_its_call_trains_where_formats_are_only_noted(
    serving: Serve, formats: str, trained: int
) -> None:
    code = """
import openai
question, wanted = {"role": "user", "content": "9+9?"}, {"type": "json_object"}
openai.OpenAI().chat.completions.create(model="any", messages=[question], response_format=wanted)
"""
    async with serving(python(code, formats=formats)) as services:
        trajectory = await services.say(ANSWER, agent_name="external")
        written = services.model.encode(ANSWER)

    assert (trajectory.response_ids, trajectory.response_mask) == (written, [trained] * len(written))
    assert [turn.guided for turn in trajectory.turns] == [formats == "guide"]


async def test_without_the_setting_no_request_starts_a_program(serving: Serve) -> None:
    async with serving(None) as services:
        trajectory = await services.say(agent_name="external")

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.INVALID_REQUEST
    assert "external.command" in trajectory.error.message


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("says_text", "expected the agent's function to return its score, a number, or None, got 'good'"),
        ("leaves", "expected the agent's function to return, it raised SystemExit: 3"),
    ],
)
async def test_a_function_that_returns_no_number_fails_by_name(serving: Serve, name: str, got: str) -> None:
    function = f"tests.services.agent.sessions.own_function:{name}"
    async with serving(ExternalSettings(function=function)) as services:
        trajectory = await services.say(agent_name="external")

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert trajectory.error.message.startswith(got)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (
            "no_such_module_of_mine:answer",
            "it cannot be loaded: ModuleNotFoundError: No module named 'no_such_module_of_mine'",
        ),
        ("tests.services.agent.sessions.own_function:answers", "it cannot be loaded: AttributeError: module "),
        ("tests.services.agent.sessions.own_function:__name__", "got 'tests.services.agent.sessions.own_function'"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_an_error_of_the_agent_with_a_remedy(
    serving: Serve, function: str, got: str
) -> None:
    async with serving(ExternalSettings(function=function)) as services:
        trajectory = await services.say(agent_name="external")

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert trajectory.error.message.startswith(f"external.function: expected a function at {function!r}, {got}")
    assert "; correct the setting" in trajectory.error.message


async def test_a_module_that_takes_long_to_import_holds_up_its_own_rollouts_alone(
    serving: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_agents, "IMPORT_S", 0.05)
    module = "tests.services.agent.sessions.slow_import"
    function = f"{module}:answer"
    own_function.import_gate.clear()
    async with serving(ExternalSettings(function=function)) as services:
        two = await asyncio.gather(*(services.say(agent_name="external") for _ in range(2)))
        running = [thread.name for thread in threading.enumerate() if thread.name.startswith("import ")]
        own_function.import_gate.set()
        monkeypatch.setattr(external_agents, "IMPORT_S", 10.0)
        trajectory = await services.say("I do not know" + END, agent_name="external")

    for late in two:
        assert late.error is not None and late.error.code is ErrorCode.AGENT_FAILED
        assert late.error.message == (
            f"external.function: expected the import of {module!r} to take at most 0.05 s, it still runs; move "
            "what takes long at its top level into the function"
        )
    assert trajectory.error is None and trajectory.reward is not None and trajectory.reward.score == 0.5
    assert running == sys.modules[module].importers == [f"import {function}"]


async def test_a_function_runs_in_the_process_without_telemetry_and_may_score(
    serving: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in external_agents.NO_TELEMETRY:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    async with serving(ExternalSettings(function="tests.services.agent.sessions.own_function:answer")) as services:
        trajectory = await services.say("I do not know" + END, agent_name="external")

    assert trajectory.error is None and trajectory.reward is not None and trajectory.reward.score == 0.5
    assert len(trajectory.turns) == 1
    assert dict(os.environ).items() >= external_agents.NO_TELEMETRY.items()
