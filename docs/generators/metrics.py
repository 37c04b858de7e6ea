"""The page of the services' Prometheus metrics."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from generators.apps import service_apps
from generators.markdown import breakable, code, page, table
from trackway.deploy.serve.fan_out import merged
from trackway.serving.metrics import Collectors, ServiceMetrics
from trackway.trainer.supervisor.gauges import OF_A_STEP, RunGauges
from trackway.wire.trainer import BackendSummary, RunInfo, RunState

EXAMPLE = RunInfo(
    run="a",
    state=RunState.RUNNING,
    metrics={"val-core/a/acc/mean@1": 0.0, **{key: 0.0 for key, _ in OF_A_STEP.values()}},
    tracking=[BackendSummary(backend="mlflow")],
)
"""A run with every value that the trainer's gauges show."""


class Row(NamedTuple):
    """One metric of `/metrics`."""

    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str


def metrics_page() -> str:
    """Every metric of `/metrics` with its type, its labels and its meaning."""
    by_service = {service: metrics_of(app.state.metrics) for service, app in service_apps().items()}
    by_service["trainer"] += rows(RunGauges(lambda: [EXAMPLE]).collect())
    shared = [row for row in by_service["reward"] if all(row in others for others in by_service.values())]
    return page(
        "Metrics",
        "`GET /<service>/metrics` is one replica in Prometheus' text format, `GET /<service>/replicas/metrics` every "
        "replica of the service with the label `replica`. The metrics of a training step, in verl's names, go to the "
        "run's loggers instead.",
        "## Every service",
        _table(shared),
        *(
            f"## {service.capitalize()} service\n\n{_table(row for row in found if row not in shared)}"
            for service, found in by_service.items()
            if service != "reward"
        ),
        "## Only under `/replicas/metrics`",
        _table(rows(text_string_to_metric_families(merged({}, asked=0)))),
    )


def metrics_of(metrics: ServiceMetrics) -> list[Row]:
    """The metrics of a service's process."""
    return sorted(row for collector in _flat(metrics.collectors) for row in rows(collector.collect(), collector))


def _flat(collectors: Iterable[Collector]) -> Iterator[Collector]:
    for collector in collectors:
        yield from _flat(collector.collectors) if isinstance(collector, Collectors) else [collector]


def rows(families: Iterable[Metric], collector: Collector | None = None) -> list[Row]:
    """One row for each family, by its name in Prometheus' text; `collector` is the one that made them."""
    return sorted(
        Row(_name(family), family.type, _labels(family, collector), family.documentation)
        for family in families
        if family.name.startswith(("trackway_", "gen_ai_"))
    )


def _name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labels(family: Metric, collector: Collector | None) -> tuple[str, ...]:
    """The labels that a family or its collector declares, and those of its samples, but for a histogram's bounds."""
    # Without samples, only these attributes know the labels.
    declared = {*getattr(family, "_labelnames", ()), *getattr(collector, "_labelnames", ())}
    used = {label for sample in family.samples for label in sample.labels}
    return tuple(sorted((declared | used) - {"le"}))


def _table(found: Iterable[Row]) -> str:
    cells = [(breakable(row.name), row.type, ", ".join(map(code, row.labels)), row.meaning) for row in found]
    return table(("Metric", "Type", "Labels", "Meaning"), cells)
