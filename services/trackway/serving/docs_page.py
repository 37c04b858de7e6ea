"""`/docs` with Swagger's files from a package, so that it works without a network; `/` leads there."""

from importlib.resources import files

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

_FILES = "/docs-files"


def serve_docs(app: FastAPI) -> None:
    """Add `/docs`, its files and the redirect from `/`. Addresses are relative, for proxies with a prefix or TLS."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def root(request: Request) -> RedirectResponse:
        return RedirectResponse(f"{request.scope.get('root_path', '').rstrip('/')}/docs")

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        relative = _FILES.removeprefix("/")
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url=f"{relative}/swagger-ui-bundle.js",
            swagger_css_url=f"{relative}/swagger-ui.css",
            swagger_favicon_url=f"{relative}/favicon-32x32.png",
        )

    app.include_router(router)
    app.mount(_FILES, StaticFiles(directory=str(files("fastapi_swagger.resources"))), name="docs-files")
