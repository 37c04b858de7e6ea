"""SGLang as a replica's engine: a child process, or a server that is already running.

Field names follow SGLang 0.5.23 (`managers/io_struct.py`). Three of its behaviours shape this file:
a weight update that flushes the cache while a request is alive kills the scheduler, so a cache namespace (`extra_key`)
per weights keeps old KV from new requests instead. Releasing memory while a request is alive kills it too; and
`ignore_eos` makes it ignore `stop_token_ids`, which are therefore checked here as well.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from trackway.rollout.engines.protocol import FinishReason, MemoryPart, top_logprobs
from trackway.rollout.engines.remote.control import Call, TokenChunk
from trackway.rollout.engines.remote.digests import Checksums, DigestChanges
from trackway.rollout.engines.remote.engine import UNTOUCHED, RemoteEngine, require_untouched
from trackway.rollout.engines.remote.server import Json
from trackway.rollout.engines.weight_folder import is_adapter
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import EngineLoad, PromptLogprobs, TopLogprobs

T = TypeVar("T")

UNUSED_POSITIONS = 6
"""SGLang 0.5.23 takes prompts that leave 7 positions of its context length free, and ends a response 2 before its end
(`tp_worker.py`: `max_req_input_len`, `scheduler.py`: `init_req_max_new_tokens`)."""
_STREAM_INTERVAL = 16  # tokens per event, after the first: events cost CPU on both sides
_SCORED_STREAM_INTERVAL = 256  # each event of a scored prompt repeats the scores
_LINGER_S, _POLL_S = 10.0, 0.05
# SGLang returns logprobs after top_p only with the candidates' ids, which need a finite top_k.
_MOST_CANDIDATES = 1024
_SEVERAL_NODES = ("--dp", "--data-parallel", "--nnodes", "--dist-init-addr")
"""Arguments of servers whose ranks need a port to meet: on several nodes, or in several groups."""
_TAGS: Mapping[MemoryPart, list[str]] = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
"""SGLang's names of what sleeps."""
_NAN = "NaN happened"
_IMPOSSIBLE = -3e38
"""Logprobs of tokens that a grammar excludes are below it."""
_CODES = {400: ErrorCode.INVALID_REQUEST, 503: ErrorCode.UNAVAILABLE}


def on_loopback(folder: Path, engine_args: Sequence[str]) -> dict[str, str]:
    """Variables of a server whose ranks run on this machine only: they meet in a file in `folder`.

    Otherwise torch opens a port on all interfaces, which has no login.
    """
    if any(arg.startswith(_SEVERAL_NODES) for arg in engine_args):
        return {}
    return {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/ranks", "GLOO_SOCKET_IFNAME": "lo"}


class _Finish(BaseModel):
    """The finish reason; SGLang reports its own errors as aborts with a status."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | list[int] | None = None
    status_code: int | None = None
    message: str | None = None


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Meta(BaseModel):
    """The `meta_info` fields in use. A request aborted in the queue has few of them."""

    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = Field(default_factory=list)
    output_token_sampling_logprobs: list[float] | None = None
    """Logprobs after top_k and top_p. The other fields have those before."""
    output_token_sampling_mask: list[list[int]] | None = None
    """The ids that top_k and top_p keep."""
    output_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] = Field(default_factory=list)
    input_token_logprobs: list[tuple[float | None, int, str | None]] = Field(default_factory=list)
    input_top_logprobs: list[list[tuple[float, int, str | None]] | None] = Field(default_factory=list)


class _Answer(BaseModel):
    meta_info: _Meta


class SglangEngine(RemoteEngine):
    """An `Engine` over SGLang's native routes."""

    version_route = "/model_info"
    unload_route = "/unload_lora_adapter"
    checksum_route = "/weights_checker"

    def __init__(self, settings: RolloutSettings) -> None:
        super().__init__(settings)
        self._overlaps = False
        """True if the server samples a token before it has handled the one before."""

    @property
    def guides(self) -> bool:
        """Only if wanted: SGLang with a tokenizer detokenizes every token."""
        return self.settings.engine_url is not None or (self.settings.engine_tokenizer and super().guides)

    def _longest(self, wanted: int) -> int:
        return min(wanted, self.facts.max_positions - UNUSED_POSITIONS)

    def _command(self, port: int) -> list[str]:
        settings = self.settings
        options = {
            "--model-path": settings.model_path,
            "--served-model-name": settings.model_name,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": self.dtype,
            "--context-length": self.max_len + UNUSED_POSITIONS,
            "--max-running-requests": settings.max_num_seqs,
            "--tp-size": settings.tensor_parallel_size,
            "--mem-fraction-static": settings.gpu_memory_utilization,
            "--stream-interval": _STREAM_INTERVAL,
        }
        if self.takes_adapters:
            options |= {"--max-lora-rank": settings.max_lora_rank, "--max-loras-per-batch": settings.max_loras}
            options["--lora-target-modules"] = "all"
        if settings.config_overrides is not None:
            options["--json-model-override-args"] = settings.config_overrides
        switches = {
            "--enable-lora": self.takes_adapters,
            "--skip-tokenizer-init": not self.guides,  # token ids in and out
            "--incremental-streaming-output": True,  # otherwise each event repeats all tokens so far
            "--disable-radix-cache": not settings.prefix_caching,
            "--disable-cuda-graph": settings.enforce_eager,
            "--enable-memory-saver": settings.enable_sleep,
            "--enable-fp32-lm-head": settings.float32_head,
            # Needed where tokens of one request may be of several versions; see _load_whole.
            "--disable-overlap-schedule": settings.update_mode == "keep" and not self.takes_adapters,
        }
        return [
            *(str(settings.engine_python), "-m", "sglang.launch_server"),
            *(str(part) for option in options.items() for part in option),
            *(switch for switch, on in switches.items() if on),
        ]

    def _environment(self, folder: Path) -> dict[str, str]:
        after_temperature = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "false"}
        # Else its CUDA graphs, gigabytes, stay on the GPU while it sleeps.
        graphs = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"} if self.settings.enable_sleep else {}
        return {**after_temperature, **graphs, **on_loopback(folder, self.settings.engine_args)}

    async def _prepare(self) -> None:
        loaded = await self.version_there()
        if self.shared:
            require_untouched(self.http, loaded)
            self.whole_folder = self.settings.model_path
            return
        server = await self.http.get("/server_info")
        self._overlaps = not server["disable_overlap_schedule"]
        if loaded == UNTOUCHED:
            self.whole_folder = self.settings.model_path
            await self._call_weights(self.control.serving.name)
        else:  # the server was used before
            await self.freeze()
            await self.swap(self.settings.model_path, self.control.serving.name)
        await self.thaw()
        exact = server["quantization"] is None and not self.facts.quantized and server["dtype"] in ("auto", self.dtype)
        if exact and (held := await self.base_checksums()):
            self.server_digests = DigestChanges(self.control.serving.folder, self.dtype, held)

    async def load(self) -> EngineLoad:
        """Implement `Engine.load`, summed over the server's groups of ranks. It does not count retractions there."""
        groups = (await self.http.get("/v1/loads", params={"include": "core"}))["loads"]

        def total(name: str) -> int:
            return sum(int(group[name]) for group in groups)

        return EngineLoad(
            running=total("num_running_reqs"),
            waiting=total("num_waiting_reqs"),
            preemptions=0,
            kv_used=total("num_used_tokens"),
            kv_tokens=total("max_total_num_tokens"),
            max_len=self.max_len,
        )

    def _by_rank(self, reply: Json) -> Checksums:
        return {
            f"tp{rank}:{name}": digest
            for rank, held in enumerate(reply["ranks"])
            for name, digest in held["checksums"].items()
        }

    async def _tokens(self, call: Call) -> AsyncGenerator[TokenChunk]:
        params = call.params
        truncated = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)
        top_k = params.top_k if params.top_k > 0 else -1
        if truncated and top_k < 0:
            top_k = min(_MOST_CANDIDATES, self.facts.vocab_size)
        most_likely = params.prompt_logprobs
        tops_num = max(params.logprobs, most_likely or 0)
        body: Json = {
            "input_ids": call.token_ids,
            "rid": call.rid,
            "sampling_params": _sampling(call, top_k),
            "return_logprob": True,
            "logprob_start_len": -1 if most_likely is None else 0,
            "return_sampling_mask": truncated,
            "extra_key": self._key(),
            "stream": True,
            **({"top_logprobs_num": tops_num} if tops_num else {}),
            **self._model(),
        }
        seen = 0
        async with aclosing(self.http.events("/generate", body)) as events:
            async for event in events:
                meta = _meta(event)
                self.untouched(meta.weight_version)
                call.reused = max(call.reused, meta.cached_tokens)
                total = max(seen, meta.completion_tokens)
                if self.takes_adapters:  # SGLang reports the last load; a request keeps the adapter that it began with
                    newest, names = [call.held] * total, []
                else:
                    newest = _newest(meta, total, self.control.held)
                    names = newest if meta.weight_versions else []
                chunk = _tokens(meta, seen, total, truncated, newest[seen:])
                tops = _tops(meta, chunk, truncated, params.logprobs) if params.logprobs else ()
                begins = seen == 0 and total > 0
                scores = self._scores(meta, call.token_ids, most_likely) if begins and most_likely is not None else None
                yield replace(chunk, top_logprobs=tops, all_names=names, prompt_logprobs=scores)
                seen = total

    async def cut(self, calls: Sequence[Call]) -> None:
        if len(calls) > 1 and len(calls) == len(self.calls.sent) and not self.shared:
            bodies: list[Json] = [{"abort_all": True}]
        else:
            bodies = [{"rid": call.rid} for call in calls]
        await asyncio.gather(*(self.http.post("/abort_request", body, idempotent=True) for body in bodies))

    async def freeze(self) -> None:
        await self.http.post("/pause_generation", {"mode": "in_place"}, idempotent=True)

    async def thaw(self) -> None:
        await self.http.post("/continue_generation", {}, idempotent=True)

    async def swap(self, folder: Path, name: str) -> None:
        if not is_adapter(folder):
            await self._load_whole(folder, name)
            self.adapter = None
            return
        if self.whole_folder != self.settings.model_path:
            await self._load_whole(self.settings.model_path, name)
        await self.load_adapter(folder, name)
        if not self.shared:
            await self._call_weights(name)
        self.unload_old_adapters()

    async def _send_adapter(self, body: Json) -> None:
        reply = await self.http.post("/load_lora_adapter", body, timeout_s=self.settings.engine_start_s)
        if not reply.get("success"):
            message = f"SGLang did not load {body['lora_path']}: {reply.get('error_message')}"
            raise TrackwayError(ErrorCode.ENGINE_FAILED, message)

    def _model(self) -> Json:
        return {} if self.adapter is None else {"lora_path": self.adapter}

    def _key(self) -> str:
        """A cache namespace of the loaded weights, which other replicas of a shared server do not use."""
        return self.adapters.name(self.control.held) if self.shared else self.control.held

    async def _call_weights(self, name: str) -> None:
        body = {"new_version": name, "abort_all_requests": False}
        await self.http.post("/update_weight_version", body, idempotent=True)

    async def _load_whole(self, folder: Path, name: str) -> None:
        if self.shared:  # the base, as it started
            return
        self.whole_folder = None
        if self.takes_adapters or self._overlaps:
            # Adapters must not continue on other base weights. With overlap SGLang 0.5.23 omits the pending batch when
            # it counts the tokens of a version.
            await self.control.cut_short(self.calls.sent)
        body = {
            "model_path": str(folder),
            "weight_version": name,
            "abort_all_requests": False,
            "keep_pause": True,
            "flush_cache": False,
        }
        reply = await self.http.post("/update_weights_from_disk", body, timeout_s=self.settings.engine_start_s)
        if not reply.get("success"):
            raise TrackwayError(ErrorCode.ENGINE_FAILED, f"SGLang did not load {folder}: {reply.get('message')}")
        self.whole_folder = folder
        if not self.calls.sent:
            with suppress(TrackwayError):  # frees memory sooner; nothing depends on it
                await self.http.post("/flush_cache", idempotent=True)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        body: Json = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": f"probe-{self._key()}",
            **self._model(),
        }
        return self._scores(_meta(await self.http.post("/generate", body, idempotent=True)), token_ids, 0).logprobs

    def _scores(self, meta: _Meta, token_ids: Sequence[int], most_likely: int) -> PromptLogprobs:
        scored = meta.input_token_logprobs[1:]
        tops = meta.input_top_logprobs[1:] if most_likely else [[] for _ in scored]
        last = self.facts.vocab_size - 1  # SGLang 0.5.23 names this token 0, beside the logprob that is its own
        if [token for _, token, _ in scored] != [token if token != last else 0 for token in token_ids[1:]]:
            message = f"expected input_token_logprobs of {len(token_ids) - 1} tokens, got {scored}; check engine_url"
            raise TrackwayError(ErrorCode.ENGINE_FAILED, message)
        best = [(top or [])[:most_likely] for _, top in zip(scored, tops, strict=True)]
        return PromptLogprobs(
            logprobs=[float("nan") if logprob is None else logprob for logprob, _, _ in scored],
            top_ids=[[token for _, token, _ in row] for row in best],
            top_logprobs=[[logprob for logprob, _, _ in row] for row in best],
        )

    async def give_back(self, part: MemoryPart) -> None:
        await self._empty()
        if part == "weights":
            self.whole_folder = None
        await self.http.post("/release_memory_occupation", {"tags": _TAGS[part]})

    async def _empty(self) -> None:
        """Wait until the scheduler has no request left. An aborted request ends with its next step."""
        end = time.monotonic() + _LINGER_S
        while True:
            try:
                await self.http.post("/flush_cache", idempotent=True)
                return
            except TrackwayError as error:
                if error.code is not ErrorCode.INVALID_REQUEST or time.monotonic() > end:
                    raise
            await asyncio.sleep(_POLL_S)

    async def take_again(self, part: MemoryPart) -> None:
        await self.http.post("/resume_memory_occupation", {"tags": _TAGS[part]})


def _sampling(call: Call, top_k: int) -> Json:
    params = call.params
    sampling: Json = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": top_k,
        "max_new_tokens": call.limit,
        "stop_token_ids": sorted(call.stops),
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
    }
    if params.prompt_logprobs is not None:
        sampling["stream_interval"] = _SCORED_STREAM_INTERVAL
    if params.structured_outputs is not None:
        tag = params.structured_outputs.structural_tag
        grammar = {"json_schema": params.structured_outputs.schema_text} if tag is None else {"structural_tag": tag}
        sampling |= {**grammar, "ignore_eos": False}
    return sampling if params.seed is None else {**sampling, "sampling_seed": params.seed}


def _meta(event: Json) -> _Meta:
    """The event's `meta_info`. Raises an error that SGLang reports inside a stream."""
    if "error" in event:
        message = event["error"].get("message") if isinstance(event["error"], dict) else event["error"]
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"SGLang refused the request: {message}")
    try:
        meta = _Answer.model_validate(event).meta_info
    except ValidationError as error:
        message = f"expected SGLang's answer to /generate, got {str(event)[:200]}: {error}; use SGLang 0.5.23"
        raise TrackwayError(ErrorCode.ENGINE_FAILED, message) from error
    finish = meta.finish_reason
    if finish is not None and finish.type == "abort" and finish.status_code is not None:
        code = _CODES.get(finish.status_code, ErrorCode.ENGINE_FAILED)
        raise TrackwayError(code, f"SGLang ended the request with {finish.status_code}: {finish.message}")
    if finish is not None and finish.matched == _NAN:
        raise TrackwayError(ErrorCode.ENGINE_FAILED, f"SGLang ended the request: {_NAN}; check the training run")
    return meta


def _tokens(meta: _Meta, seen: int, total: int, truncated: bool, names: list[str]) -> TokenChunk:
    """Tokens [seen, total) of the response. An event has these, or the whole response without our flag."""
    rows = meta.output_token_logprobs[seen - total :] if total > seen else []
    logprobs = [float("nan") if row[0] is None else row[0] for row in rows]
    if truncated:
        logprobs = (meta.output_token_sampling_logprobs or [])[seen - total :] if rows else []
    if len(rows) != total - seen or len(logprobs) != len(rows):
        message = (
            f"expected {total - seen} logprobs of the sampling distribution, got {len(logprobs)} for {len(rows)} "
            "tokens; use SGLang 0.5.23 or newer"
        )
        raise TrackwayError(ErrorCode.ENGINE_FAILED, message)
    finish: FinishReason | None = meta.finish_reason.type if meta.finish_reason else None
    return TokenChunk([row[1] for row in rows], logprobs, names, finish)


def _tops(meta: _Meta, chunk: TokenChunk, truncated: bool, count: int) -> list[TopLogprobs]:
    """The most likely tokens of the chunk's positions, under the sampling distribution.

    SGLang's are those before top_k and top_p, which shift all that they keep by the same amount.
    """
    new = len(chunk.token_ids)
    best, kept = _last(meta.output_top_logprobs, new), _last(meta.output_token_sampling_mask or [], new)
    if len(best) != new or (truncated and len(kept) != new):
        message = f"expected top_logprobs of {new} tokens, got {len(best)}, and {len(kept)} lists of candidates"
        raise TrackwayError(ErrorCode.ENGINE_FAILED, f"{message}; use SGLang 0.5.23 or newer")
    tops: list[TopLogprobs] = []
    for place, (before, token, _) in enumerate(_last(meta.output_token_logprobs, new)):
        logprob = chunk.logprobs[place]
        shift = logprob - (before or 0.0)
        pairs = [
            (other, value + shift) for value, other, _ in best[place] or [] if value is not None and value > _IMPOSSIBLE
        ]
        if truncated:
            pairs = [(other, value) for other, value in pairs if other in kept[place]]
        tops.append(top_logprobs(pairs, token, logprob, count))
    return tops


def _last(values: Sequence[T], count: int) -> Sequence[T]:
    return values[len(values) - count :] if len(values) >= count else []


def _newest(meta: _Meta, total: int, held: str) -> list[str]:
    """The newest weights that each token can be of: by span, else the event's, else the loaded ones."""
    names = [meta.weight_version or held] * total
    for span in meta.weight_versions or []:
        names[span.start : span.end] = [span.version] * (min(span.end, total) - span.start)
    return names
