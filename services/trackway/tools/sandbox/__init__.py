"""Runs Python code in isolation: bubblewrap around the process, limits within it, a watch and a deadline over it.

docs/guides/python-tool.md says what each layer bounds.
"""

from trackway.tools.sandbox.interpreter import Interpreter
from trackway.tools.sandbox.isolation import SandboxUnavailableError, launcher_for
from trackway.tools.sandbox.launcher import Launcher
from trackway.tools.sandbox.settings import SandboxSettings

__all__ = ["Interpreter", "Launcher", "SandboxSettings", "SandboxUnavailableError", "launcher_for"]
