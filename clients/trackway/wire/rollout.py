"""The rollout service: token ids in, token ids and logprobs out; names are vLLM's `/inference/v1/generate`."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Literal, NotRequired, Self

from pydantic import Field, JsonValue, field_validator, model_validator, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from trackway.wire.base import NON_FINITE, Float, Int, TokenId, WireReply, WireRequest, is_none
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.trajectory import WeightSpan, add_span, settle_spans
from trackway.wire.weights import TransportName, Verdict

PauseMode = Literal["wait", "abort", "keep"]
SleepMode = Literal["wait", "abort", "keep", "retract"]
MemoryPart = Literal["weights", "kv_cache"]

MAX_TOP_LOGPROBS = 20
"""OpenAI's bound, and the default one of vLLM."""
TopLogprobs = list[tuple[int, float]]
"""The most likely tokens at one position as (id, logprob), highest first."""
MAX_PROMPT_TOP_LOGPROBS = 128
"""Most of the most likely tokens at a prompt position."""
MAX_PROMPT_LOGPROBS = 262_144
"""Most prompt positions times `prompt_logprobs` of a request: some 8 MB of JSON."""

MAX_SCHEMA_BYTES = 65_536
MAX_STRUCTURAL_TAG_BYTES = 262_144
MAX_SCHEMA_DEPTH = 32
"""Objects and lists within each other; two for each level of a JSON schema."""
MAX_ENUM_VALUES = 1000
MAX_PATTERN_CHARS = 512
MAX_PATTERN_REPEATS = 1000
"""Product of the counts in a pattern, such as 6 of `(a{2}){3}`."""
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class StructuredOutputs(WireRequest):
    """Form of the generated text: JSON of a schema, any JSON object, or text of a structural tag."""

    json_schema: dict[str, JsonValue] | None = Field(default=None, alias="json")
    """A JSON schema of at most 64 KiB."""
    json_object: Literal[True] | None = None
    structural_tag: str | None = None
    """A structural tag of xgrammar as JSON, of at most 256 KiB: alternatives of JSON by schemas, also between texts."""

    @field_validator("json_schema")
    @classmethod
    def _within_bounds(cls, schema: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        if schema is not None:
            check_schema(schema)
        return schema

    @field_validator("structural_tag")
    @classmethod
    def _known_formats(cls, tag: str | None) -> str | None:
        if tag is not None:
            _check_structural_tag(tag)
        return tag

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        if [self.json_schema, self.json_object, self.structural_tag].count(None) != 2:
            message = "expected one of json, json_object=true and structural_tag"
            raise PydanticCustomError("structured_outputs", message)
        return self

    @property
    def schema_text(self) -> str:
        """The schema as JSON."""
        return json.dumps({"type": "object"} if self.json_schema is None else self.json_schema)


_PARTS = {"or": "elements", "tags_with_separator": "tags"}
"""Fields of a structural tag's formats that hold others."""


def _check_structural_tag(tag: str) -> None:
    """Raise PydanticCustomError for a tag with formats other than JSON, or with a schema beyond the bounds."""
    if len(tag.encode("utf-8", "surrogatepass")) > MAX_STRUCTURAL_TAG_BYTES:
        raise _unknown_tag(f"at most {MAX_STRUCTURAL_TAG_BYTES} bytes")
    try:
        outer = json.loads(tag)
    except (ValueError, RecursionError):
        raise _unknown_tag("JSON") from None
    if not isinstance(outer, dict) or outer.keys() != {"type", "format"} or outer["type"] != "structural_tag":
        raise _unknown_tag('{"type": "structural_tag", "format": ...}')
    pending: list[tuple[JsonValue, int]] = [(outer["format"], 1)]
    while pending:
        part, depth = pending.pop()
        kind = part.get("type") if isinstance(part, dict) else None
        inner: JsonValue = None
        if isinstance(part, dict):
            inner = part.get("json_schema") if kind == "json_schema" else part.get(_PARTS.get(str(kind), "content"))
        if kind == "json_schema" and isinstance(inner, dict):
            check_schema(inner)
        elif kind == "tag" and depth <= MAX_SCHEMA_DEPTH:
            pending.append((inner, depth + 1))
        elif kind in _PARTS and isinstance(inner, list) and depth <= MAX_SCHEMA_DEPTH:
            pending += [(item, depth + 1) for item in inner]
        else:
            raise _unknown_tag("formats or, tags_with_separator, tag and json_schema")


def _unknown_tag(expected: str) -> PydanticCustomError:
    return PydanticCustomError("structural_tag", "expected a structural tag of {expected}", {"expected": expected})


def check_schema(schema: dict[str, JsonValue]) -> None:
    """Raise PydanticCustomError for a schema that is no JSON, or that an engine might take too long to compile.

    Engines compile it before they sample and cannot be stopped there. What that takes grows with nesting, alternatives
    and repetition.
    """
    size = len(json.dumps(schema, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if size > MAX_SCHEMA_BYTES:
        raise _too_large(f"at most {MAX_SCHEMA_BYTES} bytes of JSON", f"{size}")
    pending: list[tuple[JsonValue, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise PydanticCustomError(
                "schema", "expected a JSON schema of finite numbers, got {got}", {"got": str(value)}
            )
        if not isinstance(value, dict | list):
            continue
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_large(f"at most {MAX_SCHEMA_DEPTH} objects and lists within each other", "more")
        if isinstance(value, dict):
            _check_keywords(value)
        pending += [(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value)]


def _check_keywords(part: dict[str, JsonValue]) -> None:
    enum, pattern = part.get("enum"), part.get("pattern")
    if isinstance(enum, list) and len(enum) > MAX_ENUM_VALUES:
        raise _too_large(f"at most {MAX_ENUM_VALUES} values of an enum", f"{len(enum)}")
    named = part.get("patternProperties")
    for text in (pattern, *(named if isinstance(named, dict) else ())):
        if not isinstance(text, str):
            continue
        if len(text) > MAX_PATTERN_CHARS:
            raise _too_large(f"a pattern of at most {MAX_PATTERN_CHARS} characters", f"{len(text)}")
        repeats = 1
        for least, most in _COUNT.findall(text):
            digits = most or least or "1"
            repeats *= max(1, int(digits)) if len(digits) < 6 else MAX_PATTERN_REPEATS + 1
        if repeats > MAX_PATTERN_REPEATS:
            raise _too_large(f"a pattern whose counts multiply to at most {MAX_PATTERN_REPEATS}", "more")


def _too_large(bound: str, got: str) -> PydanticCustomError:
    message = "expected a JSON schema with {bound}, got {got}; simplify it"
    return PydanticCustomError("schema", message, {"bound": bound, "got": got})


class SamplingParams(WireRequest):
    """How tokens are sampled. Logprobs are under the distribution after temperature, top_k and top_p."""

    temperature: Float = Field(default=1.0, ge=0.0)
    """0 decodes greedily, with the logprobs of temperature 1."""
    top_p: Float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: Int = Field(default=-1, ge=-1)
    """-1 or 0 keeps the whole vocabulary."""
    max_tokens: Int = Field(default=256, ge=1)
    stop_token_ids: list[TokenId] = Field(default_factory=list[TokenId], max_length=1024, fail_fast=True)
    """Stop tokens in addition to the model's end-of-sequence token. A stop token is part of the output."""
    ignore_eos: bool = False
    logprobs: Int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Most likely tokens to return at each position, the sampled one among them. Needs an engine that returns them."""
    prompt_logprobs: Annotated[Int | None, Field(ge=0, le=MAX_PROMPT_TOP_LOGPROBS, exclude_if=is_none)] = None
    """Score the prompt, and return so many of the most likely tokens at each of its positions. 0 returns the logprobs
    of the prompt's tokens alone. Needs an engine that scores prompts."""
    structured_outputs: Annotated[StructuredOutputs | None, Field(exclude_if=is_none)] = None
    """A grammar that guides the sampling. Needs an engine with grammars. Logprobs are then of what the grammar leaves,
    and no learner computes them."""
    seed: Int | None = None
    """The same seed, prompt, weights and parameters give the same tokens, whatever else runs in the batch. SGLang
    ignores it unless it is started with `--enable-deterministic-inference`."""


def check_prompt_logprobs(prompts: Sequence[Sequence[int]], most_likely: int) -> None:
    """Raise INVALID_REQUEST for more prompt logprobs than a reply may have. `prompts` are their token ids."""
    positions = sum(len(prompt) - 1 for prompt in prompts)
    if (count := positions * max(1, most_likely)) > MAX_PROMPT_LOGPROBS:
        message = (
            f"prompt_logprobs: expected at most {MAX_PROMPT_LOGPROBS} logprobs in a reply, got {count} of {positions} "
            "prompt positions; lower it, or score fewer tokens"
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="prompt_logprobs")


class GenerateRequest(WireRequest):
    """One prompt to continue."""

    request_id: str | None = None
    model: str | None = None
    """Name of the policy. None is the service's default one; an unknown one is answered 404 `model_not_found`."""
    token_ids: list[TokenId] = Field(min_length=1, fail_fast=True)
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    min_weight_version: Int = Field(default=0, ge=0)
    """Oldest weight version of the policy that may answer. A replica with an older one loads it first, or answers 409
    `weights_behind`."""
    context_start: Int = Field(default=0, ge=0)
    """Index of the first prompt token that is new in this trajectory; for the text of the trace."""


@with_config(extra="ignore", ser_json_inf_nan=NON_FINITE)
class TokenLogprob(TypedDict):
    """A sampled token and the natural log of its probability under the sampling distribution.

    A dict, since an answer has thousands, and a model takes twice the time and several times the memory.
    """

    token_id: int
    logprob: float
    top_logprobs: NotRequired[list["TokenLogprob"]]
    """With `logprobs` of 1 or more: the most likely tokens, highest first, the sampled one among them; fewer than asked
    for when `top_k` or `top_p` left no more."""


class ChoiceLogprobs(WireReply):
    """Per-token logprobs, one entry for each id in `token_ids`."""

    content: list[TokenLogprob]


def choice_logprobs(
    token_ids: Iterable[int], logprobs: Iterable[float], top_logprobs: Sequence[TopLogprobs] = ()
) -> ChoiceLogprobs:
    """The logprobs of a choice. `top_logprobs` has an entry for each token, or none."""
    pairs = zip(token_ids, logprobs, strict=True)
    content = [TokenLogprob(token_id=token, logprob=logprob) for token, logprob in pairs]
    if top_logprobs:
        for entry, top in zip(content, top_logprobs, strict=True):
            entry["top_logprobs"] = [TokenLogprob(token_id=other, logprob=value) for other, value in top]
    return ChoiceLogprobs(content=content)


class PromptLogprobs(WireReply):
    """Logprobs at temperature 1 of the prompt's tokens from the second on, each given the tokens before it.

    They are of the weights that computed the prompt, without top_k and top_p.
    """

    logprobs: list[float]
    """[positions]."""
    top_ids: list[list[int]]
    """[positions, k]: the most likely tokens, highest first; k is `prompt_logprobs`, or the vocabulary if smaller."""
    top_logprobs: list[list[float]]
    """[positions, k]: their logprobs."""


class GeneratePiece(WireReply):
    """A line of a streamed generation: the next tokens; after the last, an error or what was traced."""

    token_ids: list[int] = Field(default_factory=list[int])
    logprobs: list[float] = Field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = Field(default_factory=list[TopLogprobs])
    """The most likely tokens of each position, if asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """The scored prompt, if asked for; in one line."""
    version: int = 0
    """Version of the weights that generated these tokens, or the oldest that it can be, until a later piece has
    `weight_versions`."""
    weight_versions: list[WeightSpan] = Field(default_factory=list[WeightSpan])
    """Spans of the last tokens of the stream up to here, which replace the versions of their pieces."""
    finish_reason: Literal["stop", "length", "abort"] | None = None
    """Set in the last line with tokens, which can be empty."""
    error: ErrorBody | None = None
    """Why the generation failed."""
    receipt: str = ""
    """Spans that the request added to its trace, as in the header `x-trackway-trace`."""


class GenerateChoice(WireReply):
    """One continuation."""

    index: int = 0
    finish_reason: Literal["stop", "length", "abort"]
    token_ids: list[int]
    logprobs: ChoiceLogprobs
    weight_versions: list[WeightSpan]
    """Spans over `token_ids`; more than one if the weights changed during the generation."""

    @cached_property
    def token_logprobs(self) -> list[float]:
        """The logprob of each token."""
        return [entry["logprob"] for entry in self.logprobs.content]

    @property
    def top_logprobs(self) -> list[TopLogprobs]:
        """The most likely tokens of each position. Empty unless asked for."""
        ranked = [entry["top_logprobs"] for entry in self.logprobs.content if "top_logprobs" in entry]
        if len(ranked) < len(self.logprobs.content):
            return []
        return [[(top["token_id"], top["logprob"]) for top in tops] for tops in ranked]

    @classmethod
    def of(cls, pieces: Sequence[GeneratePiece]) -> Self:
        """The choice of a whole stream, whose last piece has the finish reason."""
        spans: list[WeightSpan] = []
        ids, logprobs, tops = list[int](), list[float](), list[TopLogprobs]()
        for piece in pieces:
            add_span(spans, piece.version, len(ids), len(ids) + len(piece.token_ids))
            ids += piece.token_ids
            logprobs += piece.logprobs
            tops += piece.top_logprobs
            settle_spans(spans, piece.weight_versions)
        return cls.model_validate(
            {
                "finish_reason": pieces[-1].finish_reason,
                "token_ids": ids,
                "logprobs": choice_logprobs(ids, logprobs, tops),
                "weight_versions": spans,
            }
        )


class Usage(WireReply):
    """Token counts in OpenAI's names."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateReply(WireReply):
    """The continuation of one prompt."""

    request_id: str
    model: str
    created: int
    usage: Usage
    choices: list[GenerateChoice]
    prompt_logprobs: Annotated[PromptLogprobs | None, Field(exclude_if=is_none)] = None
    """The scored prompt, if asked for. None if the generation was aborted before."""


class WeightsReply(WireReply):
    """The weights of a replica."""

    version: int
    latest: int
    """The newest published version. Greater than `version` while the replica is behind."""
    model: str
    replica: str
    verdict: Verdict | None = None
    """Result of the proof after the load. None for the base weights."""
    transport: TransportName = "store"
    """How the replica can take new weights, besides from the store."""


class EngineLoad(WireReply):
    """The requests and the KV cache of a replica's engine."""

    running: int
    waiting: int
    preemptions: int
    """Since the engine's start."""
    kv_used: int
    """Tokens of the KV cache that running requests hold."""
    kv_tokens: int
    """Tokens that the KV cache holds, or 0 if unknown."""
    max_len: int
    """Longest prompt plus response in tokens."""
    callers: int = 1
    """Callers that have asked for the load lately, and share the replica."""


class EngineLoads(WireReply):
    """The load of every replica that answers. A replica that is still starting is left out."""

    replicas: list[EngineLoad]


class WeightInfo(WireReply):
    """vLLM's answer of `/weight_info`."""

    weight_version: str


class AbortRequest(WireRequest):
    """Generations to abort, by `request_id`; None aborts all."""

    request_ids: Annotated[list[str], Field(fail_fast=True)] | None = None


class AbortReply(WireReply):
    """Number of aborted generations. Each returns its tokens so far with `finish_reason` `abort`."""

    status: str = "aborted"
    aborted: int


class PauseRequest(WireRequest):
    """How to pause: let requests finish, abort them and return their tokens so far, or freeze them."""

    mode: PauseMode = "wait"


class PauseReply(WireReply):
    """The pause state, and how many requests remain (frozen ones count as running)."""

    paused: bool
    running: int
    waiting: int


class PausedReply(WireReply):
    """vLLM's answer of `/is_paused`."""

    is_paused: bool


class SleepReply(WireReply):
    """The memory that a replica has released; vLLM's `/is_sleeping` with further fields."""

    is_sleeping: bool
    asleep: list[MemoryPart] = Field(default_factory=list[MemoryPart])
    can_sleep: bool = False
    """True if its engine can release memory."""
    replica: str = ""


class SleepReplies(WireReply):
    """The sleep state of every replica."""

    replicas: list[SleepReply]


class ModelCard(WireReply):
    """One served model; OpenAI's fields, and vLLM's `max_model_len` and `root`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trackway"
    max_model_len: int
    root: str | None = Field(default=None, exclude_if=is_none)
    """Path of the model's folder at the service. None for a session's model."""


class ModelList(WireReply):
    """OpenAI's answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


BASE_POLICY = "base"
"""The policy of a service's model without published weights."""


class PolicyInfo(WireReply):
    """A policy: a name with a line of weight versions."""

    name: str
    is_default: bool = False
    """True if requests without a name get it."""
    loaded: bool = False
    """True if the replica that answers holds it in memory."""
    version: int | None = None
    """The weight version there. None unless it is loaded."""
    requests: int = 0
    """Requests in progress there, for a policy other than the default one."""


class Architecture(WireReply):
    """Values of a model's `config.json` that fix the shapes of its weights. None for a value without that name."""

    model_type: str
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    vocab_size: int | None = None

    @classmethod
    def parsed(cls, config: str) -> Self | None:
        """Return the values of a `config.json`, whose multimodal models have them in `text_config`. None if invalid."""
        try:
            raw = json.loads(config)
            return cls.model_validate({**raw, **raw.get("text_config", {})})
        except (ValueError, TypeError, AttributeError):
            return None

    def different(self, other: Self) -> str:
        """Return a value that differs, such as `vocab_size 512 instead of 256`. Empty if the other's weights fit."""
        theirs = other.model_dump()
        for name, own in self.model_dump().items():
            if None not in (own, theirs[name]) and own != theirs[name]:
                return f"{name} {theirs[name]} instead of {own}"
        return ""


class PolicyLimits(WireReply):
    """Limits of a replica. The trainer refuses a run beyond them before it starts."""

    max_policies: int
    """Policies at once, the default one among them."""
    bound: str
    """The setting that bounds their number, with its value."""
    remedy: str
    """How to raise the bound."""
    max_adapters: int | None = None
    """Most adapters at once on a server whose policies share one base. It takes adapters only. None elsewhere."""
    max_lora_rank: int | None = None
    """Largest rank of an adapter. None where adapters are merged, so that any rank fits."""
    architecture: Architecture | None = None
    """Architecture of the model. None if its `config.json` cannot be read."""


class PolicyList(WireReply):
    """Every policy that a request can name."""

    policies: list[PolicyInfo]
    limits: PolicyLimits | None = None
