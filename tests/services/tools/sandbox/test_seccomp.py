"""The filter program, read by a small interpreter of the kernel's filter language."""

import errno
import struct

import pytest

from trackway.tools.sandbox.launcher import filter_program

X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def verdict(machine: str, architecture: int, number: int, argument: int = 0, flags: int = 0) -> int:
    """What the kernel would do about one system call."""
    program = filter_program(machine)
    assert program is not None
    lines = list(struct.iter_unpack("=HBBI", program))
    data = struct.pack("=IIQQQQQ", number, architecture, 0, argument, 0, 0, flags)
    tests = {0x15: lambda a, k: a == k, 0x35: lambda a, k: a >= k, 0x45: lambda a, k: a & k != 0}
    at = value = 0
    while True:
        code, yes, no, k = lines[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        elif code == 0x54:
            value &= k
        elif code == 0x06:
            return k
        else:
            at += yes if tests[code](value, k) else no


@pytest.mark.parametrize(
    ("machine", "architecture", "number", "argument", "expected"),
    [
        ("x86_64", X86_64, 0, 0, ALLOW),  # read
        ("x86_64", X86_64, 319, 0, REFUSE | errno.EPERM),  # memfd_create
        ("x86_64", X86_64, 447, 0, REFUSE | errno.EPERM),  # memfd_secret, the last of the list
        ("x86_64", X86_64, 435, 0, REFUSE | errno.ENOSYS),  # clone3
        ("x86_64", X86_64, 56, 0x11, ALLOW),  # clone as fork does it
        ("x86_64", X86_64, 56, 0x10000011, REFUSE | errno.EPERM),  # clone with a new user namespace
        ("x86_64", X86_64, 41, 1, ALLOW),  # socket, AF_UNIX
        ("x86_64", X86_64, 41, 2, REFUSE | errno.EAFNOSUPPORT),  # socket, AF_INET
        ("x86_64", X86_64, 0x40000000, 0, REFUSE | errno.ENOSYS),  # read by the x32 numbers
        ("x86_64", I386, 3, 0, KILL),
        ("aarch64", AARCH64, 63, 0, ALLOW),  # read
        ("aarch64", AARCH64, 279, 0, REFUSE | errno.EPERM),  # memfd_create
        ("aarch64", AARCH64, 220, 0x10000011, REFUSE | errno.EPERM),  # clone with a new user namespace
        ("aarch64", AARCH64, 198, 40, REFUSE | errno.EAFNOSUPPORT),  # socket, AF_VSOCK
        ("aarch64", X86_64, 63, 0, KILL),
    ],
)
def test_each_call_has_its_verdict(machine: str, architecture: int, number: int, argument: int, expected: int) -> None:
    assert verdict(machine, architecture, number, argument) == expected


@pytest.mark.parametrize(("machine", "architecture", "number"), [("x86_64", X86_64, 9), ("aarch64", AARCH64, 222)])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (0x22, ALLOW),  # private, anonymous
        (0x01, ALLOW),  # shared, of a file
        (0x21, REFUSE | errno.EPERM),  # shared, anonymous
        (0x23, REFUSE | errno.EPERM),  # shared with validation, anonymous
        (0x40022, REFUSE | errno.ENOMEM),  # private, huge pages
    ],
)
def test_memory_is_private_or_has_a_file(
    machine: str, architecture: int, number: int, flags: int, expected: int
) -> None:
    assert verdict(machine, architecture, number, flags=flags) == expected


def test_an_unknown_machine_has_no_filter() -> None:
    assert filter_program("riscv64") is None
