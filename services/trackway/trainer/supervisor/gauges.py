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
OF_TRACKING = {
    "rows_waiting": ("rows_waiting", "Rows of metrics that wait on disk"),
    "feedback_waiting": ("feedback_waiting", "Feedback values that wait on disk"),
    "tracking_lost": ("lost", "Values of metrics and feedback that a backend will never get"),
}
"""Gauge name after `trackway_run_` -> the field of a backend's summary and the gauge's description."""
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
        states = {(info.run, info.state.value, info.policy or ""): 1.0 for info in infos}
        yield _gauge("state", "1 for a run's current state and its policy", states, "state", "policy")
        yield _gauge("step", "Last finished step", {(info.run,): info.step for info in infos})
        yield _gauge("total_steps", "Steps of the whole run", {(info.run,): info.total_steps for info in infos})
        yield _gauge("restarts", "Automatic restarts of the run", {(info.run,): info.restarts for info in infos})
        for name, (key, description) in OF_A_STEP.items():
            values = {(info.run,): info.metrics[key] for info in infos if key in info.metrics}
            if values:
                yield _gauge(name, description, values)
        accuracies = {
            (info.run, match[1]): value
            for info in infos
            for key, value in info.metrics.items()
            if (match := _ACCURACY.fullmatch(key))
        }
        yield _gauge("accuracy", "Mean accuracy of the newest validation", accuracies, "data_source")
        summaries = {(info.run, summary.backend): summary for info in infos for summary in info.tracking}
        for name, (field, description) in OF_TRACKING.items() if summaries else ():
            values = {labels: getattr(summary, field) for labels, summary in summaries.items()}
            yield _gauge(name, description, values, "backend")


def _gauge(name: str, description: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
    family = GaugeMetricFamily(f"trackway_run_{name}", description, labels=["run", *labels])
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family
