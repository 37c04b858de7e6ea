"""Scorers by data source, and the reward service without HTTP: selects a scorer, scores within a deadline."""

import asyncio
import logging
import math
import pkgutil
from collections.abc import Iterable, Sequence

from trackway import gsm8k
from trackway.clients import CallPolicy, RewardClient
from trackway.reward.functions import scorer_of_file, scorers_of_modules
from trackway.reward.models import JudgeScorer, RewardModelAccess, RewardModelScorer
from trackway.reward.settings import RewardSettings
from trackway.reward.weighted import Scorer, combined
from trackway.serving.user_code import (
    FunctionServer,
    FunctionsOutage,
    import_modules,
    importing,
    located,
    run_user_code,
    user_code,
)
from trackway.tracing import SpanHandle, reward_span, token2text
from trackway.tracing.settings import redacted
from trackway.tracing.span_handle import active_tracing, utf8_size
from trackway.wire.base import well_formed
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ANY_DATA_SOURCE, ScoreRequest, ScorerInfo
from trackway.wire.trajectory import MAX_COMPONENTS, Reward


class RemoteScorer:
    """Asks the reward function of another process for each score."""

    def __init__(self, server: FunctionServer, timeout_s: float) -> None:
        self.info = ScorerInfo(
            name="function",
            data_sources=[ANY_DATA_SOURCE],
            methods=["default"],
            description=f"the reward function of {server.process}",
        )
        self._outage = FunctionsOutage(server.process)
        policy = CallPolicy(read_s=timeout_s, total_s=timeout_s, attempts=1)
        self._client = RewardClient(f"{server.url}/reward", token=server.token, policy=policy)

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """Score one solution. UNAVAILABLE names the process if it does not answer."""
        try:
            reward = await self._client.score(request)
        except TrackwayError as error:
            if error.code is not ErrorCode.UNAVAILABLE:
                raise
            raise self._outage.error(error) from error
        self._outage.began = None
        return reward


class Gsm8kScorer:
    """Compares the final answer with the ground truth. `strict`, as verl does, is the default."""

    info = ScorerInfo(
        name="gsm8k",
        data_sources=["openai/gsm8k", "trackway/tiny_math"],
        methods=[method.value for method in gsm8k.Method],
        description=(
            "1.0 when the final answer equals the ground truth, else 0.0. strict: the last '#### <number>'; "
            "flexible: the last number; normalized: the last '####' number compared by value."
        ),
    )

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """`correct` is the score. `answered` is 1.0 when the text has a final answer."""
        chosen = gsm8k.Method(method)
        correct = gsm8k.score(request.solution_str, request.ground_truth, chosen)
        answer = gsm8k.extract(request.solution_str, chosen)
        components = {"correct": correct, "answered": float(answer is not None)}
        return Reward(score=correct, components=components, answer=answer)


class ScorerRegistry:
    """Scorers by data source. ValueError when two scorers claim the same source."""

    def __init__(self, scorers: Iterable[Scorer]) -> None:
        self._scorers = list(scorers)
        self._by_source: dict[str, Scorer] = {}
        for scorer in self._scorers:
            for source in scorer.info.data_sources:
                first = self._by_source.setdefault(source, scorer)
                if first is not scorer:
                    raise ValueError(
                        f"expected one scorer for data source {source!r}, got {first.info.name} and "
                        f"{scorer.info.name}; give one of them other data sources, or add them up in weighted_scorers"
                    )

    def get(self, data_source: str) -> Scorer:
        """The scorer of a data source. UNKNOWN_DATA_SOURCE lists the known sources."""
        scorer = self._by_source.get(data_source) or self._by_source.get(ANY_DATA_SOURCE)
        if scorer is None:
            known = sorted(self._by_source)
            raise TrackwayError(
                ErrorCode.UNKNOWN_DATA_SOURCE,
                f"expected one of the data sources {', '.join(known)}, got {data_source!r}; "
                "add a scorer for it (custom_reward_function, or @scorer in one of the modules)",
                known=[*known],
            )
        return scorer

    def infos(self) -> list[ScorerInfo]:
        """Every scorer."""
        return [scorer.info for scorer in self._scorers]


def method_of(scorer: Scorer, asked: str | None) -> str:
    """The requested method, or the scorer's default. INVALID_REQUEST for an unknown method."""
    methods = scorer.info.methods
    if asked is None:
        return methods[0]
    if asked not in methods:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"{scorer.info.name}: expected one of the methods {', '.join(methods)}, got {asked!r}; "
            f"leave it out for {methods[0]}",
            known=[*methods],
        )
    return asked


def scorers_of(settings: RewardSettings) -> list[Scorer]:
    """The scorers that the settings name; imports their `modules`. The built-in ones only if no own scorer scores
    every data source, except in a sum.

    TypeError for a path that is not a Scorer; ValueError for a sum of unknown scorers; OwnCodeError for a module or
    file that cannot be imported.
    """
    import_modules(settings.modules, settings.code_path)
    function, model = settings.custom_reward_function, settings.reward_model
    access = RewardModelAccess(model, settings.base_url) if model else None
    server = FunctionServer.read(settings.functions_file) if settings.functions_file else None
    own = [
        *([scorer_of_file(function, access)] if function else []),
        *([RewardModelScorer(model, settings)] if model and not function else []),
        *([RemoteScorer(server, settings.score_timeout_s)] if server and server.has_reward else []),
        *(_imported(path) for path in settings.extra_scorers),
        *scorers_of_modules(settings.modules),
        *(JudgeScorer(judge) for judge in settings.judges),
    ]
    built_in = Gsm8kScorer()
    scorers = combined([built_in, *own], settings.weighted_scorers)
    replaced = any(ANY_DATA_SOURCE in scorer.info.data_sources for scorer in scorers)
    return [scorer for scorer in scorers if scorer is not built_in] if replaced else scorers


def _imported(path: str) -> Scorer:
    with importing(f"setting extra_scorers, {path!r}"):
        scorer_class = pkgutil.resolve_name(path)
    with user_code(f"setting extra_scorers, {path!r}"):
        scorer = scorer_class()
    if not isinstance(scorer, Scorer):
        raise TypeError(
            f"expected {path!r} to have `info` and `score` as trackway.reward.scorers.Scorer, got {scorer!r}"
        )
    return scorer


logger = logging.getLogger("trackway.reward")

SHOWN_CHARS = 300
"""Characters at the end of a solution that a span records: they contain the answer."""


class RewardService:
    """Scores solutions. Every method raises TrackwayError.

    timeout_s: limit of one score in seconds.
    """

    def __init__(self, scorers: Sequence[Scorer], timeout_s: float) -> None:
        self._registry = ScorerRegistry(scorers)
        self._timeout_s = timeout_s

    def infos(self) -> list[ScorerInfo]:
        """Every scorer."""
        return self._registry.infos()

    async def score(self, request: ScoreRequest) -> Reward:
        """Score one solution, in a span of its own."""
        scorer = self._registry.get(request.data_source)
        method = method_of(scorer, request.method)
        with reward_span(scorer.info.name) as span:
            _show_inputs(span, method, request)
            reward = await self._within_deadline(scorer, method, request)
            span.score(reward.score)
            turns = {"turn_scores": reward.turn_scores} if reward.turn_scores else {}
            span.outputs({"score": reward.score, **turns, **reward.components})
        return reward

    async def _within_deadline(self, scorer: Scorer, method: str, request: ScoreRequest) -> Reward:
        name = scorer.info.name
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return _finite(await run_user_code(lambda: scorer.score(request, method)))
        except TrackwayError:
            raise
        except Exception as error:
            if deadline.expired():
                message = f"scorer {name!r}: expected a score within {self._timeout_s:g} s; raise score_timeout_s"
                raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
            # The traceback is logged here, since it does not cross the process.
            logger.exception("scorer %r failed", name)
            message = f"scorer {name!r} failed: {located(error)}; the reward service logged the traceback"
            raise TrackwayError(ErrorCode.INTERNAL, message) from error


def _show_inputs(span: SpanHandle, method: str, request: ScoreRequest) -> None:
    if span.recording:
        shown = {"data_source": request.data_source, "method": method, "ground_truth": request.ground_truth}
        text = {"solution_end": _end_of(request.solution_str)} if token2text() else {}
        span.inputs({**shown, **text})


def _end_of(text: str) -> str:
    """The end of a text, after a marker if it was truncated."""
    if len(text) <= SHOWN_CHARS:
        return text
    # Redact before truncating: half of a secret would not be recognised.
    tracing = active_tracing()
    text = redacted(text, tracing.redact if tracing else None)
    end = text[-SHOWN_CHARS:]
    missing = utf8_size(text) - utf8_size(end)
    return f"[truncated {missing} bytes]{end}" if missing else text


def _finite(reward: Reward) -> Reward:
    # Such a score is of no use for training, and the scorer's name is known here.
    if not all(math.isfinite(value) for value in (reward.score, *reward.components.values(), *reward.turn_scores)):
        raise ValueError(f"expected finite scores, got {reward}")
    if len(reward.components) > MAX_COMPONENTS:
        raise ValueError(f"expected at most {MAX_COMPONENTS} components, got {len(reward.components)}; return fewer")
    if all(map(str.isascii, reward.components)):
        return reward
    components = {well_formed(name): value for name, value in reward.components.items()}
    return reward.model_copy(update={"components": components})
