"""Routes that validate a JSON body directly from its bytes, which takes half the memory of parsing it first."""

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import JsonValue, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from trackway.serving.error_responses import body_problems, code_of, error_response, misfit, retry_after
from trackway.wire.errors import ErrorCode, TrackwayError, shortened

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route whose body is a model. RequestValidationError lists the first problems."""

    @classmethod
    def error_answer(cls, error: TrackwayError) -> JSONResponse:
        """The response to a request of this route that failed before it arrived here."""
        return error_response(error)

    def get_route_handler(self) -> Handler:
        """FastAPI's handler, which gets the validated body in place of parsed JSON."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        body_type: TypeAdapter[object] = TypeAdapter(self.body_field.field_info.annotation or object)

        async def answer(request: Request) -> Response:
            _must_be_json(request)
            validating = _ValidatingRequest(request, body_type)
            try:
                return await handle(validating)
            except HTTPException:
                if validating.failure is None:
                    raise
                raise validating.failure from None

        return answer


class ErrorFormatRoute(JsonRoute):
    """A route whose errors have the format of the API that it imitates: `error_body`."""

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


def error_answer_to(scope: Scope, routes: Iterable[BaseRoute], error: TrackwayError) -> JSONResponse:
    """The response to a request that failed outside its route, in the format of the route."""
    for route in routes:
        if isinstance(route, JsonRoute) and route.matches(scope)[0] is Match.FULL:
            return route.error_answer(error)
    return error_response(error)


def _must_be_json(request: Request) -> None:
    """Raise TrackwayError(INVALID_REQUEST) for a body of another content type: curl sends a form unless told."""
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    content_type = headers.get("content-type", "")
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    if kind != "application" or (subtype != "json" and not subtype.endswith("+json")):
        got = shortened(ascii(content_type), 80) if content_type else "none"
        message = (
            f"expected the header `content-type: application/json` with the body, got {got}; add it to the request"
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)


class ServiceRouter(APIRouter):
    """A router whose routes are JsonRoutes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"route_class": JsonRoute, **kwargs})


class _ValidatingRequest(Request):
    """`json()` returns the validated body. FastAPI answers 400 for any error, so `failure` keeps the cause."""

    def __init__(self, request: Request, body_type: TypeAdapter[object]) -> None:
        super().__init__(request.scope, request.receive)
        self.failure: RequestValidationError | None = None
        self._body_type = body_type

    async def json(self) -> object:
        try:
            return self._body_type.validate_json(await self.body())
        except ValidationError as error:
            self.failure = RequestValidationError(body_problems(error))
        raise self.failure
