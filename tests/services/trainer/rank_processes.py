"""The ranks of a learner in processes of their own, which run functions of the tests."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import psutil
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from trackway.learner.config import LearnerConfig
from trackway.learner.learner import Learner
from trackway.learner.ranks.group import STOP, LeadingLearner, RankGroup, receive_command, send_command
from trackway.learner.ranks.sharding import Ranks, join
from trackway.run_config.placement import Placement

DEADLINE_S = 120.0
"""Longest that ranks wait for one another, and a test for them."""
P = ParamSpec("P")
R = TypeVar("R")


class RankProcesses:
    """Processes that have joined one group; each runs the same function at the same time."""

    def __init__(self, processes: list[BaseProcess], pipes: list[Connection]) -> None:
        self.processes = processes
        self._pipes = pipes
        self._calls = 0

    def run(self, function: Callable[Concatenate[Ranks, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """What the function returns in each rank. Raises AssertionError with the traceback when it raises there."""
        self._calls += 1
        for pipe in self._pipes:
            pipe.send((self._calls, function, args, kwargs))
        return [_answer(index, pipe, self._calls) for index, pipe in enumerate(self._pipes)]


@contextmanager
def rank_processes(count: int, nodes: int = 1) -> Iterator[RankProcesses]:
    """A group of `count` ranks on the CPU, with one thread each; placed as on `nodes` nodes, all on this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trackway.learner.learner"])  # imports torch once for all
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe() for _ in range(count)]
    processes: list[BaseProcess] = [
        context.Process(target=_serve, args=(index, Placement(count, nodes), store.port, theirs), daemon=True)
        for index, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        yield RankProcesses(processes, [ours for ours, _ in pipes])
    finally:
        for process in processes:
            process.kill()
            process.join(60)


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses at which a process listens."""
    found = psutil.Process(pid).net_connections("inet")
    return {(entry.laddr[0], entry.laddr[1]) for entry in found if entry.status == psutil.CONN_LISTEN}


class Commands:
    """Commands to ranks that `led` runs, as those of RankGroup."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @contextmanager
    def command(self, name: str, *arguments: object) -> Iterator[None]:
        send_command(name, arguments)
        yield


def led(ranks: Ranks, config: LearnerConfig, lead: Callable[[LeadingLearner], R]) -> R | None:
    """What `lead` makes of a learner, in the first rank; the others do what it says."""
    if ranks.is_first:
        group = Commands(ranks)
        try:
            return lead(LeadingLearner(config, cast(RankGroup, group)))
        finally:
            with group.command(STOP):
                pass
    learner = None
    while True:
        name, arguments = receive_command()
        if name == STOP:
            return None
        if learner is None:
            learner = Learner(config, ranks)
        else:
            getattr(learner, name)(*arguments)


def _serve(index: int, placement: Placement, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
    ranks = join(store, index, placement, "cpu", DEADLINE_S)
    while True:
        call, function, args, kwargs = pipe.recv()
        try:
            pipe.send((call, True, function(ranks, *args, **kwargs)))
        except BaseException:  # pytest's Failed, of a `raises` without an error, is no Exception
            pipe.send((call, False, traceback.format_exc()))


def _answer(index: int, pipe: Connection, call: int) -> Any:
    answered, succeeded, answer = 0, False, None
    while answered < call:  # an earlier call failed in another rank, and this answer to it was not read
        assert pipe.poll(DEADLINE_S), f"rank {index} gave no answer in {DEADLINE_S:g} s"
        answered, succeeded, answer = pipe.recv()
    assert succeeded, f"rank {index}: {answer}"
    return answer
