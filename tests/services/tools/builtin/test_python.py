"""The `python` tool in ordinary use, over REST."""

import asyncio
import re

import pytest

from tests.services.tools.python_server import LOST, Run, served
from tests.time_limits import ENDS_SOON
from trackway.clients.base import Deadline
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.program("bwrap"), pytest.mark.usefixtures("isolation")]


def without_carets(text: str) -> list[str]:
    """The lines of a traceback that every version of Python writes alike."""
    return [line for line in text.splitlines() if not re.fullmatch(r"[ ~^]+", line)]


async def test_variables_live_from_call_to_call(running: Run) -> None:
    async with served(running) as server:
        session = await server.session()
        texts = [await session(code) for code in ("x = 20", "def twice(n): return 2 * n", "twice(x) + 2", "_ + 1")]

    assert texts == ["[no output]", "[no output]", "42\n", "43\n"]


async def test_output_errors_and_the_last_value_come_in_their_order(running: Run) -> None:
    code = "import sys\nprint('one')\nprint('two', file=sys.stderr)\nprint('three', end=' ')\n['four']"
    async with served(running) as server:
        text = await (await server.session())(code)

    assert text == "one\ntwo\nthree ['four']\n"


async def test_a_traceback_shows_the_cells_and_no_path_of_the_machine(running: Run) -> None:
    async with served(running) as server:
        session = await server.session()
        await session("def half(n):\n    return n / 0")
        own = await session("half(3)")
        library = await session("import json\njson.loads('{')")

    assert without_carets(own) == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 1, in <module>',
        "    half(3)",
        '  File "<cell 1>", line 2, in half',
        "    return n / 0",
        "ZeroDivisionError: division by zero",
    ]
    assert re.findall('File "(.*?)"', library) == ["<cell 3>", "json/decoder.py"]


@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("1 +", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(4)", "SystemExit: 4"),
        ("exit()", "SystemExit"),
        ("input()", "EOFError: EOF when reading a line"),
        ("x = '\\ud800'\nprint(x)\nx", "'\\ud800'"),
        ("1\0", "SyntaxError: source code string cannot contain null bytes"),
    ],
)
async def test_what_raises_is_an_observation_and_the_variables_stay(running: Run, code: str, last_line: str) -> None:
    async with served(running) as server:
        session = await server.session()
        await session("kept = 7")
        text = await session(code)
        kept = await session("kept")

    assert (text.splitlines()[-1], kept) == (last_line, "7\n")


async def test_code_in_a_markdown_fence_is_the_code(running: Run) -> None:
    async with served(running) as server:
        text = await (await server.session())("```python\n6 * 7\n```")

    assert text == "42\n"


async def test_long_output_keeps_its_start_and_its_end(running: Run) -> None:
    async with served(running, output_chars=100) as server:
        text = await (await server.session())("print('\u00e4' * 70 + 'b' * 1000 + 'c' * 49)")

    assert text == "\u00e4" * 50 + "\n[... 1020 characters left out ...]\n" + "c" * 49 + "\n"


async def test_the_metric_says_whether_the_code_raised(running: Run) -> None:
    async with served(running) as server:
        session = await server.session()
        metrics = [(await session.result(code)).metrics for code in ("1", "1/0")]

    assert metrics == [{"succeeded": 1.0}, {"succeeded": 0.0}]


@ENDS_SOON
async def test_a_call_beyond_its_deadline_loses_the_variables_and_says_so(running: Run) -> None:
    async with served(running, timeout_s=3.0) as server:
        session = await server.session()
        await session("x = 1")
        text = await session("print('begun')\nwhile True: pass")
        after = await session("'x' in globals()")

    assert text == f"begun\n[the interpreter ended: the call ran longer than 3 s; {LOST}"
    assert after == "False\n"


@ENDS_SOON
async def test_a_call_that_the_server_cuts_off_is_told_to_the_next_one(running: Run) -> None:
    async with served(running, call_timeout_s=3.0) as server:
        session = await server.session()
        with pytest.raises(TrackwayError) as caught:
            await session("while True: pass")
        after = await session("1 + 1")

    assert caught.value.code is ErrorCode.TOOL_TIMEOUT
    assert after == "[a fresh interpreter: the last call was cut off, and its variables are lost]\n2\n"


async def test_one_shot_calls_each_have_a_fresh_interpreter(running: Run) -> None:
    async with served(running, stateful=False) as server:
        offered = (await server.client.offer()).stateless
        texts = [await server.once("x = 5\nx"), await server.once("'x' in globals()")]

    assert (offered, texts) == (["python"], ["5\n", "False\n"])


async def test_a_stateful_interpreter_is_not_offered_as_stateless(running: Run) -> None:
    async with served(running) as server:
        assert (await server.client.offer()).stateless == []


@ENDS_SOON
async def test_one_interpreter_too_many_is_429_until_one_is_released(running: Run) -> None:
    async with served(running, max_interpreters=1) as server:
        first, second = await server.session(), await server.session()
        await first("1")
        with pytest.raises(TrackwayError) as caught:
            await second.result("2", Deadline.after(3.0))
        await first.release()
        text = await second("2")

    assert (caught.value.code, text) == (ErrorCode.OVERLOADED, "2\n")


async def test_one_session_does_not_wait_for_another(running: Run) -> None:
    async with served(running, timeout_s=3.0) as server:
        slow, quick = await server.session(), await server.session()
        waiting = asyncio.create_task(slow("while True: pass"))
        text = await quick("1 + 1")
        answered_first = not waiting.done()
        await waiting

    assert (text, answered_first) == ("2\n", True)


async def test_threads_processes_and_asyncio_work(running: Run) -> None:
    code = """
import asyncio, concurrent.futures, multiprocessing
async def doubled(n): return 2 * n
with concurrent.futures.ThreadPoolExecutor(3) as pool: print(list(pool.map(abs, [-1, -2])))
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-3, -4]))
asyncio.run(doubled(5))
"""
    async with served(running) as server:
        text = await (await server.session())(code)

    assert text == "[1, 2]\n[3, 4]\n10\n"
