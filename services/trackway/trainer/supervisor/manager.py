"""Starts, stops and resumes the runs of an outputs folder.

    start, resume     -> STARTING -> (the process: RUNNING ...) -> its final state, settled by process.py
    stop              -> SIGTERM, a deadline, SIGKILL -> STOPPED
    service shutdown  -> SIGUSR1, a deadline, SIGKILL -> STOPPED, interrupted -> auto-resumed, or FAILED

registry.py reports the state of each run. Runs whose service or machine was lost are resumed: sessions always, others
with `resume_interrupted`.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import JsonValue, SecretStr

from trackway.clients import CallPolicy, ServiceClient
from trackway.run_config import RunConfig, resolve
from trackway.run_config.compose import changed
from trackway.tracing import TracingSettings
from trackway.trainer.data.own_code import health_of, loaded_code, not_loaded
from trackway.trainer.delivery import check_loggers
from trackway.trainer.run_state.checkpoint import check_storage
from trackway.trainer.run_state.folder import Owner, RunFolder
from trackway.trainer.run_state.heartbeat import LivenessMonitor
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.settings import handed_over
from trackway.trainer.supervisor.process import Standby, Supervised
from trackway.trainer.supervisor.registry import RunRegistry
from trackway.trainer.supervisor.sharing import (
    SharedEngines,
    ask_engines,
    check_beside,
    check_place,
    check_weights,
    policy_of,
)
from trackway.trainer.traces.preflight import check_backends
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import OwnCode
from trackway.wire.trainer import ENDED, RunInfo, RunRequest, RunState

logger = logging.getLogger("trackway.trainer")

EXIT_WAIT_S = 10.0
"""Longest wait for the exit of a process whose run has ended or has a new owner, which it learns at its next beat."""


SESSION: Mapping[str, JsonValue] = MappingProxyType(
    {
        "algorithm.adv_estimator": "grpo",  # no value model
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "trackway.max_restarts": 100,
    }
)
"""Configuration of a run that is driven by calls, where it differs from the default."""


class RunManager:
    """The runs of one outputs folder, at most `max_runs` of them active. Methods raise TrackwayError."""

    def __init__(
        self,
        outputs: Path,
        services: ServiceUrls,
        stop_deadline_s: float = 120.0,
        tracing: TracingSettings | None = None,
        token: SecretStr | None = None,
        liveness: LivenessMonitor | None = None,
        max_runs: int = 1,
    ) -> None:
        self.registry = RunRegistry(outputs, liveness)
        self.services = services
        """Services for every run that is started or resumed here."""
        self._tracing = tracing or TracingSettings()
        self._token = token
        self._stop_deadline_s, self._max_runs = stop_deadline_s, max_runs
        self._lock = asyncio.Lock()
        self._standby = Standby()

    async def stand_by(self) -> None:
        """Start a process for the next run, which then trains sooner by the time that PyTorch takes to load."""
        await self._standby.start(handed_over(self._tracing, self._token))

    async def start(self, request: RunRequest) -> RunInfo:
        """Start a new run. CONFLICT while another run is active, when the name is taken, or when a service has not
        loaded the own code that the configuration names.

        INVALID_REQUEST when the configuration names a missing checkpoint, a logger that cannot log, or a trace backend
        that a service cannot send to, or when the rollout service cannot load the run's weights. StorageError, and no
        run is started, when its folder cannot be written.
        """
        config = runnable(resolve(request.config))
        if request.run is not None:
            config = config.with_values({"trainer.experiment_name": request.run})
        check_adapter(config)
        await asyncio.to_thread(check_storage, config)
        await self._check_tracking(config)
        code = await self._loaded_code(config)
        engine_threads, engines = await self._engine_threads(), await self._engines(config)
        folder = self.registry.folder(config.trainer.experiment_name)
        async with self._lock:
            with self.registry.outputs_lock.held():
                others = self._others(folder.name, config, engines)
                policy = policy_of(folder.name, others, engines.default_policy)
                check_place(engines.limits, policy, others)
                services = self.services.with_policy(policy)
                folder.create(config, services)
                folder.update(code=code, engine_threads=engine_threads, policy=services.policy)
                await self._supervise(folder, config, services)
                self._supersede(folder.name)
        return self.registry.info(folder.name)

    async def start_session(self, name: str, values: Mapping[str, JsonValue]) -> RunInfo:
        """Start a run that is driven by calls, with these keys of the configuration. CONFLICT as for `start`.

        Its process executes the log in the folder's `calls` (trackway.trainer.calls), each model with an adapter.
        """
        config = resolve({**SESSION, **values, "trainer.experiment_name": name})
        await self._check_tracking(config)
        engine_threads, engines = await self._engine_threads(), await self._engines()
        folder = self.registry.folder(name)
        async with self._lock:
            with self.registry.outputs_lock.held():
                check_place(engines.limits, name, self._others(name, config, engines))
                folder.create(config, self.services)
                folder.calls.mkdir(exist_ok=True)
                folder.update(engine_threads=engine_threads, policy=name)
                await self._supervise(folder, config, self.services)
        return self.registry.info(name)

    def state(self, name: str) -> RunInfo | None:
        """Return the status of a run, or None before it has started."""
        return self.registry.info(name) if self.registry.folder(name).exists else None

    def wake(self, name: str) -> None:
        """Tell the process of a session that its log has grown, if this service has it."""
        if name in self.registry.active:
            self.registry.active[name][0].wake()

    async def end_session(self, name: str) -> None:
        """Let a session finish after the calls that it has. Without a run of the name, do nothing."""
        folder = self.registry.folder(name)
        if not folder.exists or not folder.is_called:
            return
        with self.registry.outputs_lock.held():
            folder.let_finish()
            info = self.registry.info(name)
            if info.state in ENDED and info.interrupted:
                folder.update(interrupted=False)
        self.wake(name)

    async def resume(
        self,
        name: str,
        *,
        by_itself: bool = False,
        skip_damaged: bool = False,
        changes: Mapping[str, JsonValue] = MappingProxyType({}),
    ) -> RunInfo:
        """Resume a run from its last checkpoint, or its last intact one. CONFLICT while it is active.

        A finished run is extended by `changes` with more steps, and is a CONFLICT without.

        `by_itself` marks an automatic resume. It counts as a restart, and is a CONFLICT once a user has stopped the
        run. `changes` are new values of CHANGEABLE keys, INVALID_REQUEST for others. The run keeps them.
        """
        folder = self.registry.existing(name)
        config = changed(folder.config(), changes)
        await self._check_tracking(config)
        code = await self._loaded_code(config)
        engine_threads = await self._engine_threads()
        engines = await self._engines(None if folder.is_called else config)
        async with self._lock:
            await self._gone(folder)
            with self.registry.outputs_lock.held():
                others = self._others(name, config, engines)
                before = folder.info()
                if by_itself and not before.interrupted:
                    message = f"expected an interrupted run to resume, got run {name!r}, which is {before.state}"
                    raise TrackwayError(ErrorCode.CONFLICT, message, run=name)
                steps = config.trainer.total_training_steps
                if before.state is RunState.FINISHED and (steps is None or steps <= before.step):
                    message = (
                        f"run {name!r} finished after step {before.step}, so there is nothing to resume; extend it, "
                        f"for example with trainer.total_training_steps={2 * before.step}"
                    )
                    raise TrackwayError(ErrorCode.CONFLICT, message, run=name)
                folder.write_owner(Owner.of(os.getpid()))
                if changes:
                    folder.write_config(config)
                restarts = before.restarts + 1 if by_itself else 0
                policy = before.policy or policy_of(name, others, engines.default_policy)
                check_place(engines.limits, policy, others)
                services = self.services if folder.is_called else self.services.with_policy(policy)
                folder.move(
                    RunState.STARTING,
                    restarts=restarts,
                    interrupted=False,
                    code=code,
                    engine_threads=engine_threads,
                    policy=policy,
                )
                await self._supervise(folder, config, services, before.interrupted, skip_damaged or by_itself)
                if not by_itself:
                    self._supersede(name)
        return self.registry.info(name)

    def interrupted(self, sessions_only: bool = False) -> list[str]:
        """The runs to resume, newest first, whose service or machine was lost. None while as many run as may.

        A run that was auto-resumed as often as `trackway.max_restarts` allows is marked FAILED. A user may resume it.
        """
        names: list[str] = []
        runs = [*self.registry.newest_first()]
        if sum(info.state not in ENDED for info in runs) >= self._max_runs:
            return []
        for info in runs:
            if info.state not in ENDED or not info.interrupted:
                continue
            with self.registry.reading(info.run):
                folder = self.registry.folder(info.run)
                if sessions_only and not folder.is_called:
                    continue
                if info.restarts < folder.config().trackway.max_restarts:
                    names.append(info.run)
                else:
                    message = f"it was resumed automatically {info.restarts} times, the most allowed; resume it by hand"
                    self._fail(folder, message)
        return names

    async def stop(self, name: str) -> RunInfo:
        """Ask the run's process to checkpoint and exit, and return at once. It is not auto-resumed.

        CONFLICT when the run is not active, or not in this service.
        """
        info = self.registry.info(name)
        active = self.registry.active.get(name)
        if info.state in ENDED and info.interrupted:
            if active is not None:  # marked dead by another service while this one was suspended
                active[0].stop()
            with self.registry.outputs_lock.held():
                folder = self.registry.folder(name)
                info = folder.info()
                if info.state in ENDED:
                    return folder.update(interrupted=False)
        if info.state in ENDED or active is None:
            self.registry.require_settled(info)
            message = f"expected an active run to stop, got run {name!r}, which is {self.registry.standing(info)}"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=name)
        active[0].stop()
        self.registry.require_settled(info)
        return self.registry.info(name)

    async def close(self) -> None:
        """Interrupt the runs of this service and wait until their processes have exited."""
        await self._standby.end()
        while self.registry.active:
            for supervised, _ in self.registry.active.values():
                supervised.stop(is_interrupted=True)
            await asyncio.wait([task for _, task in self.registry.active.values()], return_when=asyncio.FIRST_COMPLETED)

    async def _check_tracking(self, config: RunConfig) -> None:
        check_loggers(config, self._tracing.mlflow_uri)
        await check_backends(config, self.services.traced, self._tracing, self._token)

    async def _loaded_code(self, config: RunConfig) -> dict[str, OwnCode]:
        """The own code of each service that answers. CONFLICT when a service has not loaded what the run names."""
        code = await loaded_code(self.services.traced, self._token)
        problems = not_loaded(config, code)
        if problems:
            raise TrackwayError(ErrorCode.CONFLICT, "; ".join(problems))
        return {service: own for service, own in code.items() if own is not None}

    async def _engine_threads(self) -> int | None:
        health = await health_of(["rollout"], self.services.traced, self._token)
        return health["rollout"].threads if "rollout" in health else None

    async def _engines(self, config: RunConfig | None = None) -> SharedEngines:
        """Ask the rollout service. INVALID_REQUEST if it cannot load what a run of this configuration publishes."""
        engines = await ask_engines(self.services.rollout_url, self._token)
        if config is not None and config.is_supervised:  # it publishes nothing
            return engines._replace(limits=None)
        if config is not None:
            await asyncio.to_thread(check_weights, config, engines.limits)
        return engines

    async def _supervise(
        self,
        folder: RunFolder,
        config: RunConfig,
        services: ServiceUrls,
        interrupted: bool = False,
        skip_damaged: bool = False,
    ) -> None:
        """Start the run's process and watch it.

        If it cannot start, the run is marked FAILED. If even that write fails, ownership is dropped so that the next
        status check marks the run.
        """
        secrets = handed_over(self._tracing, self._token)
        supervised = Supervised(folder, config, secrets, self._stop_deadline_s, skip_damaged, self._standby)
        try:
            folder.write_services(services)
            await supervised.start()
        except BaseException as error:
            message = f"its process could not be started: {str(error) or type(error).__name__}"
            try:
                folder.move(RunState.FAILED, message, interrupted=interrupted)
            except OSError:
                folder.disown()
            raise
        self.registry.active[folder.name] = supervised, asyncio.create_task(self._watch(folder.name, supervised))

    async def _watch(self, name: str, supervised: Supervised) -> None:
        try:
            await supervised.run()
        except Exception:
            # Any error from the run's folder: the next status check finds the process dead and marks the run.
            logger.exception("run %s is no longer supervised", name)
        finally:
            del self.registry.active[name]

    async def _gone(self, folder: RunFolder) -> None:
        if folder.name not in self.registry.active or not folder.ended():
            return
        supervised, task = self.registry.active[folder.name]
        await asyncio.wait([task], timeout=EXIT_WAIT_S)
        if not task.done():
            supervised.stop(is_interrupted=True)  # kills a suspended process after the deadline
            message = f"the last process of run {folder.name!r} has not exited yet; try again"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=folder.name)

    def _fail(self, folder: RunFolder, reason: str) -> None:
        """Mark an interrupted run FAILED, so that it is not resumed automatically any more."""
        with self.registry.outputs_lock.held():
            info = folder.info()
            if info.state in ENDED and info.interrupted:
                folder.move(RunState.FAILED, f"{info.message}; {reason}", interrupted=False)

    def _supersede(self, name: str) -> None:
        """Fail the interrupted runs, whose place the run that a user has started took, so that they do not resume.

        Sessions wait for a place instead.
        """
        infos = self.registry.list()
        if sum(info.state not in ENDED for info in infos) < self._max_runs:
            return
        for info in infos:
            if info.state in ENDED and info.interrupted and not self.registry.folder(info.run).is_called:
                self._fail(self.registry.folder(info.run), f"run {name!r} was started instead; resume this run by hand")

    def _others(self, name: str, config: RunConfig, engines: SharedEngines) -> list[RunInfo]:
        """The active runs. Raises CONFLICT unless this one can run beside them."""
        others = [info for info in self.registry.list() if info.state not in ENDED]
        active = next((info for info in others if info.run == name), None)
        if active is not None or len(others) >= self._max_runs:
            first, most = active or others[0], self._max_runs
            self.registry.require_settled(first)
            at_once = "one run is active at a time" if most == 1 else f"{most} runs are active at a time"
            message = f"run {first.run!r} is {self.registry.standing(first)} and {at_once} (max_runs); "
            raise TrackwayError(ErrorCode.CONFLICT, message + "stop it, or wait until it ends", run=first.run)
        configs = {info.run: self.registry.folder(info.run).config() for info in others}
        check_beside(config, others, configs, engines.sleep)
        return others


def check_adapter(config: RunConfig) -> None:
    """Raise TrackwayError(INVALID_REQUEST) when training starts from an adapter whose rank is not known."""
    if config.actor_rollout_ref.model.lacks_rank:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            "actor_rollout_ref.model.lora_adapter_path: expected a folder with adapter_config.json on this machine, "
            f"got {config.actor_rollout_ref.model.lora_adapter_path}; correct the path, or set model.lora_rank, "
            "lora_alpha and target_modules as the adapter has them",
        )


def runnable(config: RunConfig) -> RunConfig:
    """The configuration, checked to name a model and rows. Raises TrackwayError(INVALID_REQUEST)."""
    model, rows = config.actor_rollout_ref.model.path, config.data.train_files
    required = {"actor_rollout_ref.model.path": model, "data.train_files": rows}
    if config.trackway.rollouts_from == "sessions":
        del required["data.train_files"]
    missing = [key for key, value in required.items() if not value]
    if missing:
        message = f"expected a value for {' and '.join(missing)}, got none; a run needs a model and rows"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    if config.trainer.val_only and not config.data.val_files:
        message = "trainer.val_only=true: expected rows in data.val_files, got none; name them, or leave val_only out"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return config


CHECK_INTERVAL_S = 3.0
"""Interval between checks for an interrupted run."""

_READY_POLICY = CallPolicy.question(5.0)


async def resume_periodically(
    runs: RunManager,
    token: SecretStr | None = None,
    every_s: float = CHECK_INTERVAL_S,
    *,
    sessions_only: bool = False,
) -> None:
    """Check for an interrupted run now and every `every_s` seconds. Each reason for waiting is logged once."""
    last_logged = ""
    while True:
        try:
            await resume_interrupted(runs, token, sessions_only=sessions_only)
            last_logged = ""
        except TrackwayError as error:
            if error.message != last_logged:
                logger.warning("an interrupted run cannot be resumed yet: %s", error)
            last_logged = error.message
        except Exception:
            logger.exception("the check for interrupted runs failed; next check in %s s", every_s)
        await asyncio.sleep(every_s)


async def resume_interrupted(
    runs: RunManager, token: SecretStr | None = None, *, sessions_only: bool = False
) -> RunInfo | None:
    """Resume the newest interrupted run, or session, that can be resumed. None when there is none.

    Raises TrackwayError while the services are not ready, and the newest run's error when no run can be resumed.
    """
    names = runs.interrupted(sessions_only)
    if not names:
        return None
    await _services_ready(runs.services, token)
    failures: dict[str, Exception] = {}
    for name in names:
        try:
            info = await runs.resume(name, by_itself=True)
        except Exception as error:
            failures[name] = error
        else:
            for newer, error in failures.items():
                logger.warning("run %s was interrupted and cannot be resumed: %s", newer, error)
            logger.warning("run %s was interrupted and is resumed automatically (restart %s)", name, info.restarts)
            return info
    raise failures[names[0]]


async def _services_ready(services: ServiceUrls, token: SecretStr | None) -> None:
    """Raise TrackwayError unless all services are ready: without them the run would fail at its first step."""
    for url in services.traced.values():
        await ServiceClient(url, policy=_READY_POLICY, token=token).send("GET", "/ready")
