"""The spans of a traced trajectory, asked of the MLflow server that the run names."""

import base64
import os
from collections.abc import Mapping
from typing import Any

import httpx

from trackway.console.replies import SpanBar, SpansPage
from trackway.tracing import attributes as names
from trackway.tracing import conventions
from trackway.tracing.export.mlflow import credentials, mlflow_http
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError

TIMEOUT_S = 10.0
MOST_SPANS = 500


def spans_page(folder: RunFolder, trace_id: str) -> SpansPage:
    """The spans in the order of their starts, each with its depth.

    Raises TrackwayError: NOT_FOUND without an MLflow server or the trace, UNAVAILABLE when MLflow does not answer.
    """
    uri = folder.info().mlflow_uri or ""
    if not uri.startswith(("http://", "https://")):
        raise TrackwayError(ErrorCode.NOT_FOUND, f"expected an MLflow server of run {folder.name}, got {uri or 'none'}")
    try:
        with mlflow_http(uri, TIMEOUT_S) as http:
            parameters = {"trace_ids": f"tr-{trace_id}"}
            url = f"{uri.rstrip('/')}/api/3.0/mlflow/traces/batchGet"
            # The address is from a file of the run, which may be another's: the password is for ours alone.
            headers = credentials() if uri == os.environ.get("MLFLOW_TRACKING_URI") else {}
            reply = http.get(url, params=parameters, headers=headers)
        reply.raise_for_status()
        traces = reply.json().get("traces", [])
    except (httpx.HTTPError, ValueError) as error:
        got = error or type(error).__name__
        message = f"expected the trace from MLflow at {uri}, got {got}; start its server with `trackway ui`"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
    spans: list[Mapping[str, Any]] = traces[0].get("spans", []) if traces else []
    if not spans:
        raise TrackwayError(
            ErrorCode.NOT_FOUND, f"expected trace {trace_id} in MLflow at {uri}, got none; was it deleted?"
        )
    return _page(spans)


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
