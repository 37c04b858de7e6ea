"""An agent whose module waits at its import, for at most ten seconds."""

import threading

from tests.services.agent.sessions.own_function import answer, import_gate

__all__ = ["answer", "importers"]

importers = [threading.current_thread().name]
import_gate.wait(60)
