"""Every module imports where Python lacks what only Linux has: macOS."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, pkgutil, select, signal, socket, sys
import trackway.deploy.cli, trackway.deploy.graph  # what others installed stays as it is on this system

def modules(paths, prefix):
    for module in pkgutil.iter_modules(paths, prefix):
        yield module.name
        if module.ispkg:
            yield from modules(__import__(module.name, fromlist=["__path__"]).__path__, f"{module.name}.")

names = list(modules(trackway.__path__, "trackway."))
for name in names:
    __import__(name)
for name in [name for name in sys.modules if name.startswith("trackway.")]:
    del sys.modules[name]
LINUX = {
    os: "sched_getaffinity sched_setaffinity memfd_create pidfd_open O_TMPFILE O_PATH unshare setns posix_fallocate "
        "posix_fadvise splice copy_file_range eventfd getrandom setxattr",
    socket: "TCP_USER_TIMEOUT TCP_KEEPIDLE SO_PEERCRED AF_NETLINK SOCK_CLOEXEC SOCK_NONBLOCK",
    select: "epoll",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
}
for module, words in LINUX.items():
    for word in words.split():
        vars(module).pop(word, None)
sys.platform = "darwin"
for name in names:
    __import__(name)
print(len(names))
"""


@pytest.mark.slow
@pytest.mark.extended  # imports everything twice, and only a new use of a Linux-only name breaks it
def test_every_module_imports_without_what_only_linux_has() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280, check=False)

    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 400
