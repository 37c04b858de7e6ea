"""Progress of a start or stop, component by component."""

from collections.abc import Callable

Report = Callable[[str, str], None]
"""Called with a component's name and what it is doing; `ready` is the last word."""
