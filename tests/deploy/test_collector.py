"""The collector's configuration, held without a collector: what refers to what, what is bounded, what is secret.

`SETTINGS` lists what the file may set, as named by v0.159.0 of opentelemetry-collector (READMEs and config.schema.yaml
of otlpreceiver, memorylimiterprocessor, otlphttpexporter, exporterhelper, confighttp; service telemetry) and by the
READMEs of opentelemetry-collector-contrib (headerssetterextension, filestorage, healthcheckextension).
"""

import gzip
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from mlflow import MlflowClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from trackway.tracing import attributes as names

FILE = Path(__file__).parents[2] / "deploy" / "otel" / "collector.yaml"
TEXT = FILE.read_text()
MOST_ROOTS_THAT_MLFLOW_LINKS = 100

KINDS = ("extensions", "receivers", "processors", "exporters")
SETTINGS = {
    "health_check": "endpoint",
    "file_storage": """directory create_directory fsync
        compaction.directory compaction.on_start compaction.on_rebound compaction.cleanup_on_start""",
    "headers_setter": "headers.action headers.key headers.from_context headers.default_value",
    "otlp": "protocols.http.endpoint protocols.http.include_metadata protocols.http.max_request_body_size",
    "memory_limiter": "check_interval limit_percentage spike_limit_percentage",
    "otlp_http": """traces_endpoint timeout headers.wandb-api-key auth.authenticator
        retry_on_failure.enabled retry_on_failure.initial_interval retry_on_failure.max_interval
        retry_on_failure.max_elapsed_time sending_queue.enabled sending_queue.storage sending_queue.sizer
        sending_queue.queue_size sending_queue.num_consumers sending_queue.batch.sizer
        sending_queue.batch.flush_timeout sending_queue.batch.min_size sending_queue.batch.max_size
        sending_queue.batch.partition.metadata_keys""",
    "service": """extensions pipelines.traces.receivers pipelines.traces.processors pipelines.traces.exporters
        telemetry.metrics.level telemetry.metrics.readers.pull.exporter.prometheus.host
        telemetry.metrics.readers.pull.exporter.prometheus.port""",
}
Config = dict[str, Any]


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every setting with its dotted path; items of a list share the list's path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from leaves(item, path)
    else:
        yield path, value


def components(config: Config) -> Iterator[tuple[str, Config]]:
    yield from ((name, component) for kind in KINDS for name, component in config[kind].items())
    yield "service", config["service"]


def unknown_settings(config: Config) -> Iterator[str]:
    yield from (f"unknown section {name}" for name in config.keys() - {*KINDS, "service"})
    for name, component in components(config):
        known = SETTINGS.get(name.partition("/")[0], "").split()
        yield from (f"unknown setting {name}: {path}" for path, _ in leaves(component) if path not in known)


def broken_references(config: Config) -> Iterator[str]:
    pipelines = config["service"]["pipelines"].values()
    for kind in KINDS[1:]:
        used = {name for pipeline in pipelines for name in pipeline.get(kind, [])}
        yield from (f"{kind}: {name} is used or defined, not both" for name in used ^ config[kind].keys())
    enabled = set(config["service"]["extensions"])
    yield from (f"extension {name} is enabled or defined, not both" for name in enabled ^ config["extensions"].keys())
    for name, exporter in config["exporters"].items():
        wanted = {exporter.get("auth", {}).get("authenticator"), exporter.get("sending_queue", {}).get("storage")}
        yield from (f"{name} needs extension {extension}, which is not enabled" for extension in wanted - enabled)


def losses(config: Config) -> Iterator[str]:
    """Ways for spans to get lost or to fill a disk or the memory."""
    if config["service"]["pipelines"]["traces"]["processors"] != ["memory_limiter"]:
        yield "expected the memory limiter alone between receiver and exporters"
    for name, exporter in config["exporters"].items():
        queue, retry = exporter.get("sending_queue", {}), exporter.get("retry_on_failure", {})
        if not (queue.get("enabled") and queue.get("storage") == "file_storage"):
            yield f"{name} has no queue on disk"
        if queue.get("sizer") != "bytes" or not 0 < queue.get("queue_size", 0) <= 4 * 1024**3:
            yield f"{name}: the queue is not bounded in bytes"
        if not (retry.get("enabled") and retry.get("max_elapsed_time") == "0s"):
            yield f"{name} gives up"
        batch = queue.get("batch", {})
        if not 0 < batch.get("min_size", 0) <= batch.get("max_size", 0):
            yield f"{name}: batches have no bound"
    if config["exporters"]["otlp_http/mlflow"]["sending_queue"]["batch"]["max_size"] > MOST_ROOTS_THAT_MLFLOW_LINKS:
        yield "MLflow would link no trace of a full batch"


def lost_headers(config: Config) -> Iterator[str]:
    """A header arrives only if receiver, batcher and headers_setter all know it."""
    if config["receivers"]["otlp"]["protocols"]["http"].get("include_metadata") is not True:
        yield "the receiver drops the headers of requests"
    ours = {
        "otlp_http/mlflow": {names.MLFLOW_EXPERIMENT_HEADER, names.MLFLOW_RUN_HEADER},
        "otlp_http/weave": {names.WEAVE_PROJECT_HEADER},
    }
    for name, headers in ours.items():
        exporter = config["exporters"].get(name, {})
        setter = config["extensions"].get(exporter.get("auth", {}).get("authenticator"), {"headers": []})
        kept = set(exporter.get("sending_queue", {}).get("batch", {}).get("partition", {}).get("metadata_keys", []))
        forwarded = {header["key"] for header in setter["headers"] if header["key"] == header["from_context"]}
        if not headers == kept == forwarded:
            yield f"{name}: expected headers {sorted(headers)}, got batches by {sorted(kept)}, sent {sorted(forwarded)}"
    if names.WEAVE_KEY_HEADER not in config["exporters"]["otlp_http/weave"].get("headers", {}):
        yield f"Weave gets no {names.WEAVE_KEY_HEADER}"


def environment(text: str, config: Config) -> Iterator[str]:
    """The head names each variable that the settings read, with its default, and no other."""
    head = text[: text.index("\nextensions:")]
    documented = dict(re.findall(r"^#   ([A-Z][A-Z_]+)\b(.*)$", head, re.MULTILINE))
    read = re.findall(r"\$\{env:([A-Z_]+)(?::-([^}]*))?\}", yaml.safe_dump(config, width=1000))
    yield from (f"{name} is read or documented, not both" for name in documented.keys() ^ {name for name, _ in read})
    yield from (
        f"{name}: the head does not say {value}" for name, value in read if value not in documented.get(name, "")
    )
    if "$" in re.sub(r"\$\{env:[A-Z_]+(:-[^}]*)?\}", "", yaml.safe_dump(config, width=1000)):
        yield "a reference that is not ${env:NAME} or ${env:NAME:-default}"


def secrets(config: Config) -> Iterator[str]:
    for path, value in leaves(config):
        named_so = re.search(r"(api[-_]key|token|secret|password|authorization)$", path, re.IGNORECASE)
        looks_so = re.search(r"[A-Za-z0-9_-]{32,}", re.sub(r"\$\{env:[A-Z_]+(:-[^}]*)?\}", "", str(value)))
        if looks_so or (named_so and not re.fullmatch(r"\$\{env:[A-Z_]+\}", str(value))):
            yield f"{path} holds a secret"


def problems(text: str) -> list[str]:
    config: Config = yaml.safe_load(text)
    found = [*unknown_settings(config), *broken_references(config), *losses(config), *lost_headers(config)]
    return [*found, *environment(text, config), *secrets(config)]


def test_the_shipped_file_has_no_problem() -> None:
    assert problems(TEXT) == []


def test_the_head_says_that_it_was_not_run_and_which_version_it_needs() -> None:
    head = TEXT[: TEXT.index("\nextensions:")]
    assert "NOT RUN" in head
    assert "otelcol-contrib >= 0.148.0" in head


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "exporters: [otlp_http/mlflow, otlp_http/weave]",
            "exporters: [otlp_http/mlflow, otlp_http/wave]",
            "wave is used",
        ),
        ("exporters: [otlp_http/mlflow, otlp_http/weave]", "exporters: [otlp_http/mlflow]", "weave is used or defined"),
        (
            "\n  headers_setter/weave:",
            "\n  headers_setter/wandb:",
            "extension headers_setter/wandb is enabled or defined",
        ),
        ("extensions: [health_check, file_storage,", "extensions: [health_check,", "needs extension file_storage"),
        (
            "auth: {authenticator: headers_setter/weave}",
            "auth: {authenticator: headers_setter}",
            "needs extension headers",
        ),
        ("processors: [memory_limiter]", "processors: []", "expected the memory limiter"),
        ("include_metadata: true", "include_metadata: false", "receiver drops the headers"),
        ("[x-mlflow-experiment-id, x-mlflow-run-id]", "[x-mlflow-experiment-id]", "batches by"),
        ("from_context: project_id", "from_context: project-id", "otlp_http/weave: expected headers"),
        ("headers: {wandb-api-key", "headers: {wandb-key", "Weave gets no wandb-api-key"),
        ('"${env:WANDB_API_KEY}"', '"0123456789abcdef"', "wandb-api-key holds a secret"),
        ('"${env:WANDB_API_KEY}"', '"${env:WANDB_API_KEY:-none}"', "wandb-api-key holds a secret"),
        ("${env:WANDB_ENTITY}/${env:WANDB_PROJECT}", "0123456789abcdef" * 2, "default_value holds a secret"),
        ("#   WANDB_ENTITY ", "#   (a line less) ", "WANDB_ENTITY is read or documented"),
        ("EXPERIMENT_ID:-0}", "EXPERIMENT_ID:-7}", "MLFLOW_EXPERIMENT_ID: the head does not say 7"),
        ("${env:WANDB_ENTITY}/", "$WANDB_ENTITY/", "a reference that is not"),
        ("    timeout: 60s", "    time_out: 60s", "unknown setting otlp_http/mlflow: time_out"),
        ("    fsync: true", "    f_sync: true", "unknown setting file_storage: f_sync"),
        ("\nservice:", "\nconnectors: {}\nservice:", "unknown section connectors"),
        ("max_size: 100", "max_size: 512", "link no trace"),
    ],
)
def test_a_mistake_in_the_file_is_found(old: str, new: str, problem: str) -> None:
    assert old in TEXT
    assert any(problem in message for message in problems(TEXT.replace(old, new, 1)))


@pytest.mark.parametrize("exporter", ["mlflow", "weave"])
@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("storage: file_storage", "storage: null", "has no queue on disk"),
        ("queue_size: 2147483648", "queue_size: 0", "not bounded in bytes"),
        ("sizer: bytes", "sizer: requests", "not bounded in bytes"),
        ("max_elapsed_time: 0s", "max_elapsed_time: 300s", "gives up"),
        ("enabled: true, initial", "enabled: false, initial", "gives up"),
        ("max_size:", "max_size: 0 #", "batches have no bound"),
    ],
)
def test_an_exporter_that_could_lose_spans_is_found(exporter: str, old: str, new: str, problem: str) -> None:
    before, name, after = TEXT.partition(f"  otlp_http/{exporter}:\n")
    assert old in after
    found = problems(before + name + after.replace(old, new, 1))
    assert any(message.startswith(f"otlp_http/{exporter}") and problem in message for message in found)


class Exported:
    """Roots sent to a real MLflow in one request, with the headers that headers_setter makes."""

    def __init__(self, uri: str, headers: dict[str, str], roots: int) -> None:
        request = ExportTraceServiceRequest()
        spans = request.resource_spans.add().scope_spans.add().spans
        now = time.time_ns()
        for _ in range(roots):
            ids = {"trace_id": os.urandom(16), "span_id": os.urandom(8)}
            spans.add(**ids, name="trajectory", start_time_unix_nano=now - 1000, end_time_unix_nano=now)
        content = {"content-type": "application/x-protobuf", "content-encoding": "gzip"}
        body = gzip.compress(request.SerializeToString())
        self.answer = httpx.post(f"{uri}/v1/traces", content=body, headers={**content, **headers}, timeout=60)
        self.trace_ids = {f"tr-{span.trace_id.hex()}" for span in spans}


@pytest.mark.slow
def test_mlflow_links_every_root_of_the_largest_batch_to_its_run(mlflow_server: str) -> None:
    queue = yaml.safe_load(TEXT)["exporters"]["otlp_http/mlflow"]["sending_queue"]
    client = MlflowClient(tracking_uri=mlflow_server)
    experiment = client.create_experiment(f"collector-{os.urandom(4).hex()}")
    run = client.create_run(experiment).info.run_id
    headers = {names.MLFLOW_EXPERIMENT_HEADER: experiment, names.MLFLOW_RUN_HEADER: run}
    exported = Exported(mlflow_server, headers, queue["batch"]["max_size"])
    found = client.search_traces(locations=[experiment], run_id=run, max_results=500, include_spans=False)
    assert exported.answer.status_code == 200
    assert {trace.info.trace_id for trace in found} == exported.trace_ids


@pytest.mark.slow
def test_mlflow_takes_a_request_that_named_neither_experiment_nor_run(mlflow_server: str) -> None:
    setter = yaml.safe_load(TEXT)["extensions"]["headers_setter/mlflow"]["headers"]
    headers = {
        header["key"]: re.sub(r"\$\{env:[A-Z_]+:-(.*)\}", r"\1", header.get("default_value", "")) for header in setter
    }
    exported = Exported(mlflow_server, headers, 1)
    info = MlflowClient(tracking_uri=mlflow_server).get_trace(exported.trace_ids.pop()).info
    assert exported.answer.status_code == 200
    assert info.experiment_id == "0"
