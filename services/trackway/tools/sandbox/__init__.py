"""Runs Python code in isolation: bubblewrap around the process, limits within it, a watch and a deadline over it.

Which layer holds what is told in docs/guides/tools.md.
"""

from trackway.tools.sandbox.interpreter import Interpreter
from trackway.tools.sandbox.isolation import SandboxUnavailableError, launcher_for
from trackway.tools.sandbox.launcher import Launcher
from trackway.tools.sandbox.settings import SandboxSettings

__all__ = ["Interpreter", "Launcher", "SandboxSettings", "SandboxUnavailableError", "launcher_for"]
