"""The page of the services' HTTP routes, from their OpenAPI documents."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from generators.apps import service_apps
from generators.markdown import breakable, code, page, sentence, table
from generators.wire import link
from trackway.serving import needs_admin

SHARED = ("/health", "/ready", "/metrics")


class Operation(NamedTuple):
    """One row: a method of a path; request and response are Markdown."""

    method: str
    path: str
    meaning: str
    request: str
    response: str
    admin: bool


def http_api() -> str:
    """Every documented route: method, path, meaning, request, response and the scope of the token it needs."""
    by_service = {service: operations(service) for service in service_apps()}
    shared = [operation for operation in by_service["trainer"] if operation.path in SHARED]
    own = {service: [op for op in found if op.path not in SHARED] for service, found in by_service.items()}
    return page(
        "HTTP API",
        "Each service answers below its own prefix: `http://127.0.0.1:8000/rollout/generate` with `trackway up`. "
        "`/docs` of a service has the same routes with every field, to try out. Errors are described under "
        "[Error codes](errors.md), request and response models under [Wire models](wire.md).",
        "Where tokens are configured, a request needs `Authorization: Bearer TOKEN` with the scope `execute`; routes "
        "marked *admin* need the scope `admin`. `POST /tools/mcp`, which is not listed here, speaks the Model Context "
        "Protocol over streamable HTTP.",
        *(f"## `/{service}`\n\n{_table(operations)}" for service, operations in own.items()),
        "## Every service",
        _table(shared),
    )


def operations(service: str) -> list[Operation]:
    """The documented operations of a service, in the order of its OpenAPI document."""
    app = service_apps()[service]
    admin_routes = [route for route in _api_routes(app.routes) if _is_admin(route)]
    admin = {(route.path_format, method) for route in admin_routes for method in route.methods or ()}
    return [
        Operation(
            method.upper(),
            path,
            sentence(described.get("description", described["summary"])),
            _request(described),
            _response(described["responses"]),
            (path, method.upper()) in admin,
        )
        for path, methods in app.openapi()["paths"].items()
        for method, described in methods.items()
    ]


def _table(operations: Iterable[Operation]) -> str:
    rows = [
        (op.method, breakable(op.path), op.meaning + (" *(admin)*" if op.admin else ""), op.request, op.response)
        for op in operations
    ]
    return table(("Method", "Path", "Meaning", "Request", "Response"), rows)


def _api_routes(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif (included := getattr(route, "original_router", None)) is not None:
            yield from _api_routes(included.routes)


def _is_admin(route: APIRoute) -> bool:
    return any(dependency.dependency is needs_admin for dependency in route.dependencies)


def _request(operation: dict[str, Any]) -> str:
    query = [code(parameter["name"]) for parameter in operation.get("parameters", []) if parameter["in"] == "query"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return ", ".join([*_models(body), *(["query: " + ", ".join(query)] if query else [])])


def _response(responses: dict[str, Any]) -> str:
    [success] = [answer for status, answer in responses.items() if status.startswith("2")]
    content = success.get("content", {})
    return ", ".join(
        " ".join(_models(media.get("schema", {}))) or code(media_type) for media_type, media in content.items()
    )


def _models(schema: dict[str, Any]) -> list[str]:
    """Links to the models that a schema is made of."""
    if "$ref" in schema:
        return [link(schema["$ref"].rpartition("/")[2], "wire.md")]
    return [link for part in schema.get("anyOf", []) for link in _models(part)]
