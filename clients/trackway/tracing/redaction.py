"""The redaction hook, which keeps secrets out of traces: a function from text to text, applied to every text."""

import importlib
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("trackway.tracing")

Redact = Callable[[str], str]

FAILED = "[redaction failed]"


def load_redaction(path: str | None) -> Redact | None:
    """The function named by `package.module:function`, or None for None. Raises ValueError when it does not exist."""
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


def redacted_value(value: Any, redact: Redact, keys: bool = False) -> Any:
    """The JSON value with texts, numbers and nested keys redacted, because a secret may be any of them."""
    if isinstance(value, dict):
        hidden = ((redacted(key, redact) if keys else key, item) for key, item in value.items())
        return {key: redacted_value(item, redact, True) for key, item in hidden}
    if isinstance(value, list):
        return [redacted_value(item, redact, True) for item in value]
    if value is None or isinstance(value, bool):
        return value
    text = redacted(str(value), redact)
    return text if isinstance(value, str) or text != str(value) else value


def redacted(text: str, redact: Redact | None) -> str:
    """The redacted text. If the function fails, a placeholder, so that nothing leaks."""
    if redact is None:
        return text
    try:
        return str(redact(text))
    except BaseException as error:  # even a `sys.exit` of the hook must not end the service
        logger.warning("the redaction function raised %s: %s", type(error).__name__, error)
        return FAILED
