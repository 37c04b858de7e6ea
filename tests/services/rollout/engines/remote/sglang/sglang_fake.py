"""A server that speaks SGLang 0.5.23's protocol without a model, for tests of what a real one does not do on demand.

`tests/sglang/core/test_contract.py` compares its answers with a real server's. What would end the real scheduler is
kept in `Fake.crimes`, as is whatever a real server would do in silence and no client may ask for: fields that it
ignores, KV of other weights reused, tokens from memory given back.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict
from safetensors.numpy import save_file

from tests.services.rollout.engines.remote import fake_server

LAYER = "model.layers.0.self_attn.q_proj"
VOCAB = 50
CONTEXT = 256
EOS = 2
NAN = "NaN happened"
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
"""The finish reason of a request that was aborted before it began."""
EVENTS = "text/event-stream"
KEPT = (0, 9, 10)
"""What top_k and top_p keep of each position, beside the sampled token."""


def next_token(seed: int, sequence: list[int]) -> int:
    """What the model with these weights says; never EOS nor below it."""
    return 3 + (7 * seed + 31 * sum(sequence) + len(sequence)) % (VOCAB - 3)


def logprob(seed: int, token: int, temperature: float = 1.0) -> float:
    """Of any token after any sequence."""
    return -((token + seed) % 10 + 1) / 16 / (temperature or 1.0)


def write_weights(folder: Path, seed: int) -> Path:
    """A model folder: a config and weights that are one number."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps({"model_type": "nested", "text_config": sizes}))
    (folder / "weights.json").write_text(json.dumps(seed))
    return folder


def write_base(folder: Path, seed: int) -> Path:
    """A model folder with a layer that an adapter may be of."""
    write_weights(folder, seed)
    save_file({f"{LAYER}.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    return folder


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter of `write_base`, which answers as weights of this number."""
    folder.mkdir()
    matrices = {f"base_model.model.{LAYER}.lora_{part}.weight": np.ones((2, 2), np.float32) for part in "AB"}
    save_file(matrices, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    (folder / "weights.json").write_text(json.dumps(seed))
    return folder


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Sampling(_Body):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    stream_interval: int | None = None


class Generate(BaseModel):
    model_config = ConfigDict(extra="allow")

    input_ids: list[int]
    rid: str = "unnamed"
    sampling_params: Sampling = Sampling()
    return_logprob: bool = False
    logprob_start_len: int = -1
    return_sampling_mask: bool = False
    extra_key: str = ""
    lora_path: str | None = None
    stream: bool = False


class Pause(_Body):
    mode: Literal["in_place"]


class Update(_Body):
    model_path: str
    weight_version: str
    abort_all_requests: Literal[False]
    keep_pause: bool = False
    flush_cache: Literal[False]


class Version(_Body):
    new_version: str
    abort_all_requests: Literal[False]


class LoadAdapter(_Body):
    lora_name: str
    lora_path: str


class UnloadAdapter(_Body):
    lora_name: str


class Abort(_Body):
    rid: str = ""
    abort_all: bool = False


class Tags(_Body):
    tags: list[str] | None = None


@dataclass(eq=False)
class Request:
    """One request in the scheduler."""

    body: Generate
    adapter: int | None = None
    """The number of its adapter, which it keeps when that is unloaded."""
    seed_names: list[str] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    cached: int = 0
    finish: dict[str, Any] | None = None
    aborted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Fake:
    """The scheduler and the HTTP server of one model."""

    def __init__(self, folder: Path, *, step_s: float = 0.002, incremental: bool = True) -> None:
        self.seed: int | None = json.loads((folder / "weights.json").read_text())
        self.step_s, self.incremental = step_s, incremental
        self.stream_interval = 1
        self.overlaps = False
        self.version, self.healthy, self.paused = "default", True, False
        self.name = "policy"
        """The model's name in `/v1/models`."""
        self.requests: list[Request] = []
        self.cache: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        self.asleep: set[str] = set()
        self.graphs_asleep = False
        self.adapters: dict[str, int] = {}
        """The numbers of the loaded adapters, which are the weights of requests with them."""
        self.adapter_paths: dict[str, str] = {}
        self.crimes: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fail: dict[str, tuple[int, dict[str, Any]]] = {}
        self.hang: set[str] = set()
        self.loads: list[dict[str, int]] = []
        """Groups of ranks in `/v1/loads`."""
        self.nan_at: int | None = None
        self.score: Callable[[list[int]], list[float]] | None = None
        """A real model's logprobs of a prompt's tokens 1..n-1, for those who ask for them."""
        self.continued = asyncio.Event()
        self.continued.set()

    async def step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if not self.paused:
                for request in [r for r in self.requests if r.finish is None]:
                    self.step(request)

    def step(self, request: Request) -> None:
        if not request.output and request.finish is None and not request.seed_names:
            self.prefill(request)
        if self.seed is None or "kv_cache" in self.asleep:
            self.crimes.append("a token was made of memory that was given back")
        params = request.body.sampling_params
        sequence = [*request.body.input_ids, *request.output]
        seed = self.seed_of(request)
        token = next_token(seed, sequence)
        request.output.append(token)
        value = logprob(seed, token, params.temperature)
        request.logprobs.append(None if len(request.output) == self.nan_at else value)
        request.seed_names.append(self.version)
        if request.aborted:
            request.finish = ABORTED
        elif len(request.output) >= params.max_new_tokens:
            request.finish = {"type": "length", "length": params.max_new_tokens}
        elif not params.ignore_eos and token in {EOS, *params.stop_token_ids}:
            request.finish = {"type": "stop", "matched": token}
        if request.finish is not None:
            self.leave(request)
        request.changed.set()

    def seed_of(self, request: Request) -> int:
        return self.seed or 0 if request.adapter is None else request.adapter

    def prefill(self, request: Request) -> None:
        entries = self.cache.get(request.body.extra_key, [])
        weights = request.body.lora_path or self.version
        for tokens, theirs in entries:
            same = common(tokens, request.body.input_ids[:-1])
            if same > request.cached:
                request.cached = same
                if theirs != weights:
                    self.crimes.append(f"KV of weights {theirs} was reused under {weights}")

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        if request.seed_names:
            sequence = (*request.body.input_ids, *request.output)
            weights = request.body.lora_path or request.seed_names[0]
            self.cache.setdefault(request.body.extra_key, []).append((sequence, weights))

    def abort(self, rid: str, abort_all: bool) -> None:
        known = abort_all or any(request.body.rid == rid for request in self.requests)
        for request in [r for r in self.requests if known and (abort_all or r.body.rid.startswith(rid))]:
            request.aborted = True
            if not request.seed_names:
                request.finish = IN_QUEUE
                self.requests.remove(request)
                request.changed.set()

    def crime(self, what: str) -> JSONResponse:
        self.crimes.append(f"the scheduler died: {what}")
        return JSONResponse({"error": {"message": what}}, 500)

    def event(self, request: Request, seen: int) -> dict[str, Any]:
        body, total = request.body, len(request.output)
        rows = [[lp, token, None] for lp, token in zip(request.logprobs, request.output, strict=False)]
        first = seen if self.incremental and body.stream else 0
        meta: dict[str, Any] = {
            "id": body.rid,
            "finish_reason": request.finish,
            "weight_version": self.version,
            "completion_tokens": total,
        }
        if request.finish != IN_QUEUE:
            meta |= {"prompt_tokens": len(body.input_ids), "cached_tokens": request.cached}
        if request.finish is not None:
            # with overlap the token that is sampled last before a pause counts as one of the weights after it
            named = spans([*request.seed_names[self.overlaps :], *request.seed_names[-1:][: self.overlaps]])
            meta["weight_versions"] = named or [{"version": self.version, "start": 0, "end": total}]
        if body.return_logprob:
            meta["output_token_logprobs"] = rows[first:]
            start = max(0, body.logprob_start_len)
            score = self.score or (lambda ids: [logprob(self.seed_of(request), token) for token in ids[1:]])
            scores = [None, *score(body.input_ids)]
            prompt = [[lp, token, None] for lp, token in zip(scores, body.input_ids, strict=True)]
            meta["input_token_logprobs"] = prompt[start:] if body.logprob_start_len >= 0 else []
        if body.return_sampling_mask:
            kept = [{*KEPT, token} for _, token, _ in rows]
            meta["output_token_sampling_mask"] = [sorted(ids) for ids in kept[first:]]
            meta["output_token_sampling_logprobs"] = [(lp or 0.0) / 2 for lp in request.logprobs[first:]]
        return {"output_ids": request.output[first:], "meta_info": meta}


def refusal(body: Generate, adapters: Container[str]) -> str | None:
    """Why SGLang refuses a request that the client could send by mistake."""
    if body.lora_path is not None and body.lora_path not in adapters:
        return f"Got LoRA adapter that has never been loaded: {body.lora_path}\nAll loaded adapters: dict_keys([])."
    if len(body.input_ids) >= CONTEXT - 6:
        count = f"({len(body.input_ids)} tokens) exceeds the maximum allowed length ({CONTEXT - 6} tokens)"
        return f"Input length {count}. Use a shorter input or enable --allow-auto-truncate."
    return None


def adapter_reply(error: str, loaded: dict[str, str] | None) -> JSONResponse:
    """The answer to a load or an unload."""
    reply = {"success": not error, "error_message": error, "loaded_adapters": loaded}
    return JSONResponse({**reply, "rid": None, "http_worker_ipc": None}, 400 if error else 200)


def common(ours: tuple[int, ...], theirs: list[int]) -> int:
    same = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        same += 1
    return same


def spans(names: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for at, name in enumerate(names):
        if found and found[-1]["version"] == name:
            found[-1]["end"] = at + 1
        else:
            found.append({"version": name, "start": at, "end": at + 1})
    return found


def make_app(fake: Fake) -> FastAPI:
    """The routes."""
    app = FastAPI()

    @app.middleware("http")
    async def faults(request: Any, call_next: Any) -> Response:
        path, body = request.url.path, await request.body()
        fake.calls.append((path, json.loads(body) if body else {}))
        while path in fake.hang:
            await asyncio.sleep(0.01)
        if path in fake.fail:
            status, answer = fake.fail.pop(path)
            return JSONResponse(answer, status)
        return await call_next(request)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if fake.healthy else 503)

    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {"weight_version": fake.version, "is_generation": True}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {"disable_overlap_schedule": not fake.overlaps, "quantization": None, "dtype": "float32"}

    @app.get("/v1/loads")
    async def loads(include: str) -> dict[str, Any]:
        return {"version": "0.5.23", "loads": fake.loads} if include == "core" else {}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name} for name in (fake.name, *fake.adapters)]}

    @app.post("/generate")
    async def generate(body: Generate) -> Response:
        await fake.continued.wait()
        fake.crimes += [f"SGLang ignores {name}" for name in body.model_extra or {}]
        if fake.score is None and max(body.input_ids, default=0) >= VOCAB:
            return fake.crime("a token outside the vocabulary")
        if why := refusal(body, fake.adapters):
            return fake.crime(why) if body.stream else JSONResponse({"error": {"message": why}}, 400)
        request = Request(body, fake.adapters.get(body.lora_path or ""))
        fake.requests.append(request)
        if body.stream:
            return StreamingResponse(stream(request), media_type=EVENTS)
        try:
            while request.finish is None:
                await request.changed.wait()
                request.changed.clear()
        finally:
            if request in fake.requests:
                fake.requests.remove(request)
        return JSONResponse(fake.event(request, 0))

    async def stream(request: Request) -> AsyncIterator[str]:
        seen = 0
        try:
            while True:
                await request.changed.wait()
                request.changed.clear()
                finished, event = request.finish is not None, fake.event(request, seen)
                if not finished and seen and len(request.output) - seen < fake.stream_interval:
                    continue
                seen = len(request.output)
                yield f"data: {json.dumps(event)}\n\n"
                if finished:
                    yield "data: [DONE]\n\n"
                    return
        finally:
            if request in fake.requests:  # the client is gone, which SGLang acts upon after 2 s
                asyncio.get_running_loop().call_later(2.0, setattr, request, "aborted", True)

    @app.post("/pause_generation")
    async def pause(body: Pause) -> dict[str, str]:
        fake.continued.clear()
        fake.paused = True
        return {"status": "ok", "message": "Generation paused successfully."}

    @app.post("/continue_generation")
    async def go_on() -> dict[str, str]:
        fake.paused = False
        fake.continued.set()
        return {"status": "ok", "message": "Generation continued successfully."}

    @app.post("/update_weights_from_disk")
    async def update(body: Update) -> Response:
        if "weights" in fake.asleep:
            return fake.crime("weights loaded into memory that was given back")
        try:
            seed = json.loads((Path(body.model_path) / "weights.json").read_text())
        except (OSError, ValueError) as error:
            return JSONResponse(
                {"success": False, "message": f"Failed to get weights iterator: {error}.", "num_paused_requests": 0},
                400,
            )
        fake.name = body.model_path
        fake.seed, fake.version = seed, body.weight_version
        message = f"Succeeded to update model weights. Weight version updated to {fake.version}."
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})

    @app.post("/update_weight_version")
    async def update_version(body: Version) -> dict[str, Any]:
        fake.version = body.new_version
        message = f"Weight version updated to {body.new_version}"
        return {"success": True, "message": message, "new_version": body.new_version}

    @app.post("/load_lora_adapter")
    async def load_adapter(body: LoadAdapter) -> Response:
        try:
            fake.adapters[body.lora_name] = json.loads((Path(body.lora_path) / "weights.json").read_text())
        except OSError as error:
            return adapter_reply(str(error), fake.adapter_paths)
        fake.adapter_paths[body.lora_name] = body.lora_path
        return adapter_reply("", fake.adapter_paths)

    @app.post("/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapter) -> Response:
        if body.lora_name not in fake.adapters:
            return adapter_reply(f"LoRA with name {body.lora_name} does not exist. Loaded LoRAs: odict_keys([])", None)
        while any(request.body.lora_path == body.lora_name for request in fake.requests):
            await asyncio.sleep(0.01)
        del fake.adapters[body.lora_name], fake.adapter_paths[body.lora_name]
        return adapter_reply("", fake.adapter_paths)

    @app.post("/flush_cache")
    async def flush() -> Response:
        if not fake.requests:
            fake.cache.clear()
            return Response(
                "Cache flushed.\nPlease check backend logs for more details. "
                "(When there are running or waiting requests, the operation will not be performed.)\n"
            )
        return Response("Flush cache failed.\n", 400)

    @app.post("/abort_request")
    async def abort(body: Abort) -> Response:
        fake.abort(body.rid, body.abort_all)
        return Response(status_code=200)

    @app.post("/release_memory_occupation")
    async def release(body: Tags) -> Response:
        if fake.requests:
            return fake.crime("release_memory_occupation should be called only when no ongoing request.")
        fake.graphs_asleep |= "cuda_graph" in (body.tags or [])
        fake.asleep |= {*(body.tags or [])} - {"cuda_graph"}
        if "weights" in fake.asleep:
            fake.seed = None
        if "kv_cache" in fake.asleep:
            fake.cache.clear()
        return JSONResponse(None)

    @app.post("/resume_memory_occupation")
    async def resume(body: Tags) -> Response:
        for tag in body.tags or []:
            if tag not in fake.asleep and not (tag == "cuda_graph" and fake.graphs_asleep):
                return fake.crime(f"KeyError: {tag}")
            fake.graphs_asleep &= tag != "cuda_graph"
            fake.asleep.discard(tag)
        return JSONResponse(None)

    return app


@asynccontextmanager
async def serving(fake: Fake, port: int) -> AsyncIterator[str]:
    """Its URL while it runs under uvicorn in this event loop."""
    steps = asyncio.create_task(fake.step_for_ever())
    try:
        async with fake_server.serving(make_app(fake), port) as url:
            try:
                yield url
            finally:
                fake.hang.clear()
                fake.paused = False
                fake.continued.set()
    finally:
        steps.cancel()
