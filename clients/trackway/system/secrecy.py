"""Secrets in a process's environment and memory."""

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def refuse_inspection() -> None:
    """Keep other processes of this user from reading this one's environment and memory, on Linux; root still can.

    A program that is executed later can be read again. Debuggers and py-spy need root, and there are no core dumps.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
