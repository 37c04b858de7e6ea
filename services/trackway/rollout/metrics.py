"""Metrics of an engine and its weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from prometheus_client import Counter, Histogram

from trackway.clients.weights import WeightStore
from trackway.rollout.classifiers import Classifier
from trackway.rollout.engines.protocol import Engine, EngineStats
from trackway.rollout.engines.weight_proof import Judgement
from trackway.serving import Gauge
from trackway.serving.metrics import Collectors, OperationDuration
from trackway.tracing.attributes import PROVIDER_NAME
from trackway.wire.weights import Verdict

_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Advised by the GenAI conventions."""
_MOST_LABELS = 64
"""Policies that the metrics tell apart."""


class InferenceMetrics(Collectors):
    """Durations and tokens of generations by policy, under the names of the GenAI conventions."""

    def __init__(self) -> None:
        of_the_model = ("gen_ai_provider_name", "gen_ai_request_model")
        labels = ["gen_ai_operation_name", *of_the_model]
        self._models: set[str] = set()
        self._duration = OperationDuration(
            "chat", "client_inference", "Duration of generations in seconds", *of_the_model, buckets=_BUCKETS_S
        )
        self._first_chunk = Histogram(
            "gen_ai_client_inference_time_to_first_chunk_seconds",
            "Time to the first tokens of streamed generations in seconds",
            labels,
            buckets=_BUCKETS_S,
            registry=None,
        )
        self._tokens = [
            Counter(f"gen_ai_client_inference_usage_{name}", description, labels, registry=None)
            for name, description in (
                ("input_tokens", "Prompt tokens"),
                ("output_tokens", "Generated tokens"),
                ("cache_read_input_tokens", "Prompt tokens from the cache"),
            )
        ]
        super().__init__(self._duration, self._first_chunk, *self._tokens)

    def timed(self, model: str) -> AbstractContextManager[None]:
        """Around one generation."""
        return self._duration.timed(PROVIDER_NAME, self._label(model))

    def first_chunk(self, model: str, seconds: float) -> None:
        """Add the time to the first tokens of a streamed generation."""
        self._first_chunk.labels("chat", PROVIDER_NAME, self._label(model)).observe(seconds)

    def count(self, model: str, *tokens: int) -> None:
        """Add the prompt, generated and cached tokens of a generation."""
        for counter, added in zip(self._tokens, tokens, strict=True):
            counter.labels("chat", PROVIDER_NAME, self._label(model)).inc(added)

    def _label(self, model: str) -> str:
        """The policy's name, or `other` beyond a bound: each name is a series for as long as the process runs."""
        if model not in self._models:
            if len(self._models) >= _MOST_LABELS:
                return "other"
            self._models.add(model)
        return model


def engine_gauges(engine: Engine, latest: Callable[[], int]) -> list[Gauge]:
    """Requests, tokens and weights, of which `latest` is the newest published version.

    The prefix cache's hit rate is reused / (prefilled + reused).
    """
    return [
        _of(engine, "running", "Requests in the batch", lambda stats: stats.running),
        _of(engine, "waiting", "Requests in the queue", lambda stats: stats.waiting),
        _of(engine, "steps", "Decode steps", lambda stats: stats.steps, total=True),
        _of(engine, "generated_tokens", "Tokens generated", lambda stats: stats.generated_tokens, total=True),
        _of(engine, "prefilled_tokens", "Prompt tokens computed", lambda stats: stats.prefilled_tokens, total=True),
        _of(engine, "reused_tokens", "Prompt tokens from the cache", lambda stats: stats.reused_tokens, total=True),
        Gauge(
            "trackway_weight_transfers",
            "Versions taken from the learner's GPU memory",
            lambda: engine.stats().transferred_weights,
            total=True,
        ),
        Gauge(
            "trackway_weight_transfer_fallbacks",
            "Versions offered in the learner's GPU memory and read from the store",
            lambda: engine.stats().weight_fallbacks,
            total=True,
        ),
        Gauge("trackway_weight_version", "Version of the weights that generate", lambda: engine.version),
        *_proof(engine),
        Gauge("trackway_weight_lag", "Published versions not loaded yet", lambda: latest() - engine.version),
    ]


def classifier_gauges(classifier: Classifier) -> list[Gauge]:
    """Inputs and tokens."""
    return [
        _of(classifier, "running", "Inputs in work", lambda stats: stats.running),
        _of(classifier, "waiting", "Inputs in the queue", lambda stats: stats.waiting),
        _of(classifier, "steps", "Batches; of a server, inputs", lambda stats: stats.steps, total=True),
        _of(classifier, "prefilled_tokens", "Tokens of inputs", lambda stats: stats.prefilled_tokens, total=True),
    ]


def store_gauges(store: WeightStore) -> list[Gauge]:
    """Metrics of a replica's reading of its weight store."""
    return [
        Gauge(
            "trackway_weight_fetched_bytes",
            "Bytes of weights copied from an object store, or read of deltas in a folder",
            lambda: store.fetched_bytes,
            total=True,
        ),
        Gauge(
            "trackway_weight_fallbacks",
            "Damaged copies of weights made again, and anchors loaded in place of newer versions",
            lambda: store.fallbacks,
            total=True,
        ),
    ]


def _proof(engine: Engine) -> list[Gauge]:
    """Metrics of the verdict on the current weights; none without a proof."""

    def of(value: Callable[[Judgement], float]) -> Callable[[], float]:
        return lambda: 0.0 if engine.judgement is None else value(engine.judgement)

    return [
        Gauge(
            "trackway_weight_tensors_proven",
            "Share of the published tensors whose digest the engine showed",
            of(lambda judgement: judgement.tensors / max(1, judgement.tensors_published)),
        ),
        Gauge(
            "trackway_weight_distinct",
            "1 when the engine was distinguished from one with the previous version",
            of(lambda judgement: float(judgement.verdict in (Verdict.PROVEN, Verdict.ROUNDED))),
        ),
        Gauge(
            "trackway_weight_logprobs_off",
            "Root mean square of the engine's logprobs from the publisher's at the last load",
            of(lambda judgement: judgement.off),
        ),
    ]


def _of(
    engine: Engine | Classifier, name: str, description: str, of: Callable[[EngineStats], int], total: bool = False
) -> Gauge:
    return Gauge(f"trackway_engine_{name}", description, lambda: of(engine.stats()), total)
