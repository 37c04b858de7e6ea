"""The ranks of a learner: how they are started, what they are asked, and how a lost one is noticed.

The run's own process is the first rank: it holds the run's folder, its signals and its loop. It starts the others as
processes (process.py), on this machine or on other nodes (launch.py), which serve its commands. A command is announced
in the group's store, and the name of a learner's method and its arguments are broadcast as JSON. Then all ranks run the
method together. Between commands the others wait at the store, for as long as rollouts take. Inside a command every
collective has a deadline.

A group that lost a rank cannot be repaired: gloo and NCCL refuse every later call. The error ends the run's process,
the supervisor starts it again from the last checkpoint, and that starts new ranks. torchrun's agent is not used: it
would own the first rank too, blocks its caller without a way to cancel, and its restarts reuse addresses of the group
before.
"""

import atexit
import gc
import itertools
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import distributed
from torch.distributed import DistError, DistStoreError, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from trackway.learner.batch import MaskedTokens
from trackway.learner.config import LearnerConfig
from trackway.learner.learner import Learner, StepObserver, UpdateResult, unobserved
from trackway.learner.measuring import Metrics
from trackway.learner.ranks.launch import (
    LOST,
    LocalLauncher,
    RankError,
    RankProcess,
    launcher_for,
    use_interface_towards,
)
from trackway.learner.ranks.messages import broadcast, gather
from trackway.learner.ranks.publication import AnyWork, LookFor, Work
from trackway.learner.ranks.sharding import join
from trackway.learner.ranks.snapshot import Snapshot
from trackway.run_config.placement import Placement
from trackway.wire.trajectory import Trajectory
from trackway.wire.weights import WeightProof

START_S = 300.0
"""Longest wait for the ranks to import torch and join."""
NOTICE_S = 5.0
"""Longest wait, after a collective has failed, for the process that caused it to end."""
WATCH_S = 1.0
"""Pause between two looks at the ranks during a command."""
LOST_S = 5.0
"""Longest wait for a command to fail when a rank has ended."""
STOP_S = 10.0
"""Longest wait for the ranks to exit before they are killed."""
SHARED_S = 60.0
"""Longest wait for a file of the first rank to be seen by the others; clients of NFS cache folders for so long."""
SHARED_ERRORS = (ValueError, OSError, SafetensorError)
"""Errors that every rank meets alike, such as a damaged checkpoint, or only the first, as when it writes: the group is
as good as before."""
END_S = 30.0
"""Longest wait for the group of the first rank to end: NCCL waits for kernels that wait for a lost rank."""
COMMAND = "command"
"""Name in the store. Commands are numbered. The store holds no value: any process that reaches it can write there."""
STOP = "stop"
IDLE_S = 30.0
"""Seconds after which a waiting rank asks whether the first one still runs."""
EXIT_PEER_LOST = 75
"""Exit status of a rank whose collective failed, most often because another rank was lost."""
TEXT = TypeAdapter(str)
COMMANDS: Mapping[str, TypeAdapter[tuple[Any, ...]]] = {
    "__init__": TypeAdapter(tuple[()]),
    "update": TypeAdapter(tuple[list[Trajectory], float | None]),
    "supervise": TypeAdapter(tuple[list[MaskedTokens]]),
    "supervised_loss": TypeAdapter(tuple[list[MaskedTokens]]),
    "log_probs": TypeAdapter(tuple[list[Trajectory]]),
    "save": TypeAdapter(tuple[Path]),
    "snapshot": TypeAdapter(tuple[()]),
    "load": TypeAdapter(tuple[Path]),
    "export": TypeAdapter(tuple[Path]),
    "export_to_engines": TypeAdapter(tuple[Path]),
    "publish_share": TypeAdapter(tuple[AnyWork]),
    "proof": TypeAdapter(tuple[Path, int | None]),
    "release_memory": TypeAdapter(tuple[()]),
    "free_memory": TypeAdapter(tuple[()]),
    STOP: TypeAdapter(tuple[()]),
}
"""The commands that a rank obeys, methods of its learner, with the types of their arguments."""
T = TypeVar("T")

logger = logging.getLogger("trackway.trainer")


class GroupSettings(NamedTuple):
    """Facts that a rank needs to join."""

    config: LearnerConfig
    placement: Placement
    deadline_s: float


SETTINGS = TypeAdapter(GroupSettings)


class RankGroup:
    """The other ranks as the first one sees them. Not thread-safe."""

    def __init__(
        self, config: LearnerConfig, placement: Placement, deadline_s: float, placement_timeout_s: float = START_S
    ) -> None:
        """Starts the ranks and joins them. A collective that a rank has not joined in `deadline_s` is an error.

        Raises ValueError for fewer GPUs than ranks, or for nodes that are not there in `placement_timeout_s`, and
        RankError for a rank that does not start.
        """
        with_gpus, gpus = config.device == "cuda", torch.cuda.device_count()
        if with_gpus and gpus < placement.per_node:
            on_each = f" / trainer.nnodes={placement.nodes}" if placement.nodes > 1 else ""
            raise ValueError(
                f"expected a GPU for each of trackway.learner_ranks={placement.ranks}{on_each}, got {gpus}; lower it, "
                "or give the trainer more GPUs"
            )
        self._placement = placement
        self._uses_nccl = with_gpus
        self._commands = 0
        self._deadline_s = deadline_s
        self.processes: dict[int, RankProcess] = {}
        """Processes by rank."""
        self._launcher = launcher_for(placement, with_gpus=with_gpus, deadline_s=placement_timeout_s)
        try:
            host = self._launcher.hosts[0]
            self._store: Store = _listening_store(host)
            use_interface_towards(host)
            with self.naming("start"):
                self._start(host, self._store.port, GroupSettings(config, placement, deadline_s))
                self._wait_for_all()
                self.ranks = join(self._store, 0, placement, config.device, deadline_s)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks on this machine."""
        return [process.pid for process in self.processes.values() if isinstance(process, subprocess.Popen)]

    @contextmanager
    def command(self, name: str, *arguments: object) -> Iterator[None]:
        """A context in which the other ranks run this method of their learner. Raises RankError when one is lost."""
        with self.naming(name), self.watched(name) if self._uses_nccl else nullcontext():
            self._announce(name, arguments)
            failure: Exception | None = None
            try:
                yield
            except SHARED_ERRORS as error:
                failure = error
            failures = _outcomes(failure)
            if failure is not None:
                raise failure
            if any(failures):
                told = "; ".join(f"rank {index}: {text}" for index, text in enumerate(failures) if text)
                raise RankError(f"{name!r} failed in other ranks of the learner than the first: {told}")

    @contextmanager
    def watched(self, command: str) -> Iterator[None]:
        """A context that ends this process when a rank has ended and the command does not fail.

        gloo's collectives fail when a peer ends. A kernel of NCCL waits for it until the deadline, and then PyTorch
        aborts the process without a name.
        """
        done = threading.Event()

        def watch() -> None:
            while not done.wait(WATCH_S):
                if self._ended() and not done.wait(LOST_S):
                    culprits = " and ".join(self._culprits())
                    logger.critical("%s during %r; the run goes on from its last checkpoint", culprits, command)
                    os._exit(EXIT_PEER_LOST)

        threading.Thread(target=watch, name="watch ranks", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def close(self) -> None:
        """Stops the ranks, kills those that do not exit, and gives back their nodes."""
        try:
            self._stop()
        finally:
            self._launcher.close()

    def _start(self, host: str, port: int, settings: GroupSettings) -> None:
        here, given = LocalLauncher(), SETTINGS.dump_json(settings).decode()
        for rank in range(1, self._placement.ranks):
            launcher = self._launcher if self._placement.node(rank) else here
            self.processes[rank] = launcher.start(rank, [str(rank), host, str(port), given])

    def _stop(self) -> None:
        if not self.processes:
            return
        if distributed.is_initialized() and all(process.poll() is None for process in self.processes.values()):
            try:
                self._announce(STOP, ())
            except RuntimeError:
                logger.warning("the ranks of the learner were not told to stop and are killed", exc_info=True)
        end = time.monotonic() + STOP_S
        for index, process in self.processes.items():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d of the learner did not exit in %g s and is killed", index, STOP_S)
                process.kill()
                process.wait(STOP_S)
        self.processes = {}
        if distributed.is_initialized():
            end_group()

    def _announce(self, name: str, arguments: Sequence[object]) -> None:
        self._store.set(f"{COMMAND}/{self._commands}", "")
        self._commands += 1
        send_command(name, arguments)

    def _wait_for_all(self) -> None:
        end = time.monotonic() + START_S
        for index in self.processes:
            while not self._store.check([_joined(index)]):
                if self._ended() or time.monotonic() > end:
                    raise DistStoreError(f"rank {index} did not join")
                time.sleep(0.05)

    @contextmanager
    def naming(self, command: str) -> Iterator[None]:
        """A context whose failures name the rank that is lost."""
        try:
            yield
        except SHARED_ERRORS:
            raise
        except Exception as error:
            if isinstance(error, RankError) or not is_of_group(error):
                self._kill()
                raise
            culprits = " and ".join(self._culprits())
            self._kill()
            remedy = "see worker.log, the run goes on from its last checkpoint"
            raise RankError(f"{culprits} during {command!r} ({error}); {remedy}") from error

    def _kill(self) -> None:
        for process in self.processes.values():
            process.kill()

    def _culprits(self) -> list[str]:
        """Ends of the ranks that are to blame: those that died, else those that do not answer."""
        end = time.monotonic() + NOTICE_S
        while not (died := self._ended(but=EXIT_PEER_LOST)) and time.monotonic() < end:
            time.sleep(0.02)
        if died:
            return [f"{self._name(index)} ended by {_cause(status)}" for index, status in died.items()]
        ended = self._ended()
        silent = [index for index in self.processes if index not in ended] or list(ended)
        return [f"{self._name(index)} gave no answer in {self._deadline_s:g} s" for index in silent]

    def _name(self, rank: int) -> str:
        node = f" on node {self._launcher.hosts[self._placement.node(rank)]}" if self._placement.nodes > 1 else ""
        return f"rank {rank} of the learner{node}"

    def _ended(self, but: int | None = None) -> dict[int, int]:
        """The exit statuses of the ranks that have ended, other than `but`."""
        statuses = {index: process.poll() for index, process in self.processes.items()}
        return {index: status for index, status in statuses.items() if status not in (None, but)}


class LeadingLearner(Learner):
    """The learner of the first rank: each call runs in all ranks. Raises RankError when one is lost."""

    def __init__(self, config: LearnerConfig, group: RankGroup) -> None:
        self._group = group
        with group.command("__init__"):
            super().__init__(config, group.ranks)

    def update(
        self, used: Sequence[Trajectory], version: float | None = None, observe: StepObserver = unobserved
    ) -> UpdateResult:
        """Run `Learner.update` on every rank. Steps are observed in this one."""
        with self._group.command("update", list(used), version):
            return super().update(used, version, observe)

    def supervise(self, rows: Sequence[MaskedTokens]) -> Metrics:
        """Run `Learner.supervise` on every rank."""
        with self._group.command("supervise", list(rows)):
            return super().supervise(rows)

    def supervised_loss(self, rows: Sequence[MaskedTokens]) -> tuple[float, float]:
        """Run `Learner.supervised_loss` on every rank."""
        with self._group.command("supervised_loss", list(rows)):
            return super().supervised_loss(rows)

    def log_probs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Run `Learner.log_probs` on every rank."""
        with self._group.command("log_probs", list(trajectories)):
            return super().log_probs(trajectories)

    def save(self, folder: Path) -> None:
        """Run `Learner.save` on every rank."""
        with self._group.command("save", folder):
            super().save(folder)

    def snapshot(self) -> Snapshot:
        """Run `Learner.snapshot` on every rank. Its write is an error when a rank is lost."""
        with self._group.command("snapshot"):
            copied = super().snapshot()
        return replace(copied, naming=partial(self._group.naming, "write of a checkpoint"))

    def load(self, folder: Path) -> None:
        """Run `Learner.load` on every rank. The checkpoint may come from any number of ranks."""
        with self._group.command("load", folder):
            super().load(folder)

    def export(self, folder: Path) -> None:
        """Run `Learner.export` on every rank."""
        with self._group.command("export", folder):
            super().export(folder)

    def export_to_engines(self, folder: Path) -> None:
        """Run `Learner.export_to_engines` on every rank."""
        with self._group.command("export_to_engines", folder):
            super().export_to_engines(folder)

    def publish_share(self, work: Work[T]) -> list[T]:
        """Run `Learner.publish_share` on every rank."""
        with self._group.command("publish_share", work):
            return super().publish_share(work)

    def proof(self, folder: Path, previous_version: int | None) -> WeightProof:
        """Run `Learner.proof` on every rank."""
        with self._group.command("proof", folder, previous_version):
            return super().proof(folder, previous_version)

    def release_memory(self) -> None:
        """Give each rank's GPU the memory of freed tensors."""
        with self._group.command("release_memory"):
            super().release_memory()

    def free_memory(self) -> list[int]:
        """Run `Learner.free_memory` on every rank."""
        with self._group.command("free_memory"):
            return super().free_memory()

    def close(self) -> None:
        """Stops the other ranks. They are killed when they do not exit."""
        self._group.close()
        super().release_memory()


def require_shared(learner: LeadingLearner, folder: Path, deadline_s: float = SHARED_S) -> None:
    """Raises ValueError unless every rank sees a file that is written to the folder, within `deadline_s`."""
    name = f".seen_by_ranks_{uuid4().hex}"
    (folder / name).touch()
    try:
        seen = learner.publish_share(LookFor(file=folder / name, deadline_s=deadline_s))
    finally:
        (folder / name).unlink()
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise ValueError(
            f"expected every rank of the learner to see the files of {folder}, got none in rank {', '.join(blind)} "
            f"after {deadline_s:g} s; checkpoints and versions need one volume, mounted there on each node of "
            "trainer.nnodes"
        )


def serve(index: int, host: str, port: int, settings: GroupSettings) -> None:
    """Runs a rank other than the first: joins the group, then runs commands until the command to stop."""
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=START_S))
    use_interface_towards(host)
    store.set(_joined(index), "")
    ranks = join(store, index, settings.placement, settings.config.device, settings.deadline_s)
    learner: Learner | None = None
    for number in itertools.count():
        _wait(store, f"{COMMAND}/{number}")
        name, arguments = receive_command()
        failure: Exception | None = None
        if name == STOP:
            distributed.destroy_process_group()
            return
        try:
            if learner is None:
                learner = Learner(settings.config, ranks)
                gc.freeze()  # it collects garbage after every step, and imports are none
            else:
                getattr(learner, name)(*arguments)
        except SHARED_ERRORS as error:
            failure = error
        _outcomes(failure)


def is_of_group(error: Exception) -> bool:
    """Return whether a collective or the store failed, not this rank's own work or GPU. Both raise RuntimeErrors.

    gloo's errors have no class of their own, and name its source file.
    """
    return isinstance(error, DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def end_group() -> None:
    """Leave the group of all ranks, at most END_S. A group that does not end is left behind, and so is its GPU memory.

    Such a group could also block the end of the process, which then ends at once.
    """
    ending = threading.Thread(target=distributed.destroy_process_group, name="end of the ranks' group", daemon=True)
    ending.start()
    ending.join(END_S)
    if ending.is_alive():
        logger.critical("the group of the learner's ranks did not end in %g s and is left behind", END_S)
        atexit.register(os._exit, EXIT_PEER_LOST)


def _listening_store(host: str) -> TCPStore:
    """Return a new store that listens on this address only."""
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        listener.bind(address)
        timeout = timedelta(seconds=START_S)
        return TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )


def _wait(store: Store, key: str) -> None:
    """Returns when the key is in the store. Raises RuntimeError when the store's process has ended."""
    while True:
        try:
            return store.wait([key], timedelta(seconds=IDLE_S))
        except DistStoreError:  # nothing to do yet
            store.check([key])


def send_command(name: str, arguments: Sequence[object]) -> None:
    """Tell the other ranks to run a method of their learner."""
    broadcast(TEXT, name)
    broadcast(COMMANDS[name], tuple(arguments))


def receive_command() -> tuple[str, Sequence[object]]:
    """Return the method that the first rank tells to run, and its arguments. Raises ValueError for any other."""
    name = broadcast(TEXT)
    if name not in COMMANDS:
        raise ValueError(f"expected a command among {', '.join(COMMANDS)}, got {name!r}")
    return name, broadcast(COMMANDS[name])


def _outcomes(failure: Exception | None) -> list[str]:
    """Return how a command failed in each rank, "" where it did not. A collective at the end of each command."""
    return gather(TEXT, "" if failure is None else f"{type(failure).__name__}: {failure}")


def _joined(index: int) -> str:
    return f"joined/{index}"


def _cause(status: int) -> str:
    if status == LOST:
        return "the death of its node, or of Ray's actor there,"
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
