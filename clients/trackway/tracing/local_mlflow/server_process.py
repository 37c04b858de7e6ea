"""Runs `mlflow server` for a local database: `python -P server_process.py server --port 5000 ...`.

Three things differ from MLflow's own command:

* The web server runs in this process. MLflow starts it as a child and waits, so that all of MLflow is imported twice.
* Spans of a trace that arrive in several requests are stored in one transaction where possible. MLflow does most of its
  work once per trace and transaction, and each service sends its spans of a trajectory in requests of its own.
* `POST /api/3.0/trackway/assessments` records many assessments in one transaction. MLflow's route takes one.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import uvicorn  # before MLflow, which checks hosts and origins only in a process that has a web server
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from mlflow import server
from mlflow.cli import cli

from trackway.tracing.local_mlflow.gathered_spans import GatheredSpans, Spans

ASSESSMENTS = "/api/3.0/trackway/assessments"

logger = logging.getLogger("trackway.tracing")


def extend(app: FastAPI) -> None:
    """Let MLflow's application gather spans, and take assessments in batches."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    gathered: dict[int, GatheredSpans] = {}

    async def log_spans_async(store: SqlAlchemyStore, location: str, spans: Spans) -> Spans:
        return await gathered.setdefault(id(store), GatheredSpans(store.log_spans)).log(location, spans)

    SqlAlchemyStore.log_spans_async = log_spans_async  # pyright: ignore[reportAttributeAccessIssue]
    # Before MLflow's own routes, the last of which takes every path.
    app.router.routes.insert(0, APIRoute(ASSESSMENTS, _record_assessments, methods=["POST"]))


async def _record_assessments(request: Request) -> JSONResponse:
    """Record `assessments`, each as in MLflow's own route. Answers with the ids of traces that are `missing`."""
    from mlflow.exceptions import MlflowException

    try:
        missing = await asyncio.to_thread(_record, (await request.json())["assessments"])
    except MlflowException as error:
        return JSONResponse({"error": error.error_code, "message": error.message}, error.get_http_status_code())
    except Exception:
        logger.exception("assessments cannot be recorded together")  # the sender then takes MLflow's own route
        return JSONResponse({"message": "see the server's log"}, HTTPStatus.NOT_IMPLEMENTED)
    return JSONResponse({"missing": missing})


def _record(assessments: Sequence[dict[str, Any]]) -> list[str]:
    from mlflow.entities import Assessment
    from mlflow.server.handlers import _get_tracking_store  # pyright: ignore[reportPrivateUsage]
    from mlflow.store.tracking.dbmodels.models import SqlAssessments, SqlTraceInfo
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = _get_tracking_store()
    assert isinstance(store, SqlAlchemyStore)
    wanted = {str(fields["trace_id"]) for fields in assessments}
    rows = [SqlAssessments.from_mlflow_entity(Assessment.from_dictionary(fields)) for fields in assessments]
    with store.ManagedSessionMaker(read_only=False) as session:
        traces = {
            trace_id: (experiment_id, timestamp_ms)
            for trace_id, experiment_id, timestamp_ms in session.query(
                SqlTraceInfo.request_id, SqlTraceInfo.experiment_id, SqlTraceInfo.timestamp_ms
            ).filter(SqlTraceInfo.request_id.in_(wanted))
        }
        ids = SqlAssessments.assessment_id
        known = {known for (known,) in session.query(ids).filter(ids.in_([row.assessment_id for row in rows]))}
        for row in rows:
            if row.trace_id in traces and row.assessment_id not in known:
                row.experiment_id, row.trace_timestamp_ms = traces[row.trace_id]
                session.add(row)
    return sorted(wanted - traces.keys())


def _serve(command: Sequence[str], extra_env: Mapping[str, str], **options: object) -> None:
    """Run `python -m uvicorn ...` here instead of in a child. Exits once the server has stopped."""
    os.environ.update(extra_env)
    from mlflow.server.fastapi_app import app

    extend(app)
    uvicorn.main(command[command.index("uvicorn") + 1 :])


if __name__ == "__main__":
    server._exec_cmd = _serve  # pyright: ignore[reportPrivateImportUsage]
    cli()
