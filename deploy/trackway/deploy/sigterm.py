"""SIGTERM in Ray's actor processes."""

import ctypes
import signal


def end_at_sigterm() -> None:
    """Have SIGTERM end this process at once, from now on and from any thread.

    Ray's handler ends the actor and leaves its process running, for up to a minute: the proxy accepts requests whose
    bodies no replica can fetch from it, and a replica is neither called nor replaced. Python sets handlers only in the
    main thread, where Ray runs no code of an actor.
    """
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(int(signal.SIG_DFL)))
