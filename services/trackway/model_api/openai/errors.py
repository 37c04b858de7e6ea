"""Error responses for OpenAI's clients: our body with `type` and `param`, and a header for retries."""

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import JsonValue

from trackway.serving.error_responses import misfit, retry_after
from trackway.serving.routes import Handler, JsonRoute
from trackway.wire.errors import ErrorCode, TrackwayError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class OpenAIRoute(JsonRoute):
    """A route whose errors have OpenAI's format."""

    def get_route_handler(self) -> Handler:
        """FastAPI's handler, wrapped to convert errors."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except TrackwayError as error:
                return openai_error(error)
            except RequestValidationError as error:
                return openai_error(_invalid(error))

        return answer


def openai_error(error: TrackwayError) -> JSONResponse:
    """The response; an invalid request is a 400, as in OpenAI's API and vLLM."""
    status = 400 if error.code is ErrorCode.INVALID_REQUEST else error.status
    headers = {"x-should-retry": "true" if error.retryable else "false", **retry_after(error)}
    return JSONResponse(openai_body(error), status_code=status, headers=headers)


def openai_body(error: TrackwayError) -> dict[str, JsonValue]:
    """The body; also sent as an event when a stream fails after its start."""
    kind = "server_error" if error.status >= 500 else _TYPES.get(error.status, "invalid_request_error")
    body = error.to_reply().error.model_dump(mode="json")
    return {"error": {**body, "type": kind, "param": error.detail.get("param")}}


def _invalid(error: RequestValidationError) -> TrackwayError:
    first = error.errors()[0]
    place = next(map(str, first["loc"][1:]), None)
    param = first.get("ctx", {}).get("param") or place
    return TrackwayError(ErrorCode.INVALID_REQUEST, misfit(error, skip=1), param=param)
