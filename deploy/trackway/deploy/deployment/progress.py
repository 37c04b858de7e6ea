"""Progress of a start, a stop or a check, part by part."""

from collections.abc import Callable

Report = Callable[[str, str], None]
"""Called with a part's name and state. The last state is `ready` or `stopped`, of spans `sent` or `left on disk`, of a
check `ready`, `with problems` or `not checked`."""
