"""Runs an agent loop written for verl: its `run` gets a row and a model, and its output becomes the trajectory.

Ids, logprobs and weight versions of the model's tokens come from the generations. The output's mask says which of their
tokens are in the response. The classes that such a loop imports are in verl_interface.py.
"""

import asyncio
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from trackway.agent.episode import Episode, TurnEpisode
from trackway.agent.loop import AgentLoop, register
from trackway.agent.settings import AgentSettings
from trackway.agent.toolbox import Toolbox
from trackway.agent.verl_interface import AgentLoopOutput, Config, DictConfigWrap, TokenOutput, registered
from trackway.serving.user_code import import_modules, loading
from trackway.tracing import turn_span
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import StopReason, Turn, WeightSpan, first_spans

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "logprobs": (None, True, False, 0, 1),
    "n": (None, 1),
}
"""Sampling parameters that are accepted only with a value that changes nothing."""
_NAMES = {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True)
class RecordedGeneration:
    """One call of `server_manager.generate`."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[WeightSpan]
    finish_reason: str
    seconds: float


class VerlAgentLoop(AgentLoop):
    """Adapter of a class with verl's interface. `adapted` makes a subclass for each."""

    loop_class: ClassVar[Callable[..., Any]]
    arguments: ClassVar[Mapping[str, Any]] = {}

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """Run the loop and take over its output."""
        tokens = self.services.tokens
        config, data = _configs(episode, tokens.template_kwargs, tokens.tool_format.name)
        with ExitStack() as turns:
            model = Model(self, episode, turns)
            loop = self.loop_class(
                trainer_config=DictConfigWrap(config),
                server_manager=model,
                tokenizer=self.services.tokens.tokenizer,
                processor=None,
                dataset_cls=None,
                data_config=DictConfigWrap(data),
                **self.arguments,
            )
            output = await loop.run(_sampling_params(episode.request.sampling_params), **_columns(episode))
        if not isinstance(output, AgentLoopOutput):
            output = _as_output(output)
        await self._take(output, model.generations, episode)
        full = len(episode.response_ids) >= episode.limits.max_response_length
        return StopReason.MAX_RESPONSE if full else StopReason.ANSWERED

    async def _take(self, output: AgentLoopOutput, generations: Sequence[RecordedGeneration], episode: Episode) -> None:
        ids, mask = output.response_ids, output.response_mask
        limit = episode.limits.max_response_length
        if len(ids) != len(mask) or len(ids) > limit:
            raise _wrong(
                f"at most {limit} response_ids (data.max_response_length) and a mask for each",
                f"{len(ids)} ids and {len(mask)} mask values",
                "cut both to the limit",
            )
        if len(output.prompt_ids) > episode.limits.max_prompt_length:
            raise episode.prompt_too_long(len(output.prompt_ids))
        episode.prompt_ids = output.prompt_ids
        episode.response_ids, episode.response_mask = ids, mask
        episode.response_logprobs = [0.0] * len(ids)
        for generation, start in _placed(generations, ids, mask):
            await self._add_turn(generation, start, episode)
        episode.user_turns = max(0, output.num_turns - len(episode.turns) - 1)
        episode.tool_rewards = [float(reward) for reward in output.extra_fields.get("tool_rewards") or []]
        episode.timings.tool_calls += output.metrics.tool_calls
        if output.reward_score is not None:
            episode.set_reward(output.reward_score)

    async def _add_turn(self, generation: RecordedGeneration, start: int, episode: Episode) -> None:
        end = min(start + len(generation.token_ids), len(episode.response_ids))
        episode.response_logprobs[start:end] = generation.logprobs[: end - start]
        spans = first_spans(generation.weight_versions, end - start)
        episode.weight_versions += [span.moved(start) for span in spans]
        text = await self.services.tokens.turn_text(episode.response_ids[start:end])
        episode.turns.append(
            Turn(
                index=len(episode.turns),
                messages=[Message(role="assistant", content=text)],
                response_start=start,
                response_end=end,
                finish_reason=generation.finish_reason,
                generate_s=generation.seconds,
            )
        )


class Model:
    """verl's `server_manager`: each generation begins a turn, whose span lasts until the next one or the end.

    So spans of tools are below their turn. In a task of the loop's own, the span lasts only for the generation.
    """

    def __init__(self, loop: AgentLoop, episode: Episode, turns: ExitStack) -> None:
        self.generations: list[RecordedGeneration] = []
        self._loop = loop
        self._episode = episode
        self._turns = turns
        self._task = asyncio.current_task()
        self._begun = 0
        self._shown: list[int] = []

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **options: Any
    ) -> TokenOutput:
        """Continue `prompt_ids`. `options` are accepted for media that are None or empty.

        Raises:
            TrackwayError: `invalid_request` for a sampling parameter or media that are not supported, or a prompt that
                leaves no room.
        """
        media = [name for name, value in options.items() if name.endswith("_data") and value]
        if media:
            raise _wrong("text only", f"{', '.join(media)}", "leave them out")
        index, self._begun = self._begun, self._begun + 1
        if asyncio.current_task() is self._task:
            self._turns.close()
            self._turns.enter_context(turn_span(index))
            return await self._generate(index, [*prompt_ids], sampling_params)
        with turn_span(index):
            return await self._generate(index, [*prompt_ids], sampling_params)

    async def _generate(self, index: int, prompt_ids: list[int], params: Mapping[str, Any]) -> TokenOutput:
        part = TurnEpisode.of(self._episode, index, prompt_ids, self._params(prompt_ids, params))
        seen = self._shown
        part.shown = len(seen) if prompt_ids[: len(seen)] == seen else 0
        started = time.perf_counter()
        finish_reason = await self._loop.generate(part)
        seconds = time.perf_counter() - started
        self._shown = part.context
        self.generations.append(
            RecordedGeneration(part.response_ids, part.response_logprobs, part.weight_versions, finish_reason, seconds)
        )
        version = part.weight_versions[-1].version if part.weight_versions else None
        return TokenOutput(
            token_ids=[*part.response_ids],
            log_probs=[*part.response_logprobs],
            stop_reason="completed",
            extra_fields={"global_steps": version, "min_global_steps": version, "max_global_steps": version},
        )

    def _params(self, prompt_ids: Sequence[int], given: Mapping[str, Any]) -> SamplingParams:
        own = self._episode.request.sampling_params
        named = {_NAMES.get(name, name): value for name, value in given.items()}
        wrong = [name for name, value in named.items() if name in _NEUTRAL and value not in _NEUTRAL[name]]
        wrong += [name for name in named if name not in _NEUTRAL and name not in SamplingParams.model_fields]
        if wrong:
            known = ", ".join(SamplingParams.model_fields)
            raise _wrong(
                f"sampling_params out of {known}",
                ", ".join(f"{name}={named[name]}" for name in wrong),
                "leave them out",
            )
        limits = self._episode.limits
        room = limits.max_prompt_length + limits.max_response_length - len(prompt_ids)
        if room < 1:
            raise _wrong(
                f"a prompt that leaves room in {limits.max_prompt_length + limits.max_response_length} tokens",
                f"{len(prompt_ids)} tokens",
                "end the loop before",
            )
        kept = {name: value for name, value in named.items() if name not in _NEUTRAL and value is not None}
        longest = min(kept.pop("max_tokens", own.max_tokens), room, limits.max_response_length)
        return SamplingParams.model_validate({**own.model_dump(), **kept, "max_tokens": longest})


def adapted(loop_class: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> type[VerlAgentLoop]:
    """The loop that runs this class of verl's interface; `arguments` go to its constructor. TypeError without `run`."""
    if not asyncio.iscoroutinefunction(getattr(loop_class, "run", None)):
        raise TypeError(f"expected a class with `async def run(self, sampling_params, **kwargs)`, got {loop_class!r}")
    attributes = {"loop_class": loop_class, "arguments": arguments or {}, "__doc__": loop_class.__doc__}
    attributes["__module__"] = loop_class.__module__
    return type(loop_class.__name__, (VerlAgentLoop,), attributes)


def _placed(
    generations: Sequence[RecordedGeneration], ids: Sequence[int], mask: Sequence[int]
) -> list[tuple[RecordedGeneration, int]]:
    """The generations in the response, each with its first position. Those that the loop discarded are left out.

    TrackwayError when a token with mask 1 is of none of them.
    """
    placed: list[tuple[RecordedGeneration, int]] = []
    position = 0
    for generation in generations:
        start = next((place for place in range(position, len(ids)) if mask[place]), len(ids))
        end = min(start + len(generation.token_ids), len(ids))
        if start < end and all(mask[start:end]) and [*ids[start:end]] == generation.token_ids[: end - start]:
            placed.append((generation, start))
            position = end
    rest = next((place for place in range(position, len(ids)) if mask[place]), None)
    if rest is not None:
        raise _wrong(
            "every token with response_mask 1 to come from server_manager.generate, in order",
            f"another at position {rest} of {len(ids)}",
            "keep generated ids as they are, and give all other tokens the mask 0",
        )
    return placed


def _sampling_params(params: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def _columns(episode: Episode) -> dict[str, Any]:
    """The row as verl's columns."""
    sample = episode.sample
    return {
        "raw_prompt": [message.model_dump(mode="json", exclude_none=True) for message in sample.prompt],
        "data_source": sample.data_source,
        "agent_name": episode.agent_name,
        "ability": sample.ability,
        "reward_model": sample.reward_model.model_dump(),
        "extra_info": {**sample.extra_info},
        "tools_kwargs": sample.extra_info.get("tools_kwargs") or {},
        "index": sample.index,
        "uid": episode.id.rpartition("/")[0],
    }


def _configs(episode: Episode, template_kwargs: Mapping[str, Any], tool_format: str) -> tuple[Config, Config]:
    """verl's configuration and its section `data`, with the keys that concern a trajectory."""
    limits, params = episode.limits, episode.request.sampling_params
    data = Config(
        max_prompt_length=limits.max_prompt_length,
        max_response_length=limits.max_response_length,
        apply_chat_template_kwargs=dict(template_kwargs),
    )
    multi_turn = Config(
        format=tool_format,
        max_assistant_turns=limits.max_assistant_turns,
        max_user_turns=limits.max_user_turns,
        max_parallel_calls=limits.max_parallel_calls,
        max_tool_response_length=limits.max_tool_response_length,
        tool_response_truncate_side=limits.tool_response_truncate_side,
    )
    rollout = Config(
        n=episode.request.n,
        prompt_length=limits.max_prompt_length,
        response_length=limits.max_response_length,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        multi_turn=multi_turn,
    )
    return Config(actor_rollout_ref=Config(rollout=rollout), data=data), data


def _as_output(output: object) -> AgentLoopOutput:
    """The output of a class of an installed verl. TypeError for anything else."""
    dump = getattr(output, "model_dump", None)
    if dump is None:
        raise TypeError(f"expected run to return an AgentLoopOutput, got {type(output).__name__}")
    return AgentLoopOutput.model_validate(
        {name: value for name, value in dump().items() if name in AgentLoopOutput.model_fields}
    )


def _wrong(expected: str, got: str, remedy: str) -> TrackwayError:
    return TrackwayError(ErrorCode.INVALID_REQUEST, f"expected {expected}, got {got}; {remedy}")


def load_loops(settings: AgentSettings) -> None:
    """Register the loops that the settings name.

    OwnCodeError for a module or class that cannot be imported; FileNotFoundError; ValueError for a wrong file;
    TypeError for a class that is no agent loop.
    """
    import_modules(settings.modules, settings.code_path)
    if settings.agent_loop_config_path is not None:
        _load_file(settings.agent_loop_config_path)
    for name, loop_class in registered(settings.modules):
        register(name)(adapted(loop_class))


def _load_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"agent_loop_config_path: expected a YAML file, got {str(path)!r}; correct the path")
    try:
        entries = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML, got: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of agent loops, got {type(entries).__name__}")
    for number, entry in enumerate(entries, start=1):
        _load_entry(f"{path}, entry {number}", entry)


def _load_entry(place: str, entry: Any) -> None:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
        raise ValueError(
            f"{place}: expected the keys name and _target_ with a class such as my_agent.MyLoop, got {entry}"
        )
    arguments = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
    with loading(f"{place}, {entry['_target_']!r}"):
        loop_class = pkgutil.resolve_name(entry["_target_"])
    if isinstance(loop_class, type) and issubclass(loop_class, AgentLoop):
        if arguments:
            raise ValueError(f"{place}: expected no arguments for an AgentLoop of trackway, got {sorted(arguments)}")
        register(entry["name"])(type(loop_class.__name__, (loop_class,), {"__doc__": loop_class.__doc__}))
        return
    try:
        register(entry["name"])(adapted(loop_class, arguments))
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from error
