"""The system calls that sandboxed code cannot make, as a filter program for the kernel.

Two kinds: memory that no other bound sees (anonymous files, System V and POSIX queues, network buffers), and doors into
the kernel that Python code has no use for. Everything else is allowed. Sockets are for the processes of one sandbox.
"""

import errno
import platform
import socket
import struct

_DENIED_X86_64 = {
    "shmget": 29,
    "semget": 64,
    "msgget": 68,
    "ptrace": 101,
    "mq_open": 240,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
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
_CLONE_NEWUSER = 0x10000000
_X32_BIT = 0x40000000

_MACHINES = {
    # machine: (audit's number of it, socket, clone, denied)
    "x86_64": (0xC000003E, 41, 56, _DENIED_X86_64),
    "aarch64": (0xC00000B7, 198, 220, _DENIED_AARCH64),
}

_LOAD, _RETURN = 0x20, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter for bubblewrap's `--seccomp`; None for a machine whose system call numbers are not known here."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, socket_call, clone_call, denied = known
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_IF_EQUAL, architecture, no=0, yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        *_when(_IF_AT_LEAST, _X32_BIT, [_refuse(errno.ENOSYS)]),
        # Its flags lie in memory, out of a filter's reach; the C library falls back to clone.
        *_when(_IF_EQUAL, _CLONE3, [_refuse(errno.ENOSYS)]),
        *(line for number in denied.values() for line in _when(_IF_EQUAL, number, [_refuse(errno.EPERM)])),
        *_when(_IF_EQUAL, clone_call, _by_argument(_IF_ANY_BIT, _CLONE_NEWUSER, _refuse(errno.EPERM), _allow())),
        *_when(_IF_EQUAL, socket_call, _by_argument(_IF_EQUAL, socket.AF_UNIX, _allow(), _refuse(errno.EAFNOSUPPORT))),
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


def _by_argument(test: int, value: int, yes: bytes, no: bytes) -> list[bytes]:
    return [_line(_LOAD, _FIRST_ARGUMENT), _line(test, value, no=1), yes, no]
