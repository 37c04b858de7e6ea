"""Prometheus gauges of each active run, or else the most recent one: state and key metrics of the newest step."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

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
    """Gauges of the runs that `shown` returns, a bounded number. It returns none before the first run."""

    def __init__(self, shown: Callable[[], Sequence[RunInfo]]) -> None:
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        """The gauges, in Prometheus's form."""
        infos = self._shown()
        if not infos:
            return
        labels = ["run", "state", "policy"]
        state = GaugeMetricFamily("trackway_run_state", "1 for a run's current state and its policy", labels=labels)
        for info in infos:
            state.add_metric([info.run, info.state.value, info.policy or ""], 1.0)
        yield state
        yield _gauge("step", "Last finished step", {info.run: info.step for info in infos})
        yield _gauge("total_steps", "Steps of the whole run", {info.run: info.total_steps for info in infos})
        yield _gauge("restarts", "Automatic restarts of the run", {info.run: info.restarts for info in infos})
        for name, (key, description) in OF_A_STEP.items():
            values = {info.run: info.metrics[key] for info in infos if key in info.metrics}
            if values:
                yield _gauge(name, description, values)
        yield _accuracy(infos)
        if any(info.tracking for info in infos):
            yield from _tracking(infos)


def _gauge(name: str, description: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"trackway_run_{name}", description, labels=["run"])
    for run, value in values.items():
        family.add_metric([run], value)
    return family


def _accuracy(infos: Sequence[RunInfo]) -> Metric:
    name, description = "trackway_run_accuracy", "Mean accuracy of the newest validation"
    family = GaugeMetricFamily(name, description, labels=["run", "data_source"])
    for info in infos:
        for key, value in info.metrics.items():
            if match := _ACCURACY.fullmatch(key):
                family.add_metric([info.run, match[1]], value)
    return family


def _tracking(infos: Sequence[RunInfo]) -> Iterator[Metric]:
    labels = ["run", "backend"]
    rows = GaugeMetricFamily("trackway_run_rows_waiting", "Rows of metrics that wait on disk", labels=labels)
    feedback = GaugeMetricFamily("trackway_run_feedback_waiting", "Feedback values that wait on disk", labels=labels)
    lost = GaugeMetricFamily(
        "trackway_run_tracking_lost", "Values of metrics and feedback that a backend will never get", labels=labels
    )
    for info in infos:
        for summary in info.tracking:
            label_values = [info.run, summary.backend]
            rows.add_metric(label_values, summary.rows_waiting)
            feedback.add_metric(label_values, summary.feedback_waiting)
            lost.add_metric(label_values, summary.lost)
    yield from (rows, feedback, lost)
