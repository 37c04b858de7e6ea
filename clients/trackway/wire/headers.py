"""The HTTP headers that Trackway's services understand, beside W3C `traceparent` and `tracestate`."""

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
