"""The hook by which people keep secrets out of traces: one function from text to text, applied to every text."""

import importlib
import logging
from collections.abc import Callable

logger = logging.getLogger("trackway.tracing")

Redact = Callable[[str], str]

FAILED = "[redaction failed]"


def load_redaction(path: str | None) -> Redact | None:
    """The function that `package.module:function` names. Raises ValueError when there is none."""
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        function: Redact = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, SystemExit) as error:
        raise ValueError(f"tracing.redact: expected package.module:function, got {path!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"tracing.redact: expected a function, {path!r} is a {type(function).__name__}")
    return function


def redacted(text: str, redact: Redact | None) -> str:
    """The text as it may be stored; a function that fails must not leak what it was to hide."""
    if redact is None:
        return text
    try:
        return str(redact(text))
    except BaseException as error:  # the hook's `sys.exit` is its failure, and must not end the service
        logger.warning("the redaction raised %s: %s", type(error).__name__, error)
        return FAILED
