"""HTTP headers of Trackway's services, in addition to W3C `traceparent` and `tracestate`."""

import hashlib
import re
from urllib.parse import quote

LONGEST_TEXT = 256
"""Most characters of a session id or a key in a header."""

_AS_IT_IS = re.compile(rf"[\x20-\x7e]{{1,{LONGEST_TEXT}}}")
_DIGEST_CHARS = 32

SESSION_ID = "x-session-id"
"""Affinity hint: Ray Serve's consistent-hash router keeps one session on one replica."""

IDEMPOTENCY_KEY = "idempotency-key"
"""A repeated POST with the same key gets the first answer and never runs twice."""

REQUEST_TIMEOUT = "x-request-timeout"
"""Seconds, as a decimal number, that the caller still waits. The receiver counts them by its own clock."""

TRACE_RECEIPT = "x-trackway-trace"
"""On a response: what the request added to its trace, `bytes=1234,incidents=weights_behind+tool_timeout`."""

REPLICA = "x-trackway-replica"
"""On a response: the name of the replica, as in `/health`."""


def header_text(text: str) -> str:
    """A session id or a key encoded for a header: printable ASCII unchanged, any other text percent-encoded.

    A value that is too long for a header keeps its beginning and ends with a digest of the whole. The same text always
    gives the same header, so that requests can be routed by it.
    """
    if _AS_IT_IS.fullmatch(text):
        return text
    encoded = quote(text, safe="/", errors="replace")
    if 1 <= len(encoded) <= LONGEST_TEXT:
        return encoded
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_DIGEST_CHARS]
    return f"{encoded[: LONGEST_TEXT - _DIGEST_CHARS - 1]}~{digest}"
