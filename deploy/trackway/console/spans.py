"""The spans of traced trajectories, asked of the MLflow server that the run names."""

import base64
import os
from collections.abc import Mapping
from typing import Any

import httpx

from trackway.console.replies import SpanBar, SpansPage
from trackway.tracing import attributes as names
from trackway.tracing import conventions
from trackway.tracing.export.mlflow import condition, credentials, mlflow_http
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError

TIMEOUT_S = 10.0
MOST_SPANS = 500
MOST_TRACES = 5000


def spans_page(folder: RunFolder, trace_id: str) -> SpansPage:
    """The spans in the order of their starts, each with its depth.

    Raises TrackwayError: NOT_FOUND without an MLflow server or the trace, UNAVAILABLE when MLflow does not answer.
    """
    traces = _asked(folder, "GET", "batchGet", params={"trace_ids": f"tr-{trace_id}"}).get("traces", [])
    spans: list[Mapping[str, Any]] = traces[0].get("spans", []) if traces else []
    if not spans:
        message = f"expected trace {trace_id} in MLflow at {folder.info().mlflow_uri}, got none; was it deleted?"
        raise TrackwayError(ErrorCode.NOT_FOUND, message)
    return _page(spans)


def traces_with(folder: RunFolder, span: str) -> list[str]:
    """Return the ids of the traces with a span of this name, where `*` matches any text: the newest MOST_TRACES.

    Raises TrackwayError: as `spans_page`, and INVALID_REQUEST for a name that MLflow cannot search for.
    """
    place = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": folder.info().experiment_id}}
    try:
        body: dict[str, Any] = {"locations": [place], "max_results": 500, "filter": condition("span.name", span)}
    except ValueError as error:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"span: {error}") from error
    found: list[str] = []
    while len(found) < MOST_TRACES:
        reply = _asked(folder, "POST", "search", json=body)
        found += [trace["trace_id"].removeprefix("tr-") for trace in reply.get("traces", [])]
        if not (token := reply.get("next_page_token")):
            break
        body["page_token"] = token
    return found


def _asked(folder: RunFolder, method: str, call: str, **content: Any) -> dict[str, Any]:
    uri = folder.info().mlflow_uri or ""
    if not uri.startswith(("http://", "https://")):
        raise TrackwayError(ErrorCode.NOT_FOUND, f"expected an MLflow server of run {folder.name}, got {uri or 'none'}")
    # The address is from a file of the run, which may be another's: the password is for ours alone.
    headers = credentials() if uri == os.environ.get("MLFLOW_TRACKING_URI") else {}
    url = f"{uri.rstrip('/')}/api/3.0/mlflow/traces/{call}"
    try:
        with mlflow_http(uri, TIMEOUT_S) as http:
            return http.request(method, url, headers=headers, **content).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        got = error or type(error).__name__
        message = f"expected an answer of MLflow at {uri}, got {got}; start its server with `trackway ui`"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error


def _page(spans: list[Mapping[str, Any]]) -> SpansPage:
    ordered = sorted(spans, key=lambda span: int(span["start_time_unix_nano"]))
    start = int(ordered[0]["start_time_unix_nano"])
    parents = {_hex(span["span_id"]): _hex(span.get("parent_span_id")) for span in spans}

    def depth(span_id: str) -> int:
        found = 0
        while (span_id := parents.get(span_id, "")) and found < MOST_SPANS:
            found += 1
        return found

    bars = [
        SpanBar(
            name=span["name"],
            **_facts(span),
            depth=depth(_hex(span["span_id"])),
            start=(int(span["start_time_unix_nano"]) - start) / 1e9,
            seconds=(int(end) - int(span["start_time_unix_nano"])) / 1e9
            if (end := span.get("end_time_unix_nano"))
            else None,
            error=span.get("status", {}).get("message", "")
            if span.get("status", {}).get("code") == "STATUS_CODE_ERROR"
            else "",
        )
        for span in ordered[:MOST_SPANS]
    ]
    return SpansPage(spans=bars, total=len(spans))


def _facts(span: Mapping[str, Any]) -> dict[str, str]:
    values = {pair["key"]: next(iter(pair.get("value", {}).values()), None) for pair in span.get("attributes", [])}
    known = conventions.as_our_own(values)
    prompt, written = known.get(names.INPUT_TOKENS), known.get(names.OUTPUT_TOKENS)
    tokens = None if prompt is None or written is None else f"{prompt} → {written} tokens"
    facts = (str(fact) for fact in (known.get(names.MODEL), known.get(names.TOOL_NAME), tokens) if fact)
    return {
        "service": str(values.get(names.SERVICE, "")),
        "kind": conventions.work_of(values),
        "about": ", ".join(fact for fact in facts if fact not in span["name"]),
    }


def _hex(id_base64: str | None) -> str:
    return base64.b64decode(id_base64).hex() if id_base64 else ""
