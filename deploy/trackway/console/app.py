"""The console's application: JSON routes over run folders, and the page that shows them."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import httpx
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.console.over_steps import FileResults, failures_page, prompt_page
from trackway.console.replies import (
    ConsoleInfo,
    EvaluationsPage,
    FailuresPage,
    Metrics,
    PromptPage,
    RunConfiguration,
    RunPage,
    RunSummaries,
    SearchPage,
    SpansPage,
    StepPage,
    TokensPage,
    TrajectoryAddress,
    TrajectoryPage,
)
from trackway.console.runs import Runs, config_of, series
from trackway.console.search import Query as SearchQuery
from trackway.console.search import search
from trackway.console.services import service_routes
from trackway.console.steps import MOST_ROLLOUTS, as_csv, as_jsonl, evaluations_page, step_page
from trackway.console.trajectory import (
    MOST_TOKENS,
    MOST_TRACES,
    Rank,
    Tokenizers,
    spans_page,
    tokens_page,
    traces_with,
    trajectory_page,
)
from trackway.console.trajectory_files import ParquetReader
from trackway.serving import ServiceSettings, service_app
from trackway.serving.auth import Caller, RawHeaders

PAGE = Path(__file__).parent / "page"
"""HTML, CSS and ES modules, served as they are."""
MOST_RUNS = 200
MOST_METRICS = 40
MOST_HITS = 200
MOST_TASKS = 1000
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

RunKey = Annotated[str, Query(max_length=300, description="The run's folder below the outputs folder.")]
Step = Annotated[int, Query(ge=0)]
Validation = Annotated[bool, Query(description="Whether the rollouts are of the step's validation.")]
Offset = Annotated[int, Query(ge=0)]


def create_app(
    outputs: Path,
    settings: ServiceSettings | None = None,
    services: Mapping[str, str] | None = None,
    http: httpx.AsyncClient | None = None,
) -> FastAPI:
    """The console of an outputs folder. Its page is open to callers. The data needs a token if there are tokens.

    `services`: addresses of running services by name; without them there are no pages over them. `http` reaches them.
    """
    urls = dict(services or {})
    routers = [_routes(Runs(outputs), list(urls)), *([service_routes(urls, http)] if urls else [])]
    app = service_app("console", settings or ServiceSettings(), routers=routers, guests=_page_visitor)
    app.mount("/page", StaticFiles(directory=PAGE))
    app.add_middleware(_PageHeaders)
    return app


def _routes(runs: Runs, services: list[str]) -> APIRouter:
    router = APIRouter(tags=["console"], generate_unique_id_function=lambda route: route.name)
    reader, results, tokenizers = ParquetReader(), FileResults(), Tokenizers()

    @router.get("/", include_in_schema=False)
    async def index() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @router.get("/api/console", response_model=ConsoleInfo)
    async def console() -> ConsoleInfo:
        """The outputs folder, and the services that can be asked."""
        return ConsoleInfo(outputs=str(runs.outputs), services=services)

    @router.get("/api/runs", response_model=RunSummaries)
    def list_runs(offset: Offset = 0, limit: Annotated[int, Query(ge=1, le=MOST_RUNS)] = 50) -> RunSummaries:
        """The runs of the outputs folder and of the folders in it, the newest first."""
        keys = [key for key, _ in runs.all()]
        page = [runs.summary(key) for key in keys[offset : offset + limit]]
        return RunSummaries(outputs=str(runs.outputs), total=len(keys), runs=page)

    @router.get("/api/run", response_model=RunPage)
    def run_page(request: Request, response: Response, run: RunKey) -> RunPage | Response:
        """A run. With `If-None-Match` the reply is 304 until a file of the run changes."""
        tag = f'"{runs.stamp(run)}-{runs.summary(run).alive}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        response.headers.update(headers)
        return runs.page(run)

    @router.get("/api/config", response_model=RunConfiguration)
    def config(run: RunKey) -> RunConfiguration:
        """The resolved configuration of a run."""
        return RunConfiguration(values=config_of(runs.find(run)))

    @router.get("/api/metrics", response_model=Metrics)
    def metrics(run: RunKey, name: Annotated[list[str], Query(max_length=MOST_METRICS)]) -> Metrics:
        """The values of metrics at each step that has them."""
        rows = runs.rows(run)
        return Metrics(series={metric: series(rows, metric) for metric in name})

    @router.get("/api/step", response_model=StepPage)
    def step_rollouts(
        run: RunKey,
        step: Step,
        validation: Validation = False,
        offset: Offset = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_ROLLOUTS)] = MOST_ROLLOUTS,
    ) -> StepPage:
        """The rollouts of a step in the order of prompts and rollouts, in whole groups: their first is in the range."""
        return step_page(reader, runs.find(run), step, validation, offset, limit)

    @router.get("/api/trajectory", response_model=TrajectoryPage)
    def one_trajectory(
        run: RunKey, step: Step, sample: str, rollout: int, validation: Validation = False
    ) -> TrajectoryPage:
        """A trajectory without its tokens."""
        address = TrajectoryAddress(step=step, validation=validation, sample=sample, rollout=rollout)
        return trajectory_page(reader, runs.find(run), address)

    @router.get("/api/tokens", response_model=TokensPage)
    def tokens(
        run: RunKey,
        step: Step,
        sample: str,
        rollout: int,
        validation: Validation = False,
        row: Annotated[int, Query(ge=0)] = 0,
        offset: Offset = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_TOKENS)] = MOST_TOKENS,
        place: Annotated[
            int | None, Query(ge=0, description="A token of the response: `offset` becomes that of its page.")
        ] = None,
        rank: Annotated[Rank, Query(description="What ranks the tokens of the whole row.")] = "logprob",
    ) -> TokensPage:
        """Tokens of a row of a trajectory, its prompt first."""
        address = TrajectoryAddress(step=step, validation=validation, sample=sample, rollout=rollout)
        return tokens_page(reader, runs.find(run), tokenizers, address, row, offset, limit, place, rank)

    @router.get("/api/spans", response_model=SpansPage)
    def trace_spans(
        run: RunKey,
        trace: Annotated[str, Query(pattern="^[0-9a-f]{32}$")],
        span: Annotated[str, Query(pattern="^([0-9a-f]{16})?$", description="The first one, in a step's trace.")] = "",
    ) -> SpansPage:
        """The spans of a trajectory's trace, from the run's MLflow server."""
        return spans_page(runs.find(run), trace, span)

    @router.get("/api/search", response_model=SearchPage)
    def found(
        run: RunKey,
        text: Annotated[str, Query(max_length=1000)] = "",
        regex: Annotated[bool, Query(description="Whether the text is a regular expression.")] = False,
        tool: str = "",
        error: str = "",
        message: Annotated[str, Query(max_length=300, description="Of a group of failures, with N for numbers.")] = "",
        incident: str = "",
        service: Annotated[str, Query(max_length=100, description="With `incident`: the one that was called.")] = "",
        stop_reason: str = "",
        least: float | None = None,
        most: float | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
        validation: bool | None = None,
        tool_right: Annotated[bool, Query(description="Whether a tool gave the right result.")] = False,
        span: Annotated[str, Query(max_length=300, description="Name of a span, where * matches any text.")] = "",
        limit: Annotated[int, Query(ge=1, le=MOST_HITS)] = 50,
        cursor: Annotated[str | None, Query(max_length=40)] = None,
    ) -> SearchPage:
        """Trajectories that match everything given, the newest step first. `cursor` selects the next page."""
        query = SearchQuery(
            text=text,
            is_regex=regex and bool(text),
            tool=tool,
            error=error,
            message=message,
            incident=incident,
            service=service,
            tool_was_right=tool_right,
            stop_reason=stop_reason,
            least=least,
            most=most,
            first_step=first_step,
            last_step=last_step,
            validation=validation,
            traces=traces_with(runs.find(run), span) if span else None,
        )
        page = search(reader, runs.find(run), query, limit, cursor)
        if query.traces is not None and len(query.traces) >= MOST_TRACES and cursor is None:
            page.unreadable.append(f"searched the newest {len(query.traces)} traces with such a span, not the others")
        return page

    @router.get("/api/prompt", response_model=PromptPage)
    def one_prompt(run: RunKey, sample: str, validation: Validation = False) -> PromptPage:
        """The rollouts of one sample in all steps. With `files_left`, as far as half a second reads."""
        return prompt_page(reader, results, runs.find(run), sample, validation)

    @router.get("/api/evaluations", response_model=EvaluationsPage)
    def evaluations(
        run: RunKey, offset: Offset = 0, limit: Annotated[int, Query(ge=1, le=MOST_TASKS)] = 200
    ) -> EvaluationsPage:
        """An evaluation beside others of the same rows, row by row, the hardest rows first."""
        return evaluations_page(reader, runs, run, offset, limit)

    @router.get("/api/failures", response_model=FailuresPage)
    def failures(run: RunKey) -> FailuresPage:
        """Failures by cause, the most frequent first. With `files_left`, as far as half a second reads."""
        return failures_page(reader, results, runs.find(run))

    @router.get("/api/export", response_class=StreamingResponse)
    def export(
        run: RunKey,
        step: Step,
        format: Literal["csv", "jsonl"],
        validation: Validation = False,
        sample: Annotated[str | None, Query(description="Index of a prompt, with `format=jsonl`.")] = None,
        rollout: Annotated[int | None, Query(description="Number of a rollout, with `format=jsonl`.")] = None,
    ) -> Response:
        """The rollouts of a step: CSV of their numbers, or JSONL of whole trajectories, for all prompts or one."""
        folder = runs.find(run)
        lines = (
            as_csv(reader, folder, step, validation)
            if format == "csv"
            else as_jsonl(reader, folder, step, validation, sample, rollout)
        )
        kind = "text/csv" if format == "csv" else "application/jsonl"
        first = next(lines, "")  # an unreadable file is an error and not a short one
        return StreamingResponse(chain((first,), lines), media_type=kind)

    return router


def _page_visitor(method: str, path: str, headers: RawHeaders) -> Caller | None:
    """The page itself has no data of runs, and a browser sends no token for it."""
    return Caller("page", frozenset()) if method in ("GET", "HEAD") and _is_page(path) else None


def _is_page(path: str) -> bool:
    return path == "/" or path.startswith("/page/")


class _PageHeaders:
    """Headers of the page's own files: no script but its own, nothing of another host, never a stale copy."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_page(scope["path"].removeprefix(scope.get("root_path", ""))):
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["content-security-policy"] = _POLICY
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "no-referrer"
                headers["cache-control"] = "no-cache"
            await send(message)

        await self.app(scope, receive, with_headers)
