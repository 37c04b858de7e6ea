"""vLLM as a replica's engine: a child process, or a server that is already running.

Pause, reload and abort are development routes, and access to them is control over the model: a server started by a
replica listens on 127.0.0.1, and an attached server must belong to this replica alone.

Weights come from a folder that the server can read, or from the learner's memory (weight_transport.py). An adapter is
loaded beside the base weights, and a request keeps the one that it began with, so requests in flight finish under
their version. Each request's `cache_salt` names the serving weights, so old KV is never reused under new weights, even
if vLLM cannot reset its prefix cache (while a frozen request holds blocks).
"""

import asyncio
import contextlib
import math
import os
import re
import tempfile
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

from trackway.clients.weights import WeightStore
from trackway.rollout.engines.protocol import EngineStats, MemoryPart, Swapping, top_logprobs
from trackway.rollout.engines.remote.control import Call, TokenChunk
from trackway.rollout.engines.remote.digests import Checksums, DigestValues
from trackway.rollout.engines.remote.engine import UNTOUCHED, RemoteEngine, require_untouched
from trackway.rollout.engines.remote.server import Json
from trackway.rollout.engines.remote.weight_transport import IpcReceiver
from trackway.rollout.engines.weight_folder import adaptable_layers, check_same_model, is_adapter, lacks_head, with_head
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import EngineLoad, PromptLogprobs, TopLogprobs
from trackway.wire.weights import WeightProof

_NO_TOKENIZER = "--skip-tokenizer-init"
_GENERATE = "/inference/v1/generate"
_MEMORY_S = 120.0
_PROGRESS_S = 2.0
_METRICS_S = 20.0  # a busy server may take seconds to respond
_CUT_PAUSES_S = (0.02, 0.1, 0.5)
_COUNTERS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total\{.*$", re.MULTILINE)
_GAUGES = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|num_preemptions_total|kv_cache_usage_perc)\{[^}]*\} (\S+)$",
    re.MULTILINE,
)
_CACHES = re.compile(r"^vllm:cache_config_info\{(.*)\} \S+$", re.MULTILINE)
_LABELS = re.compile(r'(num_gpu_blocks|(?<!\w)block_size)="(\d+)"')
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""
_NO_NUMBER = -9999.0
"""vLLM's value for a logprob of NaN or minus infinity."""
_SAFE_ON_ANY_MACHINE = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # seconds; longer than our clients keep a connection
    # The CPU build pins threads by local rank, so replicas on one machine would share a core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, the minimum; the default is 4
    "OMP_NUM_THREADS": "1",
}


def safe_environment() -> dict[str, str]:
    """Variables of a vLLM that starts on any machine. What this process has of them stays."""
    return {name: os.environ.get(name, value) for name, value in _SAFE_ON_ANY_MACHINE.items()}


class VllmEngine(RemoteEngine):
    """An `Engine` over the routes of vLLM 0.32."""

    version_route = "/weight_info"
    unload_route = "/v1/unload_lora_adapter"
    checksum_route = "/weight_checker"
    loses_weights_asleep = False
    answers_frozen = True

    def __init__(self, settings: RolloutSettings) -> None:
        super().__init__(settings)
        self._salt = uuid.uuid4().hex
        self._watch: asyncio.Task[None] | None = None
        self._sleeping: set[MemoryPart] = set()
        self._ipc: IpcReceiver | None = None
        if settings.weights_transport == "ipc" and settings.weights_url is not None:
            self._ipc = IpcReceiver(lambda: self.http, WeightStore(settings.weights_url))
        self._wanted: tuple[Path, int, WeightProof] | None = None
        """Version that was to be loaded last."""

    @property
    def guides(self) -> bool:
        """Also unless `engine_args` say so: the tokenizer of some models runs code of theirs."""
        return super().guides and _NO_TOKENIZER not in self.settings.engine_args

    async def stop(self) -> None:
        """Implement `Engine.stop`."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await super().stop()

    async def load_weights(
        self, folder: Path, version: int, proof: WeightProof, swapping: Swapping = nullcontext
    ) -> None:
        """Implement `Engine.load_weights`. Rejects in advance what would crash vLLM or be misread silently."""
        if not is_adapter(folder):
            # A reload that raises in a worker terminates the whole server.
            await asyncio.to_thread(check_same_model, folder, self.settings.model_path)
        self._wanted = (folder, version, proof)
        await self._or_from_store(super().load_weights(folder, version, proof, swapping), swapping)

    async def wake_up(self, parts: Sequence[MemoryPart]) -> None:
        """Implement `Engine.wake_up`."""
        await self._or_from_store(super().wake_up(parts))

    def stats(self) -> EngineStats:
        """Implement `Engine.stats`."""
        stats, ipc = super().stats(), self._ipc
        return stats if ipc is None else stats._replace(transferred_weights=ipc.loads, weight_fallbacks=ipc.fallbacks)

    async def load(self) -> EngineLoad:
        """Implement `Engine.load` by vLLM's metrics, summed over its engines."""
        text = str((await self.http.get("/metrics", timeout_s=_METRICS_S)).get("text"))
        gauges: dict[str, list[float]] = {}
        for name, value in _GAUGES.findall(text):
            gauges.setdefault(name, []).append(float(value))
        capacities = [
            int(labels.get("num_gpu_blocks", 0)) * int(labels.get("block_size", 0))
            for labels in (dict(_LABELS.findall(line)) for line in _CACHES.findall(text))
        ]
        usages = gauges.get("kv_cache_usage_perc", [])
        return EngineLoad(
            running=int(sum(gauges.get("num_requests_running", []))),
            waiting=int(sum(gauges.get("num_requests_waiting", []))),
            preemptions=int(sum(gauges.get("num_preemptions_total", []))),
            kv_used=int(sum(usage * tokens for usage, tokens in zip(usages, capacities, strict=False))),
            kv_tokens=sum(capacities),
            max_len=self.max_len,
        )

    async def _or_from_store(self, proving: Awaitable[None], swapping: Swapping = nullcontext) -> None:
        """Load the weights from the store if these were transferred and their proof fails."""
        try:
            await proving
        except TrackwayError as error:
            if self._ipc is None or self._wanted is None or not self._ipc.was_used(self._wanted[1]):
                raise
            self._ipc.give_up(self._wanted[1], error)
            await super().load_weights(*self._wanted, swapping)

    async def _transferred(self, version: int) -> bool:
        """Return whether the version came from the learner's memory.

        Weights that were verified before come from the store, as those for a server that has just started, since it may
        be the one after a transfer that ended it.
        """
        is_new = self._wanted is not None and self._wanted[1] == version
        return self._ipc is not None and self.version > 0 and is_new and await self._ipc.load(version)

    def _command(self, port: int) -> list[str]:
        settings = self.settings
        switches = {
            "--no-enable-prefix-caching": not settings.prefix_caching,
            "--enforce-eager": settings.enforce_eager,
            "--enable-sleep-mode": settings.enable_sleep and settings.device != "cpu",  # it would not start there
            # vLLM 0.32 ends on a CPU when it computes a part of a prompt whose request has a seed.
            "--no-enable-chunked-prefill": settings.device == "cpu",
            "--enable-lora": self.takes_adapters,
            _NO_TOKENIZER: not self.guides and _NO_TOKENIZER not in settings.engine_args,
        }
        adapters = {
            "--max-lora-rank": next((rank for rank in _RANKS if rank >= settings.max_lora_rank), _RANKS[-1]),
            "--max-loras": settings.max_loras,
        }
        options = {
            "--host": "127.0.0.1",
            "--port": port,
            "--model": settings.model_path,
            "--served-model-name": settings.model_name,
            "--dtype": self.dtype,
            "--max-model-len": self.max_len,
            "--max-num-seqs": settings.max_num_seqs,
            "--tensor-parallel-size": settings.tensor_parallel_size,
            "--gpu-memory-utilization": settings.gpu_memory_utilization,
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",  # no sampling defaults from the model folder
            **(adapters if self.takes_adapters else {}),
            **({} if settings.config_overrides is None else {"--hf-overrides": settings.config_overrides}),
            **({} if self._ipc is None else {"--weight-transfer-config": '{"backend": "ipc"}'}),
        }
        return [
            # The CPU build's `vllm` command does not start.
            *(str(settings.engine_python), "-m", "vllm.entrypoints.openai.api_server"),
            *(str(part) for option in options.items() for part in option),
            # With an adapter of the head vLLM 0.32 dies of prompt logprobs beside other requests.
            *(("--lora-target-modules", *adaptable_layers(settings.model_path)) if self.takes_adapters else ()),
            *("--enable-scale-out", "--enable-prompt-tokens-details"),
            "--disable-uvicorn-access-log",
            *(switch for switch, on in switches.items() if on),
        ]

    def _environment(self, folder: Path) -> dict[str, str]:
        adapters = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.takes_adapters else {}
        # vLLM's backend takes the handles of GPU memory as a pickle.
        transfer = {} if self._ipc is None else {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        return {**safe_environment(), **adapters, **transfer}

    async def _prepare(self) -> None:
        loaded = await self.version_there()
        if not self.shared:
            await self.thaw()
        if self.shared or loaded == UNTOUCHED:
            self.whole_folder = self.settings.model_path
        if self.shared:
            require_untouched(self.http, loaded)
        elif loaded == UNTOUCHED:
            await self._call_weights(self.control.serving.name)
        else:  # the server was used before
            await self.freeze()
            await self.swap(self.settings.model_path, self.control.serving.name)
            await self.thaw()
        await self._check_logprobs()
        if held := await self.base_checksums():
            digests = await asyncio.to_thread(DigestValues, self.control.serving.folder, self.dtype, held)
            if self.shared and not digests.forms:
                raise TrackwayError(
                    ErrorCode.CONFLICT,
                    f"expected {self.http.base_url} to serve {self.settings.model_path}, got none of its {len(held)} "
                    "parameters as there; start the server with this model in this dtype, or fix model_path",
                )
            self.server_digests = digests if digests.forms else None
        self._watch = asyncio.create_task(self._watch_progress(), name="vllm-progress")

    def _by_rank(self, reply: Json) -> Checksums:
        return reply["checksums"]

    async def _watch_progress(self) -> None:
        """Non-streamed responses show no progress. vLLM's counters do."""
        before: list[str] = []
        while True:
            await asyncio.sleep(_PROGRESS_S)
            if not self.calls.sent:
                continue
            with contextlib.suppress(TrackwayError):
                text = str((await self.http.get("/metrics", timeout_s=_METRICS_S)).get("text"))
                now = _COUNTERS.findall(text)
                if now != before:
                    self.calls.moved()
                before = now

    async def _check_logprobs(self) -> None:
        """With top_k=1 the only token left has logprob 0 in the sampling distribution, and in no other."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "detokenize": False}
        reply = await self.http.post(_GENERATE, {"token_ids": [0], "sampling_params": sampling})
        logprob = reply["choices"][0]["logprobs"]["content"][0]["logprob"]
        if logprob != 0.0:
            raise TrackwayError(
                ErrorCode.ENGINE_FAILED,
                f"expected logprobs of the sampling distribution from {self.http.base_url}, got {logprob} for a sure "
                "token; start vLLM with --logprobs-mode processed_logprobs",
            )

    async def _tokens(self, call: Call) -> AsyncGenerator[TokenChunk]:
        sampling: Json = {
            **call.params.model_dump(include={"temperature", "top_p", "top_k", "seed"}),
            "max_tokens": call.limit,
            "stop_token_ids": sorted(call.stops),
            "ignore_eos": True,  # the model's own are included in the stop ids
            "logprobs": call.params.logprobs,
            "prompt_logprobs": call.params.prompt_logprobs,
            "detokenize": False,
        }
        if call.params.structured_outputs is not None:
            sampling["structured_outputs"] = call.params.structured_outputs.model_dump(exclude_none=True)
        body: Json = {
            "request_id": call.rid,
            "token_ids": call.token_ids,
            "sampling_params": sampling,
            "cache_salt": f"{self.control.held}-{self._salt}",
            **self._model(),
        }
        # vLLM reports the version of the last load; a request keeps the adapter that it began with.
        bound = call.held if self.takes_adapters else None
        # Non-streamed responses cost a tenth of the CPU, and only complete responses have the weights of each token and
        # the logprobs of the prompt.
        most_likely = call.params.prompt_logprobs
        answers = self._stream(body) if call.streamed and most_likely is None else self._whole(body)
        async with aclosing(answers):
            async for answer in answers:
                call.reused = max(call.reused, _cached(answer))
                for choice in answer["choices"]:
                    for span in choice["weight_versions"] or []:
                        self.untouched(span["version"])
                    chunk = _tokens(choice, self.control.held, bound, call.params.logprobs)
                    scores = None if most_likely is None else _scores(answer, call.token_ids, most_likely)
                    yield replace(chunk, prompt_logprobs=scores)

    async def _whole(self, body: Json) -> AsyncGenerator[Json]:
        yield await self.http.post(_GENERATE, body, timeout_s=None, idempotent=True)

    async def _stream(self, body: Json) -> AsyncGenerator[Json]:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with aclosing(self.http.events(_GENERATE, body)) as events:
            async for event in events:
                if "error" in event:
                    refused = event["error"].get("code") == HTTPStatus.BAD_REQUEST
                    code = ErrorCode.INVALID_REQUEST if refused else ErrorCode.ENGINE_FAILED
                    raise TrackwayError(code, f"vLLM ended a stream: {event['error']}")
                yield event

    async def cut(self, calls: Sequence[Call]) -> None:
        """Repeated if necessary: vLLM ignores ids that it does not know yet, such as a request still on its way."""
        for pause_s in _CUT_PAUSES_S:
            ids = [f"generate-tokens-{call.rid}" for call in calls]  # vLLM's prefix for this route
            await self.http.post("/abort_requests", {"request_ids": ids}, idempotent=True)
            await asyncio.sleep(pause_s)
            calls = [call for call in calls if call in self.calls.sent]
            if not calls:
                return

    async def freeze(self) -> None:
        # clear_cache is not ignored here, contrary to its documentation: it would restart frozen requests.
        await self.http.post("/pause", params={"mode": "keep", "clear_cache": "false"}, idempotent=True)

    async def thaw(self) -> None:
        await self.http.post("/resume", idempotent=True)

    async def swap(self, folder: Path, name: str) -> None:
        if is_adapter(folder):
            await self._load_whole(self.settings.model_path, 0)
            await self.load_adapter(folder, name)
            self.unload_old_adapters()
        else:
            await self._load_whole(folder, self.control.version_of(name))
            self.adapter = None
        if not self.shared:
            await self._call_weights(name)
            await self.http.post("/reset_prefix_cache", idempotent=True)

    async def _send_adapter(self, body: Json) -> None:
        """Without `load_inplace`: with it vLLM 0.32 reads the files again at every step of a request, so an
        earlier request's adapter replaces the new one."""
        try:
            await self.http.post("/v1/load_lora_adapter", body, timeout_s=self.settings.engine_start_s)
        except TrackwayError as error:
            if error.detail.get("status") != HTTPStatus.NOT_FOUND:
                raise
            message = (
                f"expected {self.http.base_url} to load adapters, got no such route; start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set max_lora_rank=0"
            )
            raise TrackwayError(ErrorCode.ENGINE_FAILED, message) from error

    def _model(self) -> Json:
        return {} if self.adapter is None else {"model": self.adapter}

    async def _load_whole(self, folder: Path, version: int) -> None:
        if self.takes_adapters:
            if folder == self.whole_folder:
                return
            self.whole_folder = None
            await self.control.cut_short(self.calls.sent)  # they would go on with their adapter on other base weights
        if not await self._transferred(version):
            await self._reload_whole(folder)
        self.whole_folder = folder

    async def _reload_whole(self, folder: Path) -> None:
        trusted = folder in (self.control.serving.folder, self.settings.model_path)
        if trusted and await asyncio.to_thread(lacks_head, folder, self.settings.model_path):
            # These weights are verified, and the head of the rejected ones must not stay.
            with tempfile.TemporaryDirectory(prefix="trackway-vllm-") as scratch:
                await self._reload(await asyncio.to_thread(with_head, folder, Path(scratch) / "weights"))
        else:
            await self._reload(folder)

    async def _reload(self, folder: Path) -> None:
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.http.post("/collective_rpc", load, timeout_s=self.settings.engine_start_s, idempotent=True)

    async def _call_weights(self, name: str) -> None:
        await self.http.post("/update_weight_version", {"new_version": name}, idempotent=True)

    async def give_back(self, part: MemoryPart) -> None:
        if part in self._sleeping:
            return
        await self.http.post("/sleep", params={"level": "1", "mode": "keep"}, timeout_s=_MEMORY_S)
        self._sleeping = {"weights", "kv_cache"}
        if part == "kv_cache":
            await self._wake({"weights"})

    async def take_again(self, part: MemoryPart) -> None:
        await self._wake(self._sleeping - (self.control.asleep - {part}))

    async def _wake(self, parts: set[MemoryPart]) -> None:
        await self.http.post("/wake_up", params={"tags": sorted(parts)}, timeout_s=_MEMORY_S)
        self._sleeping -= parts
        if not self._sleeping and self.control.frozen:
            await self.freeze()  # vLLM resumes by itself when all its memory is allocated

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "skip_reading_prefix_cache": True, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, **self._model()}
        return _scores(await self.http.post(_GENERATE, body, idempotent=True), token_ids, 0).logprobs


def _tokens(choice: Json, held: str, bound: str | None, tops: int) -> TokenChunk:
    """A choice of a response or event. Only the last has spans, the others are of the loaded weights or older ones.

    `bound` names the weights of a request that keeps them whatever is loaded. `tops` is the number of most likely
    tokens that it asks for.
    """
    content = (choice["logprobs"] or {}).get("content") or []
    logprobs = [math.nan if entry["logprob"] == _NO_NUMBER else entry["logprob"] for entry in content]
    ranked = [_ranked(entry, tops) for entry in content] if tops else []
    spans = [] if bound is not None else choice["weight_versions"] or []
    names = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    # Spans count from the first token of the response; an event has its last tokens.
    newest = names[len(names) - len(logprobs) :] if names else [bound or held] * len(logprobs)
    return TokenChunk(choice["token_ids"], logprobs, newest, choice["finish_reason"], ranked, names)


def _ranked(entry: Json, count: int) -> TopLogprobs:
    pairs = [(top["token_id"], top["logprob"]) for top in entry["top_logprobs"] if top["logprob"] != _NO_NUMBER]
    return top_logprobs(pairs, entry["token_id"], entry["logprob"], count)


def _scores(answer: Json, token_ids: Sequence[int], most_likely: int) -> PromptLogprobs:
    """The scored prompt. Each position has its token and the `most_likely` ones, which include it or not."""
    scores = PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[])
    for token, entry in zip(token_ids[1:], (answer["prompt_logprobs"] or [])[1:], strict=True):
        logprob = entry[str(token)]["logprob"]
        scores.logprobs.append(math.nan if logprob == _NO_NUMBER else logprob)
        ranked = sorted((found["rank"], int(name), found["logprob"]) for name, found in entry.items())
        best = [place for place in ranked if len(entry) <= most_likely or place[1] != token]
        scores.top_ids.append([other for _, other, _ in best])
        scores.top_logprobs.append([value for _, _, value in best])
    return scores


def _cached(reply: Json) -> int:
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0
