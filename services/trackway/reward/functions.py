"""Scoring functions with verl's signature: `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    @scorer
    def length(data_source, solution_str, ground_truth, extra_info=None): return -len(solution_str)

A function of verl's reward manager `batch`, with `data_sources`, `solution_strs`, `ground_truths` and `extra_infos`, is
called with lists of one: its scores must not depend on the other responses.

A function of a module is declared with `@scorer`. One of a file is named in the setting `custom_reward_function`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import SupportsFloat, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from trackway.reward.models import RewardModelAccess
from trackway.serving.user_code import Declared, in_thread, module_of_file
from trackway.wire.reward import ANY_DATA_SOURCE, ScoreRequest, ScorerInfo
from trackway.wire.trajectory import MAX_ANSWER, Reward

F = TypeVar("F", bound=Callable[..., object])


class RewardFunction(BaseModel):
    """verl's `custom_reward_function`: a function of a Python file that scores every data source."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    path: Path
    """Python file of the function."""
    name: str = "compute_score"
    """Name of the function in the file."""
    reward_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments passed to it in addition. They replace arguments of the same name."""


class FunctionScorer:
    """Scores with a function, which may be async. Any other runs in a thread.

    The function returns a number, or a dict with the number `score`. Other numbers of the dict become components,
    `pred` is the answer that it found, and the list `turn_scores` says which parts of the score belong to which turn of
    the model.
    """

    def __init__(
        self,
        function: Callable[..., object],
        name: str,
        data_sources: Sequence[str] = (ANY_DATA_SOURCE,),
        kwargs: Mapping[str, JsonValue] | None = None,
        reward_model: RewardModelAccess | None = None,
    ) -> None:
        self.info = ScorerInfo(
            name=name,
            data_sources=[*data_sources],
            methods=["default"],
            description=(inspect.getdoc(function) or "").partition("\n")[0],
        )
        self._function = function
        self._takes_lists = _takes(function, "solution_strs")
        self._kwargs = kwargs or {}
        self._reward_model = reward_model

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """The function's score. TypeError with what it returned when that is not a number.

        With a reward model the function gets `reward_router_address`, as in verl, and `reward_model_tokenizer` if it
        has a parameter of that name.
        """
        arguments: dict[str, object] = {
            "data_source": request.data_source,
            "solution_str": request.solution_str,
            "ground_truth": request.ground_truth,
            "extra_info": {**request.extra_info},
        }
        if self._takes_lists:
            arguments = {f"{name}s": [value] for name, value in arguments.items()}
        if self._reward_model is not None:
            arguments["reward_router_address"] = self._reward_model.router_address
            if _takes(self._function, "reward_model_tokenizer"):
                arguments["reward_model_tokenizer"] = await self._reward_model.tokenizer()
        arguments |= self._kwargs
        if inspect.iscoroutinefunction(self._function):
            returned = await self._function(**arguments)
        else:
            returned = await in_thread(lambda: self._function(**arguments))
        return reward_of(_only_item(returned) if self._takes_lists else returned)


def reward_of(returned: object) -> Reward:
    """The reward of a function's result: a number, or a dict whose `score` is one. TypeError for anything else."""
    if not isinstance(returned, Mapping):
        return Reward(score=_number(returned, "a number or a dict with 'score'"))
    if "score" not in returned:
        raise TypeError(f"expected a dict with the key 'score', got the keys {sorted(map(str, returned))}")
    numbers = {str(key): float(value) for key, value in returned.items() if key != "score" and _is_number(value)}
    answer = returned.get("pred")
    return Reward(
        score=_number(returned["score"], "a number as 'score'"),
        components=numbers,
        answer=None if answer is None else str(answer)[:MAX_ANSWER],
        turn_scores=_turn_scores(returned.get("turn_scores")),
    )


def _takes(function: Callable[..., object], name: str) -> bool:
    """Return whether the function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function without a signature, such as some of C
        return False


def _only_item(returned: object) -> object:
    items = [*returned] if isinstance(returned, Iterable) and not isinstance(returned, str | Mapping) else []
    if len(items) != 1:
        raise TypeError(
            f"expected it to return a list of one score for one solution, got {type(returned).__name__} "
            f"{str(returned)[:80]!r}"
        )
    return items[0]


def _turn_scores(value: object) -> list[float]:
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        expected = "a list of numbers as 'turn_scores'"
        raise TypeError(f"expected it to return {expected}, got {type(value).__name__} {str(value)[:80]!r}")
    return [_number(score, "numbers as 'turn_scores'") for score in value]


def _number(value: object, expected: str) -> float:
    if not _is_number(value):
        raise TypeError(f"expected it to return {expected}, got {type(value).__name__} {str(value)[:80]!r}")
    return float(cast(SupportsFloat, value))


def _is_number(value: object) -> bool:
    return isinstance(value, SupportsFloat)  # also the scalars of NumPy and torch; a string is none


_declared = Declared[FunctionScorer]()


@overload
def scorer(data_sources: F) -> F: ...
@overload
def scorer(data_sources: str | Sequence[str] | None = None) -> Callable[[F], F]: ...
def scorer(data_sources: F | str | Sequence[str] | None = None) -> F | Callable[[F], F]:
    """Make a function the scorer of these data sources. Without any, of every data source that has no other scorer.

    The reward service serves it when the function's module, or a package above it, is in its setting `modules`.
    """
    if callable(data_sources):
        return _add(data_sources, [ANY_DATA_SOURCE])
    named = [data_sources] if isinstance(data_sources, str) else list(data_sources or [ANY_DATA_SOURCE])
    return lambda function: _add(function, named)


def _add(function: F, data_sources: Sequence[str]) -> F:
    name = f"{function.__module__}.{function.__qualname__}"
    _declared.add(function, FunctionScorer(function, name, data_sources))
    return function


def scorers_of_modules(modules: Sequence[str]) -> list[FunctionScorer]:
    """The scorers that these imported modules, or modules below them, define."""
    return _declared.within(modules)


def scorer_of_file(wanted: RewardFunction, reward_model: RewardModelAccess | None = None) -> FunctionScorer:
    """The scorer of `custom_reward_function`, which asks `reward_model` if there is one.

    FileNotFoundError. ValueError when the file has no such function; OwnCodeError when it cannot be imported.
    """
    module = module_of_file(wanted.path, "custom_reward_function.path")
    function = getattr(module, wanted.name, None)
    if not callable(function):
        functions = sorted(name for name, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(
            f"custom_reward_function.name: expected a function of {wanted.path}, which has "
            f"{', '.join(functions) or 'none'}, got {wanted.name!r}; correct the name"
        )
    return FunctionScorer(
        function, f"{wanted.path.name}:{wanted.name}", (ANY_DATA_SOURCE,), wanted.reward_kwargs, reward_model
    )
