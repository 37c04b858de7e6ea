"""The scorers by data source."""

import pkgutil
from collections.abc import Iterable

from trackway.reward.functions import scorer_of_file, scorers_of_modules
from trackway.reward.gsm8k import Gsm8kScorer
from trackway.reward.judge import JudgeScorer
from trackway.reward.protocol import Scorer
from trackway.reward.remote import RemoteScorer
from trackway.reward.reward_model import RewardModelAccess, RewardModelScorer
from trackway.reward.settings import RewardSettings
from trackway.reward.weighted import combined
from trackway.serving.own_code import FunctionServer, import_modules
from trackway.serving.user_code import importing, user_code
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ANY_DATA_SOURCE, ScorerInfo


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
