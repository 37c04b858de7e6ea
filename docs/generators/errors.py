"""The page of error codes."""

from generators.markdown import code, page, table
from trackway.wire.errors import ERRORS


def error_codes() -> str:
    """Every code with its HTTP status, whether a retry can help, whether the model sees it, and what it means."""
    rows = [
        (code(error.value), str(spec.status), "yes" if spec.retryable else "no", spec.model_sees.value, spec.meaning)
        for error, spec in ERRORS.items()
    ]
    return page(
        "Error codes",
        'Every error answer has the body `{"error": {"code", "message", "retryable", "detail"}}`. The list of codes is '
        "closed, so a client may match on them. The message says what was expected, what came, and what to do. "
        "Where `retryable` is true the same request may succeed later; the clients retry it within its deadline. "
        "*Model sees it* says whether the message of a failed tool call becomes the model's observation; other errors "
        "end the trajectory. `/get_observation`, which has no agent loop behind it, returns more of them.",
        table(("Code", "Status", "Retryable", "Model sees it", "Meaning"), rows),
    )
