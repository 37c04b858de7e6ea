"""Progress of a start or stop, component by component."""

from collections.abc import Callable

Report = Callable[[str, str], None]
"""Called with a component's name and state; the last is `ready` or `stopped`, of spans `sent` or `left on disk`."""
