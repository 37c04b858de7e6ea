"""Trackway's training step, all five services on Ray beside MLflow: a contender of `step.py`.

It starts a deployment of its own, trains, and stops it. CPU is that of the deployment's process trees; this process,
which only watches, is left out.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from step_report import process_name
from step_work import SILENCE_S, WARM_UP, Events, Work

from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.trainer.data import make_tiny

RUN = "step"
_POLL_S = 0.01
_SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_ROUTES_LEFT_OUT = ("/metrics", "/ready", "/health", "unmatched")


class Meter:
    """CPU seconds of a deployment's processes by name, which never fall when a process ends."""

    def __init__(self, deployment: Deployment) -> None:
        self._roots = [(record.name, process) for record in deployment.processes if (process := record.find())]
        self._names: dict[psutil.Process, str] = {}
        self._seen: dict[psutil.Process, float] = {}
        self.niceness: dict[str, int] = {}

    def now(self) -> dict[str, float]:
        """CPU seconds so far."""
        for process, name in self.living():
            with contextlib.suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                self._seen[process] = times.user + times.system
                self.niceness[name] = process.nice()
        total: dict[str, float] = defaultdict(float)
        for process, spent in self._seen.items():
            total[self._names[process]] += spent
        return dict(total)

    def living(self) -> Iterator[tuple[psutil.Process, str]]:
        """Yield each process with its name."""
        for root_name, root in self._roots:
            for process in [root, *root.children(recursive=True)]:
                name = self._names.get(process)
                if name is None or name.startswith("other"):  # Ray's workers are renamed when they get their role
                    with contextlib.suppress(psutil.Error):
                        line = " ".join(process.cmdline())
                        self._names[process] = root_name if root_name != "ray" else process_name(line)
                if process in self._names:
                    yield process, self._names[process]


class Watch(threading.Thread):
    """Reports each step when its row is written, until the last."""

    def __init__(self, rows: Path, last: int, meter: Meter, events: Events) -> None:
        super().__init__(daemon=True)
        self._rows, self._last, self._meter, self._events = rows, last, meter, events

    def run(self) -> None:
        """Until the last step's row is there."""
        read = step = 0
        while step < self._last:
            time.sleep(_POLL_S)
            if not self._rows.exists() or self._rows.stat().st_size <= read:
                continue
            with self._rows.open("rb") as file:
                file.seek(read)
                written = file.read()
            whole = written[: written.rfind(b"\n") + 1]
            read += len(whole)
            for row in map(json.loads, whole.splitlines()):
                step = row["step"]
                self._events.step(step, self._meter.now(), reward=row["data"]["critic/score/mean"])


def serve_config(work: Work) -> dict[str, Any]:
    """The services as `trackway up` starts them, with room for the batch."""
    config = yaml.safe_load(CPU_CONFIG.read_text())
    for application in config["applications"]:
        if application["name"] == "rollout":
            application["args"]["device"] = work.device
            application["args"]["max_num_seqs"] = max(128, 128 * -(-work.batch * 4 // (3 * 128)))
        for deployment in application["deployments"]:
            deployment["max_ongoing_requests"] = max(deployment["max_ongoing_requests"], 2 * work.batch)
    return config


def run_config(work: Work, data: Path) -> Any:
    """The demo's configuration with the work's sizes; one step more, since the last one saves a checkpoint."""
    return compose(
        [
            f"data.train_files={data / 'train.parquet'}",
            "data.val_files=[]",
            f"data.train_batch_size={work.prompts}",
            "data.shuffle=false",
            f"data.max_response_length={work.max_response}",
            f"actor_rollout_ref.model.path={work.model}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={work.micro_batch}",
            f"actor_rollout_ref.actor.optim.lr={work.learning_rate}",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
            f"actor_rollout_ref.actor.optim.lr_warmup_steps={WARM_UP}",
            f"actor_rollout_ref.rollout.n={work.samples}",
            f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={work.turns}",
            f"trainer.experiment_name={RUN}",
            f"trainer.total_training_steps={work.warm + work.steps + 1}",
            "trainer.val_before_train=false",
            "trainer.save_freq=-1",
            f"trackway.seed={work.seed}",
            f"trackway.device={work.device}",
            *([] if work.tracing else ["trackway.trace_prompts_per_step=0"]),
        ],
        config_name="tiny_demo",
    )


def series(deployment: Deployment) -> Counter[tuple[str, str, str]]:
    """The values of all metrics by service, name and labels."""
    found: Counter[tuple[str, str, str]] = Counter()
    for service in deployment.services:
        text = (
            httpx.get(f"{deployment.base_url}/{service}/metrics", trust_env=False, timeout=60).raise_for_status().text
        )
        for name, labels, value in _SERIES.findall(text):
            found[service, name, labels] = float(value)  # pyright: ignore[reportArgumentType]
    return found


def reported(
    before: Counter[tuple[str, str, str]], after: Counter[tuple[str, str, str]], steps: int
) -> dict[str, object]:
    """Requests by service and route, sampled tokens, and tokens per decode step, of an average step."""
    requests: Counter[str] = Counter()
    engine: dict[str, float] = {}
    for (service, name, labels), value in after.items():
        grown = value - before[service, name, labels]
        if name == "trackway_requests_total":
            by = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if by["route"] not in _ROUTES_LEFT_OUT and grown:
                refused = "" if by["status"].startswith("2") else f" ({by['status']})"
                requests[f"{service} {by['method']} {by['route']}{refused}"] += grown  # pyright: ignore[reportArgumentType]
        elif name.startswith("trackway_engine_"):
            engine[name.removeprefix("trackway_engine_").removesuffix("_total")] = grown
    return {
        "requests": {route: round(count / steps, 1) for route, count in requests.most_common()},
        "tokens": engine["generated_tokens"] / steps,
        "tokens_per_decode_step": engine["generated_tokens"] / max(1.0, engine["steps"]),
        "prefilled_tokens": engine["prefilled_tokens"] / steps,
    }


def main() -> None:
    """The work in the file that is the argument."""
    work = Work.read(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  Ray's own default is 15
    folder = Path(work.folder)
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump(serve_config(work)))
    make_tiny(folder / "data", len(work.rows()), 16, seed=work.seed)
    run = run_config(work, folder / "data")
    settings = UpSettings(
        config=config,
        outputs=folder / "outputs",
        model_path=Path(work.model),
        mlflow_uri=None,
        start_timeout_s=SILENCE_S - 30,
        port=0,
        dashboard_port=0,
        ray_port=0,
        mlflow_port=0,
    )
    deployment = bring_up(settings, lambda name, state: print(f"{name}: {state}", flush=True))
    try:
        measure(work, deployment, run)
    finally:
        take_down(deployment)


def measure(work: Work, deployment: Deployment, config: Any) -> None:
    """Train, and report what each step took."""
    events, meter, total = Events(work), Meter(deployment), work.warm + work.steps + 1
    before = series(deployment)
    watch = Watch(deployment.outputs / RUN / "metrics.jsonl", total, meter, events)
    watch.start()
    RunSession(deployment).start(config, RUN)
    RunSession(deployment).follow(RUN, lambda info: None)
    watch.join(10)
    events.end(niceness=meter.niceness, **reported(before, series(deployment), total))


if __name__ == "__main__":
    main()
