"""Processes that hold secrets."""

import subprocess
import sys

import pytest

SHOW = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_process_that_refuses_inspection_is_not_dumpable() -> None:
    refused = f"from trackway.system import refuse_inspection; refuse_inspection(); {SHOW}"

    assert (printed(SHOW), printed(refused)) == ("1\n", "0\n")
