"""What tracing costs: the caller, the store, and a run; each beside its named peer, in one run.

    .venv/bin/python benchmarks/tracing.py caller             ours, @mlflow.trace (async), weave.op (with .venv-weave),
                                           --checkout FOLDER  Trackway of another checkout, and both in bytes
    .venv/bin/python benchmarks/tracing.py store [--postgres] spans per second into MLflow
    .venv/bin/python benchmarks/tracing.py delivery           CPU of MLflow's server for a trajectory with its feedback
    .venv/bin/python benchmarks/tracing.py run                seconds of a training step: traced not at all, some, all
    .venv/bin/python benchmarks/tracing.py complete           what of a run that traces everything MLflow has at its end

Two shared cores: wall and CPU are given side by side, contenders take turns, and medians are compared.
"""

import argparse
import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
sys.path.insert(0, str(Path(__file__).parent))

import httpx
import psutil
from checkout import interpreter
from tracing_contenders import CONTENDERS, ours, trajectory_of_eight_spans

from trackway.system import free_port

WARM_UP = 20
CALLS = 300
ROUNDS = 5
PAUSE_S = 0.005
"""Between trajectories, so that exporters work in the background, as they do beside a rollout."""
STORED = 400


@contextlib.contextmanager
def process(command: Sequence[str], url: str, log: Path, deadline_s: float = 240.0) -> Iterator[psutil.Process]:
    """A server that answers at `url`, until the block ends."""
    with log.open("wb") as output:
        # A pipe: Weave's server ends with its standard input, which may be empty here.
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env={**os.environ, **_QUIET}
        )
    try:
        end = time.monotonic() + deadline_s
        while not _answers(url):
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[0]} did not start: {log.read_text()[-1500:]}")
            time.sleep(0.2)
        yield psutil.Process(server.pid)
    finally:
        for process in [*psutil.Process(server.pid).children(recursive=True), server]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.terminate()
        server.wait(30)


_QUIET = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    return False


@contextlib.contextmanager
def mlflow_server(folder: Path, store: str | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """A real MLflow server; sqlite in WAL mode unless a store is given."""
    if store is None:
        with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
            database.execute("PRAGMA journal_mode=wal")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store or f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    uri = f"http://127.0.0.1:{port}"
    with process(command, f"{uri}/health", folder / "mlflow.log") as server:
        yield uri, server


@contextlib.contextmanager
def weave_server(folder: Path) -> Iterator[str | None]:
    """Weave's own trace server code, when `make test` has built its environment; else None."""
    root = Path(__file__).parents[1]
    python = root / ".venv-weave" / "bin" / "python"
    if not python.exists():
        yield None
        return
    port = free_port()
    script = root / "tests" / "weave" / "trace_server.py"
    url = f"http://127.0.0.1:{port}"
    command = [str(python), str(script), str(folder / "weave.db"), str(port), "0123456789" * 4]
    with process(command, f"{url}/server_info", folder / "weave.log"):
        yield url


def cpu_s(root: psutil.Process) -> float:
    """CPU seconds of a process and its living children."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def caller(checkout: Path | None) -> None:
    """Wall and CPU that a 5-span trajectory costs its creator. With a checkout, its costs and both in bytes."""
    commands = {name: _caller(name) for name in CONTENDERS}
    if checkout is not None:
        try:
            commands["checkout"] = _caller("ours", checkout)
        except ValueError as error:
            raise SystemExit(f"--checkout: {error}") from None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with mlflow_server(folder) as (uri, _), weave_server(folder) as weave_url:
            urls = {**dict.fromkeys(commands, uri), "weave": weave_url}
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in commands if urls[name]}
            stored: dict[str, list[float]] = {name: [] for name in rounds}
            for _ in range(ROUNDS):
                for contender, results in rounds.items():
                    before = _database_bytes(folder)
                    results.append(_measured(commands[contender], str(urls[contender])))
                    stored[contender].append((_database_bytes(folder) - before) / (WARM_UP + CALLS))
    if checkout is not None:
        for contender in ("ours", "checkout"):
            database = statistics.median(stored[contender])
            print(f"{contender:8} {_sent(commands[contender]):.0f} bytes sent, {database:.0f} in MLflow's database")
    middle = {name: _medians(results) for name, results in rounds.items()}
    for name, median in middle.items():
        ratio = median["p50_ms"] / middle["ours"]["p50_ms"], median["cpu_ms"] / middle["ours"]["cpu_ms"]
        print(
            f"{name:8} p50 {median['p50_ms']:6.3f} ms  p99 {median['p99_ms']:7.3f} ms  CPU {median['cpu_ms']:6.3f} ms"
            f"   {ratio[0]:5.1f}x wall, {ratio[1]:5.1f}x CPU of ours"
        )


def _caller(contender: str, checkout: Path | None = None) -> tuple[list[str], dict[str, str]]:
    """The command that measures a contender, and its environment."""
    if checkout is None:
        return [sys.executable, __file__, "_caller", contender], {**os.environ}
    python, path = interpreter(checkout)
    return [python, str(checkout / "benchmarks" / "tracing.py"), "_caller", contender], os.environ | {
        "PYTHONPATH": path
    }


def _measured(contender: tuple[list[str], dict[str, str]], url: str) -> dict[str, float]:
    command, env = contender
    done = subprocess.run([*command, url], env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _database_bytes(folder: Path) -> int:
    """Bytes of MLflow's database, without its log."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db", timeout=60.0)) as database:
        [[pages], [size]] = (database.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    return pages * size


def _sent(contender: tuple[list[str], dict[str, str]]) -> float:
    """Bytes that a contender sends of a trajectory, in requests' bodies."""
    sizes: list[int] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sizes.append(len(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        _measured(contender, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    return sum(sizes) / (WARM_UP + CALLS)


def _medians(results: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def measure_caller(contender: str, url: str) -> None:
    """In a process of its own: the cost of each of `CALLS` trajectories, printed as JSON."""
    trajectory, flush = CONTENDERS[contender](url)
    for number in range(WARM_UP):
        trajectory(number)
    flush()
    walls: list[float] = []
    started = time.process_time()
    for number in range(CALLS):
        began = time.perf_counter()
        trajectory(number)
        walls.append((time.perf_counter() - began) * 1000)
        time.sleep(PAUSE_S)
    flush()
    cpu = (time.process_time() - started) * 1000 / CALLS
    walls.sort()
    print(json.dumps({"p50_ms": walls[CALLS // 2], "p99_ms": walls[CALLS * 99 // 100], "cpu_ms": cpu}))


def store(postgres: bool) -> None:
    """Spans per second until everything is stored, and the server's CPU for it."""
    with tempfile.TemporaryDirectory() as name, mlflow_server(Path(name)) as (uri, server):
        _report_store("sqlite", *_stored(uri, server))
    if postgres:
        from tracing_postgres import postgres_store

        with (
            tempfile.TemporaryDirectory() as name,
            postgres_store() as url,
            mlflow_server(Path(name), url) as (uri, server),
        ):
            _report_store("postgres", *_stored(uri, server))


def _stored(uri: str, server: psutil.Process) -> tuple[float, float, int]:
    tracing = ours(uri)
    trajectory_of_eight_spans(tracing, 0)
    tracing.flush(60)
    cpu, began, before = cpu_s(server), time.perf_counter(), tracing.stats().ended
    for number in range(STORED):
        trajectory_of_eight_spans(tracing, number)
    if not tracing.flush(300):
        raise SystemExit(f"not stored within 300 s: {tracing.stats()}")
    wall, spans = time.perf_counter() - began, tracing.stats().ended - before
    if tracing.stats().lost:
        raise SystemExit(f"spans were lost: {tracing.stats()}")
    return spans / wall, (cpu_s(server) - cpu) * 1000 / STORED, spans


def _report_store(name: str, rate: float, cpu_ms: float, spans: int) -> None:
    print(f"{name:9} {rate:6.0f} spans/s   {cpu_ms:5.1f} ms server CPU per 8-span trajectory   ({spans} spans)")


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("caller").add_argument("--checkout", type=Path, help="measure Trackway of this checkout too")
    parts.add_parser("store").add_argument("--postgres", action="store_true", help="Debian's PostgreSQL too")
    run = parts.add_parser("run")
    run.add_argument("--rounds", type=int, default=4)
    run.add_argument("--modes", default="off,sampled,all,away", help="the first is what the others are compared with")
    run.add_argument("--engine", choices=["torch", "sim"], default="torch", help="where the tokens come from")
    delivery = parts.add_parser("delivery")
    complete = parts.add_parser("complete")
    for part, steps in ((delivery, 4), (complete, 100)):
        part.add_argument("--steps", type=int, default=steps)
        part.add_argument("--prompts", type=int, default=12, help="of a step")
        part.add_argument("--rollouts", type=int, default=8, help="of a prompt")
    complete.add_argument("--burners", type=int, default=0, help="processes that take the cores meanwhile")
    hidden = parts.add_parser("_caller")
    hidden.add_argument("contender")
    hidden.add_argument("url")
    given = parser.parse_args()
    if given.part == "run":
        from tracing_run import measure

        measure(given.rounds, given.modes.split(","), given.engine)
        return
    if given.part == "delivery":
        from tracing_delivery import measure as measure_delivery

        measure_delivery(given.steps, given.prompts, given.rollouts)
        return
    if given.part == "complete":
        from tracing_complete import measure as measure_complete

        measure_complete(given.steps, given.prompts, given.rollouts, given.burners)
        return
    chosen: dict[str, Callable[[], None]] = {
        "caller": lambda: caller(given.checkout),
        "store": lambda: store(given.postgres),
        "_caller": lambda: measure_caller(given.contender, given.url),
    }
    chosen[given.part]()


if __name__ == "__main__":
    main()
