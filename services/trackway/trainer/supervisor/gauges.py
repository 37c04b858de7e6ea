"""Prometheus gauges of the active or most recent run: its state and key metrics of its newest step."""

import re
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trackway.wire.trainer import RunInfo

OF_A_STEP = {
    "reward": ("critic/rewards/mean", "Mean reward of the newest step"),
    "score": ("critic/score/mean", "Mean score of the newest step"),
    "response_tokens": ("response_length/mean", "Mean tokens of a response of the newest step"),
    "step_seconds": ("timing_s/step", "Seconds of the newest step"),
    "tokens_per_second_per_gpu": ("perf/throughput", "Prompt and response tokens per second and GPU, newest step"),
    "failed_trajectories": ("training/rollout_failure/failed_trajectories", "Failed trajectories of the newest step"),
}
"""Gauge name after `trackway_run_` -> the step's metric and the gauge's description."""
_ACCURACY = re.compile("val-core/(.+)/acc/mean@[0-9]+")


class RunGauges(Collector):
    """Gauges of the run that `newest` returns. It returns None before the first run."""

    def __init__(self, newest: Callable[[], RunInfo | None]) -> None:
        self._newest = newest

    def collect(self) -> Iterator[Metric]:
        """The gauges, in Prometheus's form."""
        info = self._newest()
        if info is None:
            return
        state = GaugeMetricFamily("trackway_run_state", "1 for the run's current state", labels=["run", "state"])
        state.add_metric([info.run, info.state.value], 1.0)
        yield state
        yield _gauge(info, "step", "Last finished step", info.step)
        yield _gauge(info, "total_steps", "Steps of the whole run", info.total_steps)
        yield _gauge(info, "restarts", "Automatic restarts of the run", info.restarts)
        for name, (key, description) in OF_A_STEP.items():
            if key in info.metrics:
                yield _gauge(info, name, description, info.metrics[key])
        yield _accuracy(info)
        if info.tracking:
            yield from _tracking(info)


def _gauge(info: RunInfo, name: str, description: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"trackway_run_{name}", description, labels=["run"])
    family.add_metric([info.run], value)
    return family


def _accuracy(info: RunInfo) -> Metric:
    name, description = "trackway_run_accuracy", "Mean accuracy of the newest validation"
    family = GaugeMetricFamily(name, description, labels=["run", "data_source"])
    for key, value in info.metrics.items():
        if match := _ACCURACY.fullmatch(key):
            family.add_metric([info.run, match[1]], value)
    return family


def _tracking(info: RunInfo) -> Iterator[Metric]:
    labels = ["run", "backend"]
    rows = GaugeMetricFamily("trackway_run_rows_waiting", "Rows of metrics that wait on disk", labels=labels)
    feedback = GaugeMetricFamily("trackway_run_feedback_waiting", "Feedback values that wait on disk", labels=labels)
    lost = GaugeMetricFamily(
        "trackway_run_tracking_lost", "Values of metrics and feedback that a backend will never get", labels=labels
    )
    for summary in info.tracking:
        label_values = [info.run, summary.backend]
        rows.add_metric(label_values, summary.rows_waiting)
        feedback.add_metric(label_values, summary.feedback_waiting)
        lost.add_metric(label_values, summary.lost)
    yield from (rows, feedback, lost)
