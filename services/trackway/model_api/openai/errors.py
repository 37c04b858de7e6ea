"""Error responses for OpenAI's clients: our body with `type` and `param`, and a header for retries."""

from pydantic import JsonValue

from trackway.serving.routes import ErrorFormatRoute
from trackway.wire.errors import TrackwayError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class OpenAIRoute(ErrorFormatRoute):
    """A route whose errors have OpenAI's format."""

    @staticmethod
    def error_body(error: TrackwayError) -> dict[str, JsonValue]:
        """OpenAI's body."""
        return openai_body(error)


def openai_body(error: TrackwayError) -> dict[str, JsonValue]:
    """The body. Also sent as an event when a stream fails after its start."""
    kind = "server_error" if error.status >= 500 else _TYPES.get(error.status, "invalid_request_error")
    body = error.to_reply().error.model_dump(mode="json")
    return {"error": {**body, "type": kind, "param": error.detail.get("param")}}
