"""A server with the routes of vLLM 0.32 by which weights change, and tensors in place of a model.

Phases out of order are refused as vLLM's worker refuses them (`vllm/v1/worker/gpu_worker.py`). As its layerwise reload
does, half an update that was not ended spoils the next load: `Fake.crimes` names it.
"""

import base64
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.services.rollout.engines.remote.file_handles import opened

PHASES = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


class Fake:
    """The worker: what it holds, and the phase it is in."""

    def __init__(self, base: Path) -> None:
        self.tensors = read(base)
        self.version = "default"
        self.packed = self.active = self.half = False
        self.routes = True
        self.fail: dict[str, int] = {}
        """Status by route, for its next call."""
        self.corrupts = False
        """Whether transferred tensors come out wrong."""
        self.crimes: list[str] = []
        self.calls: list[str] = []
        self.updates: list[dict[str, Any]] = []
        self.sampled: list[dict[str, Any]] = []
        """Sampling parameters of the generations so far."""

    def transfer(self, route: str, body: dict[str, Any]) -> None:
        """One phase; RuntimeError out of order."""
        if route == PHASES[0]:
            self.packed = body["init_info"] == {"packed": True}
        elif route == PHASES[1]:
            if self.active:
                raise RuntimeError("start_weight_update called while a weight update is already active.")
            self.active = True
        elif not self.active:
            raise RuntimeError(f"{route} without start_weight_update")
        elif route == PHASES[2]:
            self.update(body["update_info"])
        else:
            self.active = self.half = False

    def update(self, info: dict[str, Any]) -> None:
        """One buffer, as the backend `ipc` reads it."""
        self.half = True
        assert self.packed
        buffer = opened(pickle.loads(base64.b64decode(info.pop("ipc_handles_pickled"))))
        self.updates.append(info)
        names, sizes = info["names"], info["tensor_sizes"]
        kinds = zip(info["dtype_names"], info["shapes"], strict=True)
        parts = buffer[: sum(sizes)].split(sizes)
        for name, part, (dtype, shape) in zip(names, parts, kinds, strict=True):
            tensor = part.view(getattr(torch, dtype)).view(shape).clone()
            if self.tensors[name].shape != tensor.shape:
                raise RuntimeError(f"{name} has another shape")
            self.tensors[name] = tensor + 1 if self.corrupts else tensor


def read(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def make_app(fake: Fake) -> FastAPI:
    """The routes."""
    app = FastAPI()

    @app.middleware("http")
    async def faults(request: Request, call_next: Any) -> Response:
        path = request.url.path
        fake.calls.append(path)
        if path in PHASES and not fake.routes:
            return JSONResponse({"detail": "Not Found"}, 404)
        if path in fake.fail:
            fake.active = fake.active and path != PHASES[2]  # the worker forgets an update that fails
            return JSONResponse({"error": {"message": "the worker failed"}}, fake.fail.pop(path))
        return await call_next(request)

    async def phase(request: Request) -> Response:
        try:
            fake.transfer(request.url.path, await request.json() if await request.body() else {})
        except RuntimeError as error:
            fake.active = fake.active and request.url.path != PHASES[2]
            return JSONResponse({"error": {"message": str(error)}}, 500)
        return JSONResponse({"message": "done"})

    for route in PHASES:
        app.post(route)(phase)

    @app.post("/collective_rpc")
    async def reload(request: Request) -> dict[str, Any]:
        if fake.half:
            fake.crimes.append("a folder was loaded into a half-loaded model")
        fake.tensors = read(Path((await request.json())["kwargs"]["weights_path"]))
        return {"results": [None]}

    @app.post("/weight_checker")
    async def checksums() -> dict[str, Any]:
        return {"checksums": {f"dp0:pp0:pcp0:tp0:{name}": sha256(tensor) for name, tensor in fake.tensors.items()}}

    @app.get("/weight_info")
    async def info() -> dict[str, str]:
        return {"weight_version": fake.version}

    @app.post("/update_weight_version")
    async def name(request: Request) -> dict[str, bool]:
        fake.version = (await request.json())["new_version"]
        return {"success": True}

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> dict[str, Any]:
        fake.sampled.append((await request.json())["sampling_params"])
        logprobs = {"content": [{"token_id": 0, "logprob": 0.0}]}
        choice = {"token_ids": [0], "logprobs": logprobs, "finish_reason": "length", "weight_versions": []}
        return {"choices": [choice], "prompt_logprobs": None}

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": []}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response("")

    for route in ("/pause", "/resume", "/reset_prefix_cache"):
        app.post(route)(lambda: {"status": "ok"})
    return app


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def write_model(folder: Path, seed: int) -> Path:
    """A model of three tensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": 64, "max_position_embeddings": 64, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(sizes))
    torch.manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (64, 4), "model.norm.weight": (4,), "lm_head.weight": (64, 4)}
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
