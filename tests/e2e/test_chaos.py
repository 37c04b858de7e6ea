"""The promise: whichever process is killed, stopped or terminated whenever, a run loses and repeats no trajectory.

The end-to-end tests run one schedule, `make test-chaos` ten more on demand, and five each of overlapped runs, of runs
on two ranks, of runs on sessions and of commands that get Ctrl-C twice. Targets, signals and moments are drawn from
the seed (tests/chaos/fault_schedule.py); the run is held against one of the same settings that was left alone.
"""

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from operator import eq
from pathlib import Path
from signal import Signals

import httpx
import pytest
from mlflow import MlflowClient

from tests.chaos.chaos_settings import IN_CI, OF_KINDS, ON_DEMAND, TRACED, TRAJECTORIES, ChaosSettings, RunKind
from tests.chaos.fault_injection import ChaosRun, is_healthy, leftovers
from tests.chaos.fault_schedule import Fault, Target
from tests.chaos.run_invariants import (
    drift_of,
    mlflow_differences,
    of_the_first_weights,
    rollout_of,
    rows_of,
    trajectories_of,
    unexplained_gaps,
)
from tests.e2e.access_tokens import OPERATOR
from tests.e2e.small_runs import small_run
from tests.e2e.test_external_agent import answer, opened_for
from tests.e2e.test_training import quiet
from trackway.clients import TrainerClient, run
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.up import spans_waiting
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.traces import MlflowStore
from trackway.traces.verify import waiting
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.sessions import TrainedSession
from trackway.wire.trainer import RunInfo, RunState

SETTLED_S = 120.0
"""Longest wait until everything has reached MLflow, without progress, and every process has come back."""
AGENTS = 8
"""Deployed agents that work at the same time."""
STEPS_AHEAD = 8
"""Steps for which they end sessions before the run has trained on them; groups that a fault left incomplete count."""
RARE_SAVES = ("trainer.save_freq=2", "trainer.test_freq=4")
"""A killed worker then trains a step again."""
PATIENT = ("trackway.max_restarts=6", "trackway.feedback_deadline_s=30")
TRACED_PROMPTS = ("trackway.trace_prompts_per_step=2",)
UNTRACED = ("trackway.trace_prompts_per_step=0", "trackway.trace_validation_samples=0")

AHEAD = (RunKind.OVERLAPPED, RunKind.OVER_SAMPLED)
"""Kinds of runs that generate ahead of the learner."""
_undisturbed: dict[tuple[RunKind, int], RunInfo] = {}


def start(deployment: Deployment, name: str, steps: int, *overrides: str) -> RunInfo:
    words = small_run(deployment.outputs, name, steps, *RARE_SAVES, *PATIENT, *overrides)
    return RunSession(deployment).start(compose(words, config_name="tiny_demo"), name)


def undisturbed(deployment: Deployment, kind: RunKind, steps: int) -> RunInfo:
    """A run of so many steps that was left alone; one for all schedules of a kind."""
    if (kind, steps) not in _undisturbed:
        name = start(deployment, f"undisturbed-{kind.name.lower()}-{steps}", steps, *UNTRACED, *kind.value).run
        _undisturbed[kind, steps] = RunSession(deployment).follow(name, quiet)
    return _undisturbed[kind, steps]


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's store, used here
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(IN_CI, marks=pytest.mark.e2e, id=f"seed {IN_CI.seed}"),
        *(
            pytest.param(settings, marks=pytest.mark.chaos, id=settings.name)
            for settings in (*ON_DEMAND, *OF_KINDS)
            if settings.kind is not RunKind.SESSIONS
        ),
    ],
)
def test_a_run_survives_signals_to_random_processes(deployment: Deployment, settings: ChaosSettings) -> None:
    began = time.monotonic()
    calm = undisturbed(deployment, settings.kind, settings.steps)
    replicas = ready_replicas(deployment)
    words, goes_ahead = (*TRACED_PROMPTS, *settings.kind.value), settings.kind in AHEAD
    chaos = ChaosRun(
        deployment, start(deployment, f"chaos-{settings.name}", settings.steps, *words).run, int(goes_ahead)
    )
    started = time.monotonic()

    info = chaos.endure(settings.schedule)
    ended = time.monotonic()

    assert (info.state, info.step, calm.state, calm.step) == (RunState.FINISHED, settings.steps) * 2
    assert [sent(injection.fault) for injection in chaos.injections] == [sent(fault) for fault in settings.schedule]
    has_every_trajectory_once(calm, info, every_prompt=settings.kind is not RunKind.OVER_SAMPLED)
    has_a_whole_account(info)
    if not goes_ahead:  # which step trains a rollout depends on when it ends
        has_the_rows_of(calm, info)
    has_whole_traces(chaos, info)
    eventually_empty("left behind", lambda: leftovers(deployment, chaos, replicas))
    eventually_empty("not in MLflow", lambda: not_in_mlflow(deployment, chaos))
    parts = (
        f"{started - began:.0f} s before the run, {ended - started:.0f} s of it, {time.monotonic() - ended:.0f} s after"
    )
    print(f"{settings.name} held: {parts}; resumed {chaos.resumes} times", flush=True)


@pytest.mark.chaos
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "settings", [settings for settings in OF_KINDS if settings.kind is RunKind.SESSIONS], ids=lambda it: it.name
)
def test_a_run_on_sessions_survives_signals_to_random_processes(
    deployment: Deployment, settings: ChaosSettings
) -> None:
    replicas = ready_replicas(deployment)
    words = small_run(
        deployment.outputs, name := f"chaos-{settings.name}", settings.steps, *PATIENT, *settings.kind.value
    )
    config = compose([*words, "trainer.save_freq=2"], config_name="tiny_demo")
    chaos = ChaosRun(deployment, RunSession(deployment).start(config, name).run)
    with agents_at_work(chaos) as (opened, ended):
        info = chaos.endure(settings.schedule)

    made = trajectories_of(Path(info.folder))
    trained = [trajectory.session_id for trajectory in made]
    waiting = {file.stem for kind in ("waiting", "drawn") for file in (Path(info.folder) / "sessions" / kind).glob("*")}
    assert (info.state, info.step) == (RunState.FINISHED, settings.steps)
    assert [sent(injection.fault) for injection in chaos.injections] == [sent(fault) for fault in settings.schedule]
    assert (len(trained), len(set(trained))) == (settings.steps * TRAJECTORIES,) * 2
    assert [trajectory.error for trajectory in made if trajectory.error] == []
    assert set(trained) <= opened
    assert ended - set(trained) - waiting == set()
    has_a_whole_account(info)
    eventually_empty("left behind", lambda: leftovers(deployment, chaos, replicas))
    eventually_empty("not in MLflow", lambda: not_in_mlflow(deployment, chaos))
    print(f"{settings.name} held; {len(opened)} sessions opened, {len(ended)} ended", flush=True)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_got_ctrl_c_twice_goes_on_as_if_there_had_been_none(deployment: Deployment, seed: int) -> None:
    draw, steps, name = random.Random(seed), 12, f"twice-{seed}"
    words = small_run(deployment.outputs, name, steps, *RARE_SAVES, *PATIENT, *UNTRACED)
    command = [sys.executable, "-m", "trackway.deploy.cli", "train", "--config-name", "tiny_demo"]
    command += ["--outputs", str(deployment.outputs), *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    folder, moment = RunFolder(deployment.outputs / name), 1 + int(draw.random() * 5)
    eventually_empty("too early", lambda: [] if folder.exists and folder.info().step >= moment else ["the run"])
    process.send_signal(Signals.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(draw.random() * 2)
    process.send_signal(Signals.SIGINT)
    _, shown = process.communicate(timeout=SETTLED_S)
    saw_its_end = "checkpoint saved; " in shown
    stopped = folder.info()
    print(f"{name}: {stopped.state} at step {stopped.step}; the command said: {shown[-300:]}", flush=True)
    RunSession(deployment).resume(name)
    info = RunSession(deployment).follow(name, quiet)

    assert process.returncode == 130 and f"trackway train --resume {name}" in shown.replace("\n", " ")
    assert not saw_its_end or stopped.state is RunState.STOPPED
    assert (info.state, info.step, info.restarts) == (RunState.FINISHED, steps, 0)
    has_every_trajectory_once(undisturbed(deployment, RunKind.PLAIN, steps), info)
    has_a_whole_account(info)
    assert [row.step for row in RunFolder(Path(info.folder)).rows()] == list(range(steps + 1))


@contextmanager
def agents_at_work(chaos: ChaosRun) -> Iterator[tuple[set[str], set[str]]]:
    """Deployed agents, of which each opens one session after the other; the ids of those opened, and of those ended.

    A session whose replica died is left for another one. The agents wait when they are far ahead of the run.
    """
    opened: set[str] = set()
    ended: set[str] = set()
    numbers, over = count(), threading.Event()

    def work() -> None:
        while not over.is_set():
            if len(ended) > (chaos.folder.info().step + STEPS_AHEAD) * TRAJECTORIES:
                over.wait(0.5)
                continue
            group = next(numbers) // 4
            with suppress(httpx.HTTPError):
                access = opened_for(chaos.deployment, TrainedSession(run=chaos.name, group=group))
                opened.add(access.session_id)
                answer(access).raise_for_status()
                own, headers = access.base_url.removesuffix("/v1"), {"authorization": f"Bearer {OPERATOR}"}
                score = {"score": group % 2}
                httpx.post(f"{own}/reward", json=score, headers=headers, timeout=30).raise_for_status()
                httpx.post(f"{own}/end", headers=headers, timeout=120).raise_for_status()
                ended.add(access.session_id)
                continue
            over.wait(0.5)

    with ThreadPoolExecutor(AGENTS) as pool:
        working = [pool.submit(work) for _ in range(AGENTS)]
        try:
            yield opened, ended
        finally:
            over.set()
    for future in working:
        future.result()


def ready_replicas(deployment: Deployment) -> dict[str, int]:
    """Each service's number of replicas, once all are ready."""
    eventually_empty("not healthy", lambda: [] if is_healthy(deployment) else ["a service"])
    return {found.service: len(found.replicas) for found in serve_api.service_statuses(deployment)}


def has_a_whole_account(info: RunInfo) -> None:
    """Every rollout that was submitted is in one state, and every trained one is used."""
    states = dict(info.rollout_states)
    assert states.pop("submitted") == sum(states.values())
    assert states["used"] == info.step * TRAJECTORIES


def sent(fault: Fault) -> tuple[Target, Signals, float]:
    """A fault without its moment, which a recovery may have moved."""
    return fault.target, fault.signal, fault.stop_s


def has_every_trajectory_once(calm: RunInfo, info: RunInfo, every_prompt: bool = True) -> None:
    """Check that the run trained each trajectory of the undisturbed run once, without an error.

    Without `every_prompt` the runs may have trained different prompts.
    """
    wanted, trained = trajectories_of(Path(calm.folder)), trajectories_of(Path(info.folder))

    assert [(trajectory.id, trajectory.error) for trajectory in trained if trajectory.error is not None] == []
    keys, wanted_keys = (Counter(rollout_of(trajectory).key for trajectory in rows) for rows in (trained, wanted))
    assert keys == wanted_keys if every_prompt else set(keys.values()) == {1}
    assert len(trained) == info.step * TRAJECTORIES + 8 * (2 + (info.step - 1) // 4)


def has_the_rows_of(calm: RunInfo, info: RunInfo) -> None:
    """Byte by byte what the data set and the model's own weights give.

    Later weights differ between any two runs: the order in which an engine batches its requests rounds the logprobs.
    There the learner must agree with the engine, which it does only if both hold the weights of the same step.
    """
    wanted = [rollout_of(trajectory) for trajectory in trajectories_of(Path(calm.folder))]
    trained = [rollout_of(trajectory) for trajectory in trajectories_of(Path(info.folder))]

    assert [(rollout.key, rollout.prompt) for rollout in trained] == [
        (rollout.key, rollout.prompt) for rollout in wanted
    ]
    print(f"{sum(map(eq, trained, wanted))} of {len(wanted)} trajectories have the very same content", flush=True)
    assert of_the_first_weights(trained) == of_the_first_weights(wanted)
    assert rows_of(Path(info.folder)) == rows_of(Path(calm.folder))
    assert len(drift_of(Path(info.folder))) == info.step and max(drift_of(Path(info.folder))) < 1e-4


def has_whole_traces(chaos: ChaosRun, info: RunInfo) -> None:
    """Every trajectory that was to be traced is a whole trace, but for spans that died with a killed process."""
    store = MlflowStore(chaos.deployment.mlflow_uri, [str(info.experiment_id)])
    traced = [trajectory for trajectory in trajectories_of(Path(info.folder)) if trajectory.trace_id]

    assert len(traced) == info.step * TRACED + 2 * (2 + (info.step - 1) // 4)
    are_delivered(chaos.deployment)
    assert unexplained_gaps(store, chaos, SETTLED_S) == []


def are_delivered(deployment: Deployment) -> None:
    """Wait until no span waits in a replica or on disk, however slow MLflow is; those of killed processes included."""
    fewest, end = sys.maxsize, time.monotonic() + SETTLED_S
    while left := spans_waiting(deployment) + waiting(deployment.outputs).files:
        if left < fewest:
            fewest, end = left, time.monotonic() + SETTLED_S
        assert time.monotonic() < end, f"{left} spans and files of spans wait, none was delivered for {SETTLED_S:.0f} s"
        time.sleep(0.5)


def not_in_mlflow(deployment: Deployment, chaos: ChaosRun) -> list[str]:
    """What the run still lacks in MLflow, or has there differently."""
    info = run(TrainerClient(f"{deployment.base_url}/trainer").run(chaos.name))
    losses = [str(summary) for summary in info.tracking if summary.waiting or summary.lost]
    # From the server's database: on a busy machine the server, at its low priority, is slow to answer 128 requests.
    database = f"sqlite:///{deployment.outputs}/mlflow/mlflow.db"
    return losses or mlflow_differences(MlflowClient(tracking_uri=database), info)


def eventually_empty(what: str, look: Callable[[], list[str]]) -> None:
    """Return once `look` finds nothing; fails with what it found last."""
    end = time.monotonic() + SETTLED_S
    while found := look():
        assert time.monotonic() < end, f"after {SETTLED_S:.0f} s {what}: {found}"
        time.sleep(0.5)
