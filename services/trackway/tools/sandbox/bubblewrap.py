"""The options of bubblewrap (`bwrap`) for one interpreter."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from trackway.tools.sandbox.python_files import PythonFiles
from trackway.tools.sandbox.settings import SandboxSettings

_DEVICES = ("null", "full", "random", "urandom")
"""Not `zero`: memory shared through it has no limit."""
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
_NOTHING = ("--size", "4096", "--tmpfs")
"""A minimal file system; made read-only after its content is set."""

_ORDINARY = ("--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000")
_ROOT = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")


def bubblewrap_options(
    files: PythonFiles, settings: SandboxSettings, as_root: bool, seccomp: int | None, info: int
) -> list[str]:
    """All of bubblewrap's arguments.

    as_root: whether this process is root; then the interpreter itself changes to another user, and no user namespace
        is needed. Otherwise bubblewrap makes one, in which the code is an ordinary user as well.
    seccomp, info: numbers of the open files with the system call filter and for the process id.
    """
    return [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *(_ROOT if as_root else _ORDINARY),
        *("--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox", "--info-fd", str(info)),
        *(() if seccomp is None else ("--seccomp", str(seccomp))),
        *(word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *("--proc", "/proc", *_NOTHING, "/dev"),
        *(word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        *("--perms", "1777", "--size", str(settings.disk_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        # Shared memory counts as files: one limit for both.
        *("--perms", "1777", "--dir", "/tmp/.shm", "--symlink", "/tmp/.shm", "/dev/shm"),
        *("--symlink", "/proc/self/fd", "/dev/fd", "--remount-ro", "/dev"),
        *_readable(files, settings.read_only_paths),
        *("--remount-ro", "/"),
    ]


def _readable(files: PythonFiles, read_only_paths: Sequence[str]) -> Iterator[str]:
    binds = [(path, path) for path in files.visible]
    binds += [(source, name) for source, name in files.executables if not _within(name, files.visible)]
    extra = [(path, path) for path in read_only_paths]
    # bubblewrap gives the folders above a bind their modes outside, and /root is closed to other users there.
    above = {str(parent) for _, path in binds + extra for parent in PurePosixPath(path).parents} - {"/", "/tmp"}
    for folder in sorted(above):
        if not _within(folder, files.visible):
            yield from ("--perms", "0755", "--dir", folder)
    for source, path in binds:
        yield from ("--ro-bind", source, path)
    for folder in files.hidden:
        if _within(folder, files.visible):
            yield from (*_NOTHING, folder, "--remount-ro", folder)
    for source, path in extra:
        yield from ("--ro-bind", source, path)


def _within(path: str, folders: Sequence[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)
