"""Routes whose errors have the format of the API that they imitate."""

from abc import abstractmethod

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import JsonValue
from starlette.exceptions import HTTPException

from trackway.serving.error_responses import code_of, misfit, retry_after
from trackway.serving.routes import Handler, JsonRoute
from trackway.wire.errors import ErrorCode, TrackwayError


class ErrorFormatRoute(JsonRoute):
    """A route that answers errors with `error_body`."""

    @staticmethod
    @abstractmethod
    def error_body(error: TrackwayError) -> dict[str, JsonValue]:
        """The body of an error."""

    def get_route_handler(self) -> Handler:
        """FastAPI's handler, wrapped to convert errors."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except (TrackwayError, RequestValidationError) as error:
                return self.error_answer(error)
            except HTTPException as error:
                response = self.error_answer(TrackwayError(code_of(error.status_code), error.detail))
                response.status_code = error.status_code
                response.headers.update(error.headers or {})
                return response

        return answer

    @classmethod
    def error_answer(cls, error: TrackwayError | RequestValidationError) -> JSONResponse:
        """The response of an error."""
        if isinstance(error, RequestValidationError):
            error = _invalid(error)
        headers = {"x-should-retry": "true" if error.retryable else "false", **retry_after(error)}
        return JSONResponse(cls.error_body(error), status_code=status_of(error), headers=headers)


def status_of(error: TrackwayError) -> int:
    """The status. An invalid request is a 400, as in OpenAI's and Anthropic's APIs and vLLM."""
    return 400 if error.code is ErrorCode.INVALID_REQUEST else error.status


def _invalid(error: RequestValidationError) -> TrackwayError:
    first = error.errors()[0]
    place = next(map(str, first["loc"][1:]), None)
    param = first.get("ctx", {}).get("param") or place
    return TrackwayError(ErrorCode.INVALID_REQUEST, misfit(error, skip=1), param=param)
