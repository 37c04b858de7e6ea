"""The HTTP headers that Trackway's services understand, beside W3C `traceparent` and `tracestate`."""

import hashlib
import re
from urllib.parse import quote

LONGEST_TEXT = 256
"""Characters of a session's id or a key in a header."""

_AS_IT_IS = re.compile(rf"[\x20-\x7e]{{1,{LONGEST_TEXT}}}")
_DIGEST_CHARS = 32

SESSION_ID = "x-session-id"
"""Affinity hint: Ray Serve's consistent-hash router keeps one session on one replica."""

IDEMPOTENCY_KEY = "idempotency-key"
"""A POST that is sent again under the same key is answered from the first answer and never runs twice."""

REQUEST_DEADLINE = "x-request-deadline"
"""Unix time in seconds, as a decimal number, after which nobody waits for the answer any more."""

TRACE_RECEIPT = "x-trackway-trace"
"""On an answer: what the request added to its trace, `bytes=1234,incidents=weights_behind+tool_timeout`."""

REPLICA = "x-trackway-replica"
"""On an answer: the name of the replica that gave it, as in `/health`."""


def header_text(text: str) -> str:
    """A session's id or a key as a header carries it: printable ASCII as it is, any other text percent-encoded.

    One that is too long for a header keeps its beginning and ends with a digest of the whole. The same text always
    gives the same header, so that it can be routed by.
    """
    if _AS_IT_IS.fullmatch(text):
        return text
    encoded = quote(text, safe="/", errors="replace")
    if 1 <= len(encoded) <= LONGEST_TEXT:
        return encoded
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_DIGEST_CHARS]
    return f"{encoded[: LONGEST_TEXT - _DIGEST_CHARS - 1]}~{digest}"
