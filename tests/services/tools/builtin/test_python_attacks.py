"""Code that means harm: what it gets to see, and that the server answers the next call of any session."""

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import JsonValue

import trackway.tools.core.server
from tests.services.tools.python_server import LOST, Run, Session, processes_with, served
from tests.waiting import async_until

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.program("bwrap"), pytest.mark.usefixtures("isolation")]


@asynccontextmanager
async def attacked(running: Run, **config: JsonValue) -> AsyncIterator[Session]:
    """A session for the attack; afterwards it answers as well as a new one."""
    async with served(running, **config) as server:
        session = await server.session()
        yield session
        assert await session("2 + 3") == "5\n"
        assert await (await server.session())("4 + 5") == "9\n"


def ended(reason: str) -> str:
    return f"[the interpreter ended: {reason}; {LOST}"


# What it takes


async def test_a_fork_bomb_burns_out_at_the_deadline(running: Run) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    async with attacked(running, timeout_s=3.0) as session:
        assert await session(bomb) == ended("the call ran longer than 3 s")


async def test_processes_are_bounded_by_the_kernel(running: Run) -> None:
    greedy = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0: time.sleep(60)
        count += 1
except OSError as error:
    print(type(error).__name__, 0 < count < 16)
"""
    async with served(running) as server:
        assert await (await server.session())(greedy) == "BlockingIOError True\n"
        # Another session has a count of its own.
        assert await (await server.session())(greedy) == "BlockingIOError True\n"


async def test_a_memory_bomb_is_a_memory_error(running: Run) -> None:
    async with attacked(running) as session:
        text = await session("hoard = []\nwhile True: hoard.append(bytearray(10 << 20))")
        assert text.splitlines()[-1] == "MemoryError"
        await session("del hoard")


async def test_a_memory_bomb_of_many_processes_is_ended_at_their_sum(running: Run) -> None:
    bomb = """
import os, time
for _ in range(6):
    if os.fork() == 0: break
hoard = b"x" * (60 << 20)
time.sleep(60)
"""
    async with attacked(running) as session:
        assert await session(bomb) == ended("the code used more than 256 MB of memory")


async def test_a_bomb_that_a_call_leaves_is_ended_between_two_calls(running: Run) -> None:
    bomb = """
import os, time
full, filled = os.pipe()
for _ in range(6):
    if os.fork() == 0:
        hoard = b"x" * (60 << 20)
        os.write(filled, b".")
        time.sleep(60)
have = 0
while have < 6: have += len(os.read(full, 6))
"""
    async with attacked(running, cpu_s=54321) as session:
        text = await session(bomb)  # one that ends within the watch's interval is found after it
        if text == "[no output]":
            await async_until(lambda: not processes_with("54321"))
            text = await session("1")
            text = text.replace(", between two calls; this code did not run", "")
        assert text == ended("the code used more than 256 MB of memory")


SOCKETS = """
import os, socket, time
for _ in range(12):
    if os.fork() == 0: break
held = []
try:
    while True:
        held += socket.socketpair()
        for end in held[-2:]:
            end.setblocking(False)
            try:
                while True: end.send(bytes(32768))
            except BlockingIOError: pass
except OSError: pass
time.sleep(60)
"""


async def test_memory_held_in_sockets_counts(running: Run) -> None:
    async with attacked(running) as session:
        assert await session(SOCKETS) == ended("the code used more than 256 MB of memory")


async def test_a_flood_of_locks_is_ended(running: Run) -> None:
    flood = (
        "import fcntl\nfile = open('held', 'w')\nfor at in range(10 ** 9): fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * at)"
    )
    async with attacked(running) as session:
        assert await session(flood) == ended("the code used more than 10000 locks on files")


@pytest.mark.parametrize(
    "code",
    [
        "import mmap\nmmap.mmap(-1, 4096)",
        "import os\nends = os.pipe()\nos.splice(os.open('/tmp', os.O_TMPFILE | os.O_RDWR), ends[1], 1)",
        "import socket\nsocket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)",
    ],
)
async def test_memory_that_outlasts_its_mapping_is_refused(running: Run, code: str) -> None:
    async with attacked(running) as session:
        assert (await session(code)).splitlines()[-1].startswith("PermissionError: [Errno 1]")


async def test_private_and_file_backed_memory_is_allowed(running: Run) -> None:
    code = """
import asyncio, mmap, multiprocessing.shared_memory, sqlite3
private = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
segment = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
segment.buf[0] = 7
database = sqlite3.connect("/tmp/file.db")
database.execute("create table seen (number)")
database.execute("insert into seen values (35)")
database.commit()
async def answer(): return segment.buf[0] + database.execute("select number from seen").fetchone()[0]
result = asyncio.run(answer())
segment.close(), segment.unlink()
result
"""
    async with attacked(running) as session:
        assert await session(code) == "42\n"


async def test_its_command_lines_name_no_path_but_the_interpreter_s(running: Run, tmp_path: Path) -> None:
    code = "[open(f'/proc/{pid}/cmdline').read().split('\\0')[:6] for pid in (1, 2)]"
    async with served(running, read_only_paths=[str(tmp_path)]) as server:
        outer, inner = eval(await (await server.session())(code))

    assert outer[0] == "bwrap" and outer[1] == "--args" and outer[3] == "--"
    assert outer[4] == inner[0] and inner[1:4] == ["-I", "-S", "-X"]


@pytest.mark.parametrize("call", ["os.memfd_create('hoard')", "libc_call('shmget', 0, 1 << 20, 0o1600)"])
async def test_memory_that_no_bound_sees_is_refused(running: Run, call: str) -> None:
    libc = """
import ctypes, os
def libc_call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0: raise OSError(ctypes.get_errno(), name)
"""
    async with attacked(running) as session:
        await session(libc)
        assert (await session(call)).splitlines()[-1].startswith("PermissionError: [Errno 1]")


async def test_endless_output_is_ended(running: Run) -> None:
    async with attacked(running, output_chars=100) as session:
        text = await session("while True: print('y' * 99)")

    head, _, rest = text.partition("\n[... ")
    assert head == "y" * 50
    assert rest.endswith(ended("the code used more than 16 MB of output"))


async def test_a_full_disk_is_an_error_and_of_this_session_alone(running: Run) -> None:
    fill = """
for name in range(100):
    try:
        with open(f'{folder}/file{name}', 'wb') as file: file.write(bytes(1 << 20))
    except OSError as error:
        print(name, error.strerror)
        break
"""
    async with attacked(running) as session:
        await session("import sys; sys.tracebacklimit = 0")
        texts = [await session(f"folder = {folder!r}\n{fill}") for folder in ("/tmp", "/dev/shm", "/dev", "/")]
        assert texts == [
            "4 No space left on device\n",
            "0 No space left on device\n",
            "0 Read-only file system\n",
            "0 Read-only file system\n",
        ]


async def test_a_flood_of_empty_files_is_ended(running: Run) -> None:
    async with attacked(running) as session:
        text = await session("for name in range(10 ** 9): open(str(name), 'w').close()")
        assert text == ended("the code used more than 20000 files")


async def test_deep_recursion_is_an_error(running: Run) -> None:
    async with attacked(running) as session:
        text = await session("def deeper(): return deeper()\ndeeper()")
        assert text.splitlines()[-1] == "RecursionError: maximum recursion depth exceeded"
        assert len(text) < 1000


async def test_limits_cannot_be_raised(running: Run) -> None:
    raising = "import resource\nresource.setrlimit(resource.RLIMIT_{}, (-1, -1))"
    async with attacked(running) as session:
        texts = [await session(raising.format(name)) for name in ("AS", "NPROC", "CPU", "FSIZE", "NOFILE")]
        assert {text.splitlines()[-1] for text in texts} == {"ValueError: not allowed to raise maximum limit"}


# What it sees


async def test_the_environment_is_the_sandbox_s_own(running: Run) -> None:
    async with attacked(running) as session:
        assert await session("import os\nsorted(os.environ)") == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PWD']\n"
        first = await session("print(open('/proc/1/environ').read())")
        # As root its first process is another user's; else it has no environment to show.
        assert first.splitlines()[-1] in ("", "PermissionError: [Errno 13] Permission denied: '/proc/1/environ'")


async def test_no_process_of_the_machine_is_in_sight(running: Run) -> None:
    async with attacked(running) as session:
        seen = await session("import os\n[name for name in os.listdir('/proc') if name.isdigit()], os.getppid()")
        assert seen == "(['1', '2'], 1)\n"
        assert await session(f"os.path.exists('/proc/{os.getpid()}')") == "False\n"


async def test_no_file_of_the_service_is_in_reach(running: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    service = trackway.tools.core.server.__file__
    paths = [
        service,
        f"{tmp_path}/secret",
        "/etc/passwd",
        "/etc/shadow",
        "/home",
        "/var",
        "/run",
        "/sys",
        "/usr/bin/sh",
    ]
    code = f"import os\n[path for path in {paths} if os.path.lexists(path)]"
    async with attacked(running) as session:
        assert await session(code) == "[]\n"


async def test_packages_of_the_service_s_own_python_are_hidden(running: Run) -> None:
    code = "import site\nimport os\n[os.listdir(folder) for folder in site.getsitepackages() if os.path.exists(folder)]"
    async with attacked(running) as session:
        assert set(await session(code)) <= set("[], \n")


async def test_links_lead_nowhere(running: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    targets = ["/etc/shadow", f"{tmp_path}/secret", "../../../etc/shadow", "/proc/1/root/etc/shadow", "/proc/1/cwd/etc"]
    code = """
import os
for number, target in enumerate(targets):
    os.symlink(target, f"link{number}")
    try: print(open(f"link{number}").read())
    except (FileNotFoundError, PermissionError): print("nowhere")
"""
    async with attacked(running) as session:
        assert await session(f"targets = {targets}\n{code}") == "nowhere\n" * len(targets)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


async def test_a_listening_port_of_the_machine_is_out_of_reach(running: Run, listener: socket.socket) -> None:
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 1)"
    async with attacked(running) as session:
        text = await session(code)
        assert text.splitlines()[-1] == "OSError: [Errno 97] Address family not supported by protocol"
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_VSOCK", "AF_PACKET"])
async def test_the_only_sockets_are_those_between_its_own_processes(running: Run, family: str) -> None:
    async with attacked(running) as session:
        text = await session(f"import socket\nsocket.socket(socket.{family}, socket.SOCK_DGRAM)")
        assert text.splitlines()[-1] == "OSError: [Errno 97] Address family not supported by protocol"
        assert await session("[end.family.name for end in socket.socketpair()]") == "['AF_UNIX', 'AF_UNIX']\n"


async def test_sessions_see_nothing_of_each_other(running: Run) -> None:
    trace = """
import os, socket
from multiprocessing import shared_memory
open("/tmp/mine", "w").write("hunter2")
segment = shared_memory.SharedMemory("mine", create=True, size=4096)
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0mine")
listener.listen()
"""
    look = """
import os, socket
from multiprocessing import shared_memory
print(os.listdir("/tmp"), os.listdir("/dev/shm"), [name for name in os.listdir("/proc") if name.isdigit()])
try: shared_memory.SharedMemory("mine")
except FileNotFoundError as error: print(error.strerror)
try: socket.socket(socket.AF_UNIX).connect("\\0mine")
except ConnectionRefusedError as error: print(error.strerror)
"segment" in globals()
"""
    async with served(running) as server:
        first, second = await server.session(), await server.session()
        assert await first(trace) == "[no output]"
        assert await second(look) == "['.shm'] [] ['1', '2']\nNo such file or directory\nConnection refused\nFalse\n"
