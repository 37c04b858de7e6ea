"""SIGTERM handling in Ray's actor processes."""

import ctypes
import signal


def end_at_sigterm() -> None:
    """Make SIGTERM end this process at once. May be called from any thread.

    Ray's handler ends the actor but leaves its process running for up to a minute. Meanwhile the proxy accepts requests
    whose bodies no replica can fetch, and a replica is neither called nor replaced. Python sets handlers only in the
    main thread, where Ray runs no actor code.
    """
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(int(signal.SIG_DFL)))
