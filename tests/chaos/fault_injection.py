"""A run whose processes are signalled by a schedule, and what an operator does about it.

The product brings back replicas, the proxy, MLflow and a worker that was killed. The operator, who is played here,
resumes a run that was stopped with its worker or interrupted with its trainer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
import psutil

from tests.chaos.fault_schedule import Fault, Target, spread
from tests.chaos.fault_targets import mlflow_server, processes_of, running, send, stopped, with_children, workers
from tests.chaos.run_progress import StepProgress, ended_trajectories
from trackway.clients import AgentClient, CallPolicy, TrainerClient, run
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import ENDED, RunInfo, RunState

T = TypeVar("T")

MOMENT_S = 180.0
"""Longest wait for a moment: a step takes seconds, its share of a replica's start tens of seconds."""
RECOVERY_S = 180.0
"""Longest wait until a target works again."""
END_S = 300.0
"""Longest wait for the run's end after the last fault."""
_POLL_S = 0.2
_ASK = CallPolicy.question(10.0)
_PASSING = (ErrorCode.CONFLICT, ErrorCode.DEADLINE_EXCEEDED)
"""Refusals of a resume after which it is tried again, beside those that say so."""


@dataclass(frozen=True)
class Injection:
    """A fault that was injected."""

    fault: Fault
    signalled: Sequence[psutil.Process]
    """The target's processes."""
    descendants: Sequence[psutil.Process]
    """Theirs, at that time."""
    step: int
    """Steps that were done then."""
    since: float
    """time.monotonic() of the signal."""
    step_after: int
    """Steps that were done when the target worked again."""


@dataclass
class ChaosRun:
    """A run that is active on a deployment, and the faults that were injected into it."""

    deployment: Deployment
    name: str
    ahead: int = 0
    """Steps whose rollouts are under way beyond the next one."""
    injections: list[Injection] = field(default_factory=list)
    resumes: int = 0
    steps_seen: list[tuple[float, int]] = field(default_factory=list)
    """time.monotonic() of the first look at which so many steps were done, in the order of the looks."""
    _progress: StepProgress = field(default_factory=StepProgress)
    _refusal: str = ""

    @property
    def folder(self) -> RunFolder:
        """The run's folder, which answers whatever service is away."""
        return RunFolder(self.deployment.outputs / self.name)

    def endure(self, schedule: Sequence[Fault]) -> RunInfo:
        """Inject the faults, each when its moment is there and the one before is over; how the run stands at its end.

        MLflow's return is waited for at the end only: the run does not need it, and would be over before. Faults whose
        steps went by during a recovery are spread over those that are left.

        Raises AssertionError, with what was waited for, when a moment, a recovery or the end does not come in time, or
        when the run fails.
        """
        steps = self.folder.info().total_steps
        for position in range(len(schedule)):
            [fault, *_] = spread(schedule[position:], self.folder.info().step, steps)
            self._wait(f"{fault.moment}, for {fault}", lambda fault=fault: self._is_time(fault), MOMENT_S)
            self._inject(fault)
        self._wait("the run's end", lambda: self.folder.info().state is RunState.FINISHED, END_S)
        self._wait("MLflow's answer", lambda: _answers(f"{self.deployment.mlflow_uri}/health"), RECOVERY_S)
        return self.folder.info()

    def _is_time(self, fault: Fault) -> bool:
        info = self.folder.info()
        assert info.state is not RunState.FINISHED, f"the run ended before {fault}; give it more steps"
        needs_count = info.step == fault.moment.step and fault.moment.trajectories
        return self._progress.has_reached(fault.moment, info.step, self._ended_trajectories() if needs_count else None)

    def _ended_trajectories(self) -> int | None:
        client = AgentClient(f"{self.deployment.base_url}/agent", policy=_ASK)
        try:
            return ended_trajectories(run(client.send("GET", "/metrics")).text)
        except TrackwayError:
            return None

    def _inject(self, fault: Fault) -> None:
        processes = self._wait(f"a process of {fault.target}", lambda: self._processes(fault.target), RECOVERY_S)
        signalled = [psutil.Process(process.pid) for process in processes]
        descendants = [process for process in with_children(signalled) if process not in signalled]
        step, since = self.folder.info().step, time.monotonic()
        print(f"{since:.1f} step {step}: {fault} -> {[process.pid for process in signalled]}", flush=True)
        send(fault, signalled)
        self._wait(f"the recovery from {fault}", lambda: self._has_recovered(fault, signalled), RECOVERY_S)
        self._wait("all services", self._is_healthy, RECOVERY_S)
        step_after = self.folder.info().step
        print(f"{time.monotonic():.1f} step {step_after}: recovered in {time.monotonic() - since:.1f} s", flush=True)
        self.injections.append(Injection(fault, signalled, descendants, step, since, step_after))

    def _processes(self, target: Target) -> list[psutil.Process]:
        return processes_of(target, self.deployment, self.folder.path)

    def _has_recovered(self, fault: Fault, signalled: Sequence[psutil.Process]) -> bool:
        if fault.stop_s:
            return not stopped(signalled)
        if running(signalled):
            return False
        if fault.target is Target.PROXY:
            return _answers(f"{self.deployment.base_url}/-/healthz")
        if fault.target is Target.CONTROLLER:
            return bool(self._processes(fault.target))
        return fault.target not in (Target.WORKER, Target.RANK, Target.TRAINER) or self._trains()

    def _is_healthy(self) -> bool:
        return is_healthy(self.deployment)

    def _trains(self) -> bool:
        state = self.folder.info().state
        return state is RunState.FINISHED or (state is RunState.RUNNING and bool(workers(self.folder.path)))

    def _wait(self, what: str, condition: Callable[[], T], deadline_s: float) -> T:
        """The first true value of the condition; meanwhile the operator looks after the run."""
        end = time.monotonic() + deadline_s
        while True:
            self._look_after()
            if value := condition():
                return value
            assert time.monotonic() < end, f"waited {deadline_s:.0f} s for {what}: {self._standing()}"
            time.sleep(_POLL_S)

    def _look_after(self) -> None:
        """Resume the run when it has stopped."""
        info = self.folder.info()
        if not self.steps_seen or self.steps_seen[-1][1] != info.step:
            self.steps_seen.append((time.monotonic(), info.step))
        if info.state not in ENDED or info.state is RunState.FINISHED:
            return
        assert info.state is RunState.STOPPED or info.interrupted, f"the run did not survive: {self._standing()}"
        try:
            run(TrainerClient(f"{self.deployment.base_url}/trainer", policy=_ASK).resume(self.name))
            self.resumes += 1
        except TrackwayError as error:
            if not error.retryable and error.code not in _PASSING:
                raise
            self._refusal = f"{error.code}: {error.message}"

    def _standing(self) -> str:
        info = self.folder.info()
        log = self.folder.log.read_text(errors="replace")[-1500:] if self.folder.log.exists() else "(no log)"
        injected = [(injection.fault, injection.step) for injection in self.injections]
        return (
            f"run {self.name} is {info.state} at step {info.step} ({info.message!r}), resumed {self.resumes} times, "
            f"last refusal {self._refusal!r}; injected so far: {injected}; the end of its log:\n{log}"
        )


def leftovers(deployment: Deployment, chaos: ChaosRun, expected: dict[str, int]) -> list[str]:
    """What the faults left behind, a sentence each; `expected` is each service's number of replicas."""
    family = with_children(process for record in deployment.processes if (process := record.find()))
    found = [f"{process} stands still" for process in stopped(family)]
    found += [f"{process} still trains" for process in workers(chaos.folder.path)]
    for injection in chaos.injections:
        if not injection.fault.stop_s:
            remaining = running([*injection.signalled, *injection.descendants])
            found += [f"{process} outlived {injection.fault}" for process in remaining]
    kills = [injection.fault for injection in chaos.injections if not injection.fault.stop_s]
    drafts = list(chaos.folder.path.rglob(".*.tmp"))  # a later worker removes them, after an hour
    found += [f"{len(drafts)} drafts of {len(kills)} kills: {drafts}"] if len(drafts) > len(kills) else []
    for service in serve_api.service_statuses(deployment):
        ready = sum(replica.ready.ready for replica in service.replicas)
        if (service.status, ready, len(service.replicas)) != ("RUNNING", *[expected[service.service]] * 2):
            found.append(
                f"{service.service} is {service.status} with {ready} of {len(service.replicas)} replicas ready"
            )
    if not mlflow_server(deployment):
        found.append("MLflow has no process")
    return found


def is_healthy(deployment: Deployment) -> bool:
    """Whether every service runs and all of its replicas are ready."""
    try:
        services = serve_api.service_statuses(deployment)
    except (TrackwayError, UserError):
        return False
    return all(
        service.status == "RUNNING" and service.replicas and all(replica.ready.ready for replica in service.replicas)
        for service in services
    )


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
