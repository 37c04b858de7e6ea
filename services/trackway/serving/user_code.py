"""User code (tools, scorers, agent loops, their modules): its exceptions fail only its own call.

SystemExit and KeyboardInterrupt propagate through asyncio's event loop and end the server; `except Exception` catches
neither them nor other BaseExceptions. Code that ends the process without raising is not contained:
`os._exit`, a signal to itself, `loop.stop()`.
"""

import asyncio
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread

T = TypeVar("T")

Steps = Coroutine[Any, Any, T] | Generator[Any, Any, T]

_inside: ContextVar[bool] = ContextVar("trackway_user_code", default=False)
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
_NOT_OWN = tuple(f"{folder}{os.sep}" for folder in (*sys.modules["trackway"].__path__, *_LIBRARIES))
"""Folders of code that is not the user's."""
_LEAVE_THE_LOOP = (SystemExit, KeyboardInterrupt)


class UserCodeExit(RuntimeError):
    """User code called `sys.exit`, or raised something that is not an Exception."""


def failure_of(error: BaseException) -> Exception:
    """The error as an Exception: itself, or a UserCodeExit that describes it."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, SystemExit):
        return UserCodeExit(f"it called sys.exit({'' if error.code is None else repr(error.code)})")
    if isinstance(error, asyncio.CancelledError):
        return UserCodeExit("it cancelled itself")
    return UserCodeExit(f"it raised {described(error)}, which is not an Exception")


def described(error: BaseException) -> str:
    """Type and message; for a UserCodeExit only the message. Never raises, even if the type's `__str__` does."""
    try:
        message = str(error)
    except BaseException:
        message = "(its message cannot be read: __str__ raised)"
    if isinstance(error, UserCodeExit):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def raised_at(error: BaseException) -> str | None:
    """Return `file:line` of the user's code that raised the error, with a hint, or None if no such code did."""
    files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [f"{file}:{line}" for file, line in files if not file.startswith((*_NOT_OWN, "<"))]
    hint = ": is an `await` missing?" if isinstance(error, AttributeError) and "'coroutine'" in str(error) else ""
    return None if isinstance(error, UserCodeExit) or not own else f"{own[-1]}{hint}"


def located(error: BaseException) -> str:
    """Return type and message, with the file and line of the user's code that raised it, if any did."""
    place = raised_at(error)
    return f"{described(error)} ({place})" if place else described(error)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Wrap a synchronous call: anything raised that is not an Exception becomes UserCodeExit, prefixed with `what`."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise UserCodeExit(f"{what}: {described(failure_of(error))}") from error


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Wrap the import of a user's module: an exit becomes UserCodeExit with the remedy."""
    with user_code(what):
        try:
            yield
        except SystemExit as error:
            remedy = "put what must not run on import under `if __name__ == '__main__'`"
            raise UserCodeExit(f"{what}: {described(failure_of(error))} on import; {remedy}") from error


async def contained(awaitable: Awaitable[T]) -> T:
    """The awaitable's result, in its own task: exceptions that would leave the event loop become UserCodeExit."""
    _inside.set(True)
    try:
        return await awaitable
    except _LEAVE_THE_LOOP as error:
        raise failure_of(error) from error


async def run_user_code(call: Callable[[], Awaitable[T]]) -> T:
    """The result of `call`, in its own task, which is cancelled with its caller.

    Raises the code's error as an Exception. A CancelledError that the code itself raised becomes UserCodeExit.
    """

    async def run() -> T:
        return await contained(call())

    work = asyncio.create_task(run())
    cancellation: asyncio.CancelledError | None = None
    try:
        await asyncio.wait({work})
    except asyncio.CancelledError as error:
        cancellation = error
        work.cancel(*error.args)
        await asyncio.wait({work})
    if cancellation is not None and (work.cancelled() or work.exception() is None):
        raise cancellation
    return outcome_of(work)


def outcome_of(work: asyncio.Task[T]) -> T:
    """The result of a finished task of user code. Its error is raised as an Exception."""
    if work.cancelled():
        raise failure_of(asyncio.CancelledError())
    error = work.exception()
    if error is not None and not isinstance(error, Exception):
        raise failure_of(error) from error
    return work.result()


def own_context() -> Context:
    """A copy of the context in which tasks are the service's own, also if user code runs in this one."""
    context = copy_context()
    context.run(_inside.set, False)
    return context


class ContainedTasks:
    """A task factory that also contains tasks made by user code (`gather`, `wait_for`, `create_task`)."""

    def __init__(self, factory: Callable[..., asyncio.Future[Any]] | None) -> None:
        self._make = factory or _task

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coro: Steps[T], context: Context | None = None, **options: Any
    ) -> asyncio.Future[T]:
        if context is not None:
            options["context"] = context
        if not (_inside.get() if context is None else context.get(_inside, False)):
            return self._make(loop, coro, **options)
        task = self._make(loop, contained(_awaitable(coro)), **options)
        task.add_done_callback(lambda _: coro.close())  # a task cancelled before its start awaits nothing
        return task


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Prevent tasks of user code from ending this loop; idempotent."""
    factory = loop.get_task_factory()
    if not isinstance(factory, ContainedTasks):
        loop.set_task_factory(ContainedTasks(factory))


def _task(loop: asyncio.AbstractEventLoop, coro: Steps[T], **options: Any) -> asyncio.Task[T]:
    return asyncio.Task(coro, loop=loop, **options)


@types.coroutine
def _awaitable(coro: Steps[T]) -> Generator[Any, Any, T]:
    return (yield from cast("Generator[Any, Any, T]", coro))  # a coroutine allows it in here


async def in_thread(call: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """The result of `call`, which runs in a thread. UserCodeExit when it calls `sys.exit` or raises no Exception.

    Waits for the thread even when cancelled: a thread cannot be stopped, and while it runs, a tool's instance must not
    get another call.
    """

    def contained() -> T:
        try:
            return call()
        except Exception:
            raise
        except BaseException as error:  # SystemExit would leave the event loop from the task below
            raise failure_of(error) from error

    work = asyncio.create_task(anyio.to_thread.run_sync(contained, limiter=limiter))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
