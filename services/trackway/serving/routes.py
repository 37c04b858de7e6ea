"""Routes of a service, and its error responses in the format of wire/errors.py.

A route validates a JSON body directly from its bytes, which takes half the memory of parsing it first.
"""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import JsonValue, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError, shortened

logger = logging.getLogger("trackway.serving")

_CODE_OF_STATUS = {
    401: ErrorCode.UNAUTHORIZED,
    403: ErrorCode.FORBIDDEN,
    404: ErrorCode.NOT_FOUND,
    413: ErrorCode.PAYLOAD_TOO_LARGE,
}
MAX_PROBLEMS = 10
"""Maximum problems of a request named in a response."""
_MAX_LISTED = 1000
"""Most problems for which pydantic's list is built: each takes 10 us and 1.5 kB, and it lists all or none."""
_SCHEMAS = "#/components/schemas/"
_MAX_PART = 200
"""Maximum characters of a problem's location and message: both may quote the request."""
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


def error_response(error: TrackwayError, headers: Mapping[str, str] = MappingProxyType({})) -> JSONResponse:
    """The HTTP response of an error."""
    content = error.to_reply().model_dump(mode="json")
    return JSONResponse(content, status_code=error.status, headers={**retry_after(error), **headers})


def retry_after(error: TrackwayError) -> dict[str, str]:
    """`Retry-After` in whole seconds, as HTTP requires. The body's detail has the fraction.

    Set for errors with a retry time, and for every overload error: 1 second when there is no estimate.
    """
    asked = error.detail.get("retry_after_s")
    if isinstance(asked, int | float):
        return {"retry-after": str(max(0, math.ceil(asked)))}
    return {"retry-after": "1"} if error.code is ErrorCode.OVERLOADED else {}


def documented_error(description: str) -> dict[str, Any]:
    """An error response for the OpenAPI document. FastAPI would build a `model` again for every route."""
    return {"description": description, "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}ErrorReply"}}}}


def install_error_answers(app: FastAPI) -> None:
    """Answer every error of the app with `{"error": ...}`, and define that in the OpenAPI document."""
    _define_schemas(app)
    app.add_exception_handler(TrackwayError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)


def _define_schemas(app: FastAPI) -> None:
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        schema = ErrorReply.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}", mode="serialization")
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= {**schema.pop("$defs"), "ErrorReply": schema, **schemas}
        document["components"]["schemas"] = dict(sorted(schemas.items()))
        return document

    app.openapi = openapi


async def _ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TrackwayError)
    return error_response(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(TrackwayError(ErrorCode.INVALID_REQUEST, misfit(error)))


def body_problems(error: ValidationError) -> list[dict[str, Any]]:
    """The first problems of a body in FastAPI's format. A single entry with their number if there are too many."""
    count = error.error_count()
    if count > _MAX_LISTED:
        return [{"type": "too_many_problems", "loc": ("body",), "msg": f"{count} problems, too many to list"}]
    problems = error.errors(include_url=False, include_input=False)
    return [{**problem, "loc": ("body", *problem["loc"])} for problem in problems]


def misfit(error: RequestValidationError, *, skip: int = 0) -> str:
    """A description of a request's problems. `skip` drops that many leading parts of each location."""
    problems = error.errors()
    named = [_problem(item["loc"][skip:], item["msg"]) for item in problems[:MAX_PROBLEMS]]
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return f"the request does not fit the schema at /docs: {'; '.join([*named, *more])}"


def _problem(place: tuple[str | int, ...], message: str) -> str:
    path = shortened(".".join(map(str, place)), _MAX_PART)
    message = shortened(message, _MAX_PART)
    return f"{path}: {message}" if path else message


def code_of(status: int) -> ErrorCode:
    """The code of an HTTP error of the framework."""
    return _CODE_OF_STATUS.get(status, ErrorCode.INVALID_REQUEST)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; the routes are listed at /docs"
    reply = TrackwayError(code_of(error.status_code), message).to_reply()
    headers = {"allow": _allowed(request)} if error.status_code == 405 else error.headers
    return JSONResponse(reply.model_dump(mode="json"), status_code=error.status_code, headers=headers)


def _allowed(request: Request) -> str:
    """The methods of the path. The router knows only the methods of the first matching route."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    routes = request.app.routes
    return ", ".join(
        name for name, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)
    )


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
            error = _with_parameter(error)
        headers = {"x-should-retry": "true" if error.retryable else "false", **retry_after(error)}
        return JSONResponse(cls.error_body(error), status_code=status_of(error), headers=headers)


def status_of(error: TrackwayError) -> int:
    """The status. An invalid request is a 400, as in OpenAI's and Anthropic's APIs and vLLM."""
    return 400 if error.code is ErrorCode.INVALID_REQUEST else error.status


def _with_parameter(error: RequestValidationError) -> TrackwayError:
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
