"""Runs Python code in isolation: bubblewrap around the process, limits within it, monitoring and a deadline.

docs/guides/python-tool.md describes what each layer limits.
"""

from trackway.tools.sandbox.interpreter import Interpreter, SandboxUnavailableError, launcher_for
from trackway.tools.sandbox.launcher import Launcher
from trackway.tools.sandbox.process import SandboxSettings

__all__ = ["Interpreter", "Launcher", "SandboxSettings", "SandboxUnavailableError", "launcher_for"]
