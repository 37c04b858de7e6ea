"""What a model call costs in a session gateway: CPU of all its processes, latency; beside agent-lightning's and rLLM's.

    .venv/bin/python benchmarks/sessions.py                               1 session at a time, 16 and 1,000 at once
    .venv/bin/python benchmarks/sessions.py --gateways "trackway; rllm" --at-once 1 --rounds 1

An agent asks, gets a tool call of 81 tokens with logprobs, and sends it back with a result, in eight turns. Behind
every gateway is the same model (sessions_upstream.py), which answers at once: the two peers forward OpenAI's JSON to it
and keep what comes back; Trackway renders and tokenises the conversation itself, sends token ids, parses the tool call
from the ids that come back, and continues its token graph. `trackway, traced` also records a trace of each session,
which neither peer has, and sends it to a receiver. rLLM's gateway keeps calls in SQLite, the others in memory.
Trackway is called at its own port, as the commands and functions of `agent_name: external` call it (`direct_url`).

The load is a process of its own (sessions_load.py); its work and the model's are not counted. The gateways take turns
within each round, each started afresh at the niceness of this command, all with uvloop, httptools and the same versions
of FastAPI and httpx. A figure is the median of the rounds. The environments of the peers, `.venv-agentlightning`
(Python 3.12, which uv finds or fetches) and `.venv-rllm-gateway`, are made on the first call; a peer that cannot be
installed, or leaves calls without an answer for ten minutes, is named and left out.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from environments import NotMade, environment, pinned
from transformers import AutoTokenizer

from trackway.deploy.bundled import TINY_MODEL
from trackway.system import free_port

HERE = Path(__file__).parent
MAX_TURNS = 8
ARGUMENTS = '{"expression": "12-5"}'
THOUGHT = "Tom had 12 pens and lost 5 of them. " * 4
SAID = f'{THOUGHT}<tool_call>\n{{"name": "calculator", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'
MODEL = "policy"
WEB = pinned("fastapi", "starlette", "httpx", "pydantic", "uvicorn", "uvloop", "httptools")
GATEWAYS = ("trackway", "trackway, traced", "agent-lightning", "rllm")
AT_OWN_PORT = ("--factory", "--no-proxy-headers", "--no-server-header")
START_S = 90.0


class NotMeasured(Exception):
    """A gateway did not answer every call."""


@dataclass(frozen=True)
class Gateway:
    """How a gateway is started."""

    style: str
    """As sessions_load.py calls it."""
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    traced: bool = False


def gateway(name: str, port: int, model: str, sink: str, folder: Path) -> Gateway:
    """The gateway called `name`, on a port. Raises NotMade."""
    if name == "agent-lightning":
        python = environment("agentlightning", ["agentlightning==1.0.2", *WEB], python="3.12")
        options = ["host=127.0.0.1", f"port={port}", f"default_proxy.model_name={MODEL}", f"hydra.run.dir={folder}"]
        return Gateway(name, [str(python), "-m", "agentlightning.server", *options])
    if name == "rllm":
        python = environment("rllm-gateway", ["rllm-model-gateway==0.1.0", *WEB])
        options = ["--host", "127.0.0.1", "--port", str(port), "--worker", f"{model}/v1"]
        options += ["--db-path", str(folder / "traces.db"), "--log-level", "WARNING"]
        return Gateway(name, [str(python), "-m", "rllm_model_gateway", *options])
    traced = name == "trackway, traced"
    settings = {"MODEL_PATH": str(TINY_MODEL), "AGENT_URL": f"http://127.0.0.1:{port}", "ROLLOUT_URL": model}
    settings |= {"DIRECT": "false"}
    own = {f"TRACKWAY_{key}": value for key, value in settings.items()}
    own |= {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": sink} if traced else {}
    return Gateway("trackway", uvicorn("sessions_gateway:create_app", port, *AT_OWN_PORT), own, traced)


def uvicorn(app: str, port: int, *options: str) -> list[str]:
    """The command of a server."""
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--no-access-log", "--ws", "none"]
    return [*command, "--log-level", "warning", *options]


@contextlib.contextmanager
def process(name: str, command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[psutil.Process]:
    """A server that answers at the port."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.NamedTemporaryFile() as log:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
        started = psutil.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            end = time.monotonic() + START_S
            while True:
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                    break
                if started.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{name}: expected an answer at port {port}: {Path(log.name).read_text()[-1500:]}")
                time.sleep(0.1)
            yield started
        finally:
            started.terminate()
            try:
                started.wait(20)
            except psutil.TimeoutExpired:
                started.kill()


def script(folder: Path) -> tuple[Path, int]:
    """The model's recorded answers in a file, and the tokens of each."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    ids: list[int] = tokenizer.encode(SAID, add_special_tokens=False)
    logprobs = [-0.01 * (place % 50) for place in range(len(ids))]
    shown = [tokenizer.decode([token]) for token in ids]
    entries = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(shown, logprobs, strict=True)
    ]
    generated = [{"token_id": token, "logprob": value} for token, value in zip(ids, logprobs, strict=True)]
    chat = []
    for turn in range(MAX_TURNS):
        prompt_ids = [token % len(tokenizer) for token in range(600 + 150 * turn)]
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "calculator", "arguments": ARGUMENTS}}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": THOUGHT.strip(), "tool_calls": [call]},
            "logprobs": {"content": entries},
            "finish_reason": "tool_calls",
            "token_ids": ids,
        }
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
        usage["total_tokens"] = sum(usage.values())
        head = {"id": f"chatcmpl-{turn}", "object": "chat.completion", "created": 1, "model": MODEL}
        chat.append({**head, "choices": [choice], "usage": usage, "prompt_token_ids": prompt_ids})
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": generated},
        "weight_versions": [{"version": 1, "start": 0, "end": len(ids)}],
    }
    head = {"request_id": "r", "model": MODEL, "created": 1, "usage": chat[0]["usage"]}
    place = folder / "script.json"
    place.write_text(json.dumps({"chat": chat, "generate": {**head, "choices": [choice]}}))
    return place, len(ids)


def measure(
    name: str, model: str, sink: str, sessions: int, at_once: int, turns: int, answer_tokens: int
) -> dict[str, float]:
    """One load on a gateway that is started for it. Raises NotMade and NotMeasured."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        started = gateway(name, port, model, sink, Path(folder))
        url = f"http://127.0.0.1:{port}"
        with process(name, started.command, port, started.environment) as running:
            if started.style == "agent-lightning":
                endpoint = [{"model": MODEL, "endpoint": f"{model}/v1", "version": 1}]
                httpx.post(f"{url}/api/models", json=endpoint, trust_env=False).raise_for_status()
            wanted = {
                "gateway": started.style,
                "url": url,
                "pid": running.pid,
                "model": MODEL,
                "traced": started.traced,
                "turns": turns,
                "answer_tokens": answer_tokens,
                "at_once": at_once,
            }
            load(wanted | {"sessions": max(8, at_once // 20)})  # imports and connections
            return load(wanted | {"sessions": sessions})


def load(wanted: Mapping[str, object]) -> dict[str, float]:
    """What sessions_load.py says. Raises NotMeasured when a call failed or had no answer."""
    command = [sys.executable, str(HERE / "sessions_load.py"), json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotMeasured(f"{wanted['gateway']}: {done.stderr[-1500:]}")
    return json.loads(done.stdout)


def table(seen: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[str]:
    """Markdown: a row for each gateway; the ratio is to the first one."""
    yield "| | CPU ms of a call | CPU ms of opening and reading a session | wall ms of a call | p50; p99 in ms |"
    yield "|---|---|---|---|---|"
    base = 0.0
    for name, rounds in seen.items():
        found = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
        base = base or found["call_ms"]
        ratio = "" if found["call_ms"] == base else f" ({found['call_ms'] / base:.2f}x)"
        latency = f"{found['p50_ms']:.1f}; {found['p99_ms']:.1f}"
        figures = f"{found['call_ms']:.2f}{ratio} | {found['session_ms']:.2f} | {found['wall_ms']:.2f} | {latency}"
        yield f"| {name} | {figures} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", default=";".join(GATEWAYS), help=f"of {'; '.join(GATEWAYS)}, with ; between")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 1000], help="sessions that call at once")
    parser.add_argument(
        "--sessions", type=int, default=50, help="of each load, at least as many as at once; default 50"
    )
    parser.add_argument("--turns", type=int, choices=range(1, MAX_TURNS + 1), default=MAX_TURNS, help="of a session")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.gateways = [name.strip() for name in args.gateways.split(";") if name.strip()]
    if unknown := set(args.gateways) - set(GATEWAYS):
        parser.error(f"--gateways: expected of {'; '.join(GATEWAYS)}, got {', '.join(unknown)}")
    return args


def main() -> None:
    """Print a table for each number of sessions at once."""
    args = arguments()
    names = list(args.gateways)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        answers, answer_tokens = script(folder)
        variables = {"SESSIONS_SCRIPT": str(answers)}
        model_port, sink_port = free_port(), free_port()
        command = uvicorn("sessions_upstream:app", model_port, "--lifespan", "off")
        stack.enter_context(process("the model", command, model_port, variables))
        command = uvicorn("tools_parts:sink", sink_port, "--lifespan", "off")
        stack.enter_context(process("the receiver of spans", command, sink_port, {}))
        model, sink = f"http://127.0.0.1:{model_port}", f"http://127.0.0.1:{sink_port}/v1/traces"
        for at_once in args.at_once:
            seen: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
            for number in range(args.rounds):
                for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                    try:
                        sessions = max(args.sessions, at_once)
                        found = measure(name, model, sink, sessions, at_once, args.turns, answer_tokens)
                    except (NotMade, NotMeasured) as error:
                        print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
                        continue
                    seen[name].append(found)
                    spent = f"{found['call_ms']:.2f} CPU ms a call"
                    print(f"round {number + 1}, {at_once} at once, {name}: {spent}", file=sys.stderr, flush=True)
            many = f"{at_once} sessions at once" if at_once > 1 else "one session at a time"
            print(f"\n{many}, {answer_tokens} tokens a call; median of {args.rounds}\n", flush=True)
            print("\n".join(table({name: seen[name] for name in args.gateways if seen[name]})), flush=True)


if __name__ == "__main__":
    main()
