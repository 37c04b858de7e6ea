"""Code that turns against its own interpreter, and code that leaves something behind."""

import asyncio
import os

import pytest

from tests.services.tools.python_server import LOST, Run, served

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.program("bwrap"), pytest.mark.usefixtures("isolation")]

FORGED = "import os\nfor fd in range(3, 4096):\n    try: os.write(fd, {!r})\n    except OSError: pass"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os\nos._exit(3)", "it exited with status 3"),
        ("import os\nos.kill(os.getpid(), 15)", "it was ended by SIGTERM"),
        ("import os\nos.kill(os.getpid(), 9)", "it was ended by SIGKILL"),
        ("import os\nos.kill(os.getpid(), 19)", "the call ran longer than 3 s"),
        ("import ctypes\nctypes.string_at(0)", "it was ended by SIGSEGV"),
        ("import os\nos.closerange(0, 4096)", "the code broke what the interpreter needs to answer"),
        ("import os\nos.closerange(3, 4096)\nwhile True: pass", "it closed its channel"),
        (FORGED.format(b"python is ready.y"), "it wrote into its channel"),
        (FORGED.format(b"\xff" * 100), "it wrote into its channel"),
    ],
)
async def test_an_interpreter_that_ends_says_why(running: Run, code: str, reason: str) -> None:
    async with served(running, timeout_s=3.0) as server:
        session = await server.session()
        text = await session(code)
        after = await session("1 + 1")

    assert (text, after) == (f"[the interpreter ended: {reason}; {LOST}", "2\n")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import sys\nsys.stdout.close()", "[no output]"),
        ("import sys, io\nsys.stdout = sys.stderr = io.StringIO()\nprint('lost')", "[no output]"),
        ("import os\nif os.fork() == 0: raise SystemExit\nos.wait()[1]", "0\n"),
        ("import builtins\nbuiltins.len = builtins.print = builtins.repr = None", "[no output]"),
        ("import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(-1, 15)", None),
    ],
)
async def test_an_interpreter_outlives_what_is_not_its_own(running: Run, code: str, text: str | None) -> None:
    async with served(running) as server:
        session = await server.session()
        await session("kept = 7")
        seen = await session(code)
        kept = await session("kept")

    assert text is None or seen == text
    assert kept == "7\n"


async def test_a_fork_that_comes_to_the_end_of_its_cell_is_not_the_interpreter(running: Run) -> None:
    async with served(running) as server:
        session = await server.session()
        await session("import os\nchild = os.fork()")
        text = await session("os.wait() == (child, 0), os.getpid()")

    assert text == "(True, 2)\n"


@pytest.mark.parametrize("target", ["os.getppid()", "1", "-1", str(os.getpid())], ids=["parent", "1", "-1", "server"])
async def test_signals_reach_no_process_outside(running: Run, target: str) -> None:
    async with served(running) as server:
        session, other_session = await server.session(), await server.session()
        await other_session("kept = 7")
        await session(f"import os\ntry: os.kill({target}, 9)\nexcept OSError: pass")
        texts = [await session("'alive'"), await other_session("kept")]

    assert texts == ["'alive'\n", "7\n"]


async def test_threads_that_go_on_printing_do_not_hold_up_the_next_call(running: Run) -> None:
    chatter = """
import threading
def chatter():
    while True: print("again")
threading.Thread(target=chatter, daemon=True).start()
"""
    async with served(running) as server, asyncio.timeout(60):
        session = await server.session()
        await session(chatter)
        results = [await session.result("6 * 7")]
        while "again\n" not in results[-1].text:  # the thread has not had its turn yet
            results.append(await session.result("6 * 7"))

    # Of the last text a part may be cut out, and the value with it.
    assert [result.text for result in results[:-1] if "42" not in result.text] == []
    assert results[-1].metrics["succeeded"] == 1.0
