"""The system calls denied to sandboxed code, as a filter program for the kernel.

Two kinds: memory that no other limit covers (anonymous files, shared memory without a file, huge pages, pages that a
pipe keeps, System V and POSIX queues, larger socket buffers), and kernel interfaces without use for the code.
Everything else is allowed. Sockets connect only processes of one sandbox, and the monitor counts them (process.py).
"""

import errno
import platform
import socket
import struct

_DENIED_X86_64 = {
    "shmget": 29,
    "semget": 64,
    "setsockopt": 54,
    "msgget": 68,
    "ptrace": 101,
    "mq_open": 240,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "inotify_init": 253,
    "unshare": 272,
    "splice": 275,
    "tee": 276,
    "vmsplice": 278,
    "inotify_init1": 294,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "memfd_create": 319,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "memfd_secret": 447,
}
_DENIED_AARCH64 = {
    "inotify_init1": 26,
    "vmsplice": 75,
    "splice": 76,
    "tee": 77,
    "setsockopt": 208,
    "fanotify_init": 262,
    "setns": 268,
    "unshare": 97,
    "ptrace": 117,
    "mq_open": 180,
    "msgget": 186,
    "semget": 190,
    "shmget": 194,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "perf_event_open": 241,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "memfd_create": 279,
    "bpf": 280,
    "userfaultfd": 282,
    "io_uring_setup": 425,
    "memfd_secret": 447,
}
_CLONE3 = 435
_MAP_SHARED_ANONYMOUS = 0x21
_MAP_HUGETLB = 0x40000
_CLONE_NEWUSER = 0x10000000
_X32_BIT = 0x40000000

_MACHINES = {
    # machine: (audit's number of it, socket, clone, mmap, denied)
    "x86_64": (0xC000003E, 41, 56, 9, _DENIED_X86_64),
    "aarch64": (0xC00000B7, 198, 220, 222, _DENIED_AARCH64),
}

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40
"""Offsets in the kernel's `struct seccomp_data`."""
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter for bubblewrap's `--seccomp`, or None for a machine whose system call numbers are not known here."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, socket_call, clone_call, mmap_call, denied = known
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_IF_EQUAL, architecture, no=0, yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        *_when(_IF_AT_LEAST, _X32_BIT, [_refuse(errno.ENOSYS)]),
        # Its flags are in memory, which a filter cannot read; the C library falls back to clone.
        *_when(_IF_EQUAL, _CLONE3, [_refuse(errno.ENOSYS)]),
        *(line for number in denied.values() for line in _when(_IF_EQUAL, number, [_refuse(errno.EPERM)])),
        *_when(_IF_EQUAL, clone_call, _by_argument(_IF_ANY_BIT, _CLONE_NEWUSER, _refuse(errno.EPERM), _allow())),
        *_when(_IF_EQUAL, socket_call, _by_argument(_IF_EQUAL, socket.AF_UNIX, _allow(), _refuse(errno.EAFNOSUPPORT))),
        *_when(_IF_EQUAL, mmap_call, _mmap()),
        _allow(),
    ]
    return b"".join(lines)


def _line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _allow() -> bytes:
    return _line(_RETURN, _ALLOW)


def _refuse(error: int) -> bytes:
    return _line(_RETURN, 0x00050000 | error)


def _when(test: int, value: int, then: list[bytes]) -> list[bytes]:
    """`then` must end in a return."""
    return [_line(test, value, no=len(then)), *then]


def _mmap() -> list[bytes]:
    """Shared memory needs a file in /tmp, whose size is limited. Otherwise it outlives the processes that map it."""
    return [
        _line(_LOAD, _FOURTH_ARGUMENT),
        *_when(_IF_ANY_BIT, _MAP_HUGETLB, [_refuse(errno.ENOMEM)]),
        _line(_AND, _MAP_SHARED_ANONYMOUS),
        *_when(_IF_EQUAL, _MAP_SHARED_ANONYMOUS, [_refuse(errno.EPERM)]),
        _allow(),
    ]


def _by_argument(test: int, value: int, yes: bytes, no: bytes) -> list[bytes]:
    return [_line(_LOAD, _FIRST_ARGUMENT), _line(test, value, no=1), yes, no]
