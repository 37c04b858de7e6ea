"""Error responses for Anthropic's clients: our body with their `type`, and a header for retries."""

from pydantic import JsonValue

from trackway.model_api.error_route import ErrorFormatRoute, status_of
from trackway.wire.anthropic.replies import AnthropicError, AnthropicErrorReply
from trackway.wire.errors import TrackwayError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicRoute(ErrorFormatRoute):
    """A route whose errors have Anthropic's format."""

    @staticmethod
    def error_body(error: TrackwayError) -> dict[str, JsonValue]:
        """Anthropic's body."""
        return anthropic_error(error).model_dump(mode="json")


def anthropic_error(error: TrackwayError) -> AnthropicErrorReply:
    """The body; also sent as an event when a stream fails after its start."""
    status = status_of(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    body = error.to_reply().error.model_dump(mode="json")
    return AnthropicErrorReply(error=AnthropicError.model_validate({**body, "type": kind}))
