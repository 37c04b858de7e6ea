"""vLLM and SGLang as classifiers: a child process, or a server that is already running."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from trackway.rollout.classifiers import Admission, ClassifierInfo
from trackway.rollout.engines.protocol import EngineStats
from trackway.rollout.engines.remote.engine import check_server, found, healthy, prepared
from trackway.rollout.engines.remote.server import EngineHttp, Json, SideProcess
from trackway.rollout.engines.remote.sglang import UNUSED_POSITIONS, on_loopback
from trackway.rollout.engines.remote.vllm import safe_environment
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ClassifyReply

_UNUSED_POSITIONS = UNUSED_POSITIONS + 1  # an input leaves room for a token


class ServerClassifier(ABC):
    """A `Classifier` over a server's HTTP API. Inputs are token ids: tokens and their limit are checked here."""

    def __init__(self, settings: RolloutSettings, info: ClassifierInfo) -> None:
        check_server(settings)
        self.settings, self.info = settings, info
        self._admission = Admission(settings, info)
        self._process: SideProcess | None = None
        self._client: EngineHttp | None = None
        self._answers = 0
        self._moved = 0.0
        """Time of the last answer, or of the first input after a pause."""

    @property
    def max_len(self) -> int:
        """Longest input in tokens."""
        return self._admission.max_len

    @property
    def dtype(self) -> str:
        """The type of weights and activations."""
        if self.settings.dtype != "auto":
            return self.settings.dtype
        return "float32" if self.settings.device == "cpu" else "bfloat16"

    async def start(self) -> None:
        """Start the server or connect to a running one."""
        settings = self.settings
        if settings.engine_url is not None:
            self._client = client = EngineHttp(settings.engine_url)
            await found(client, settings.engine_start_s)
            return
        self._process, client = prepared(
            settings, lambda port: [*self._command(port), *settings.engine_args], self._environment
        )
        self._client = client
        await self._process.start(lambda: healthy(client), settings.engine_start_s)

    async def stop(self) -> None:
        """Stop the server if this classifier started it."""
        if self._process is not None:
            await self._process.stop()
        client, self._client = self._client, None
        if client is not None:
            with suppress(TrackwayError):
                await client.close()

    async def classify(self, token_ids: Sequence[int]) -> float:
        """The logit of an input. See `Classifier.classify`."""
        if self._client is None:
            message = "expected a started classifier, got one that is starting or has stopped; retry later"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message)
        if self._process is not None:
            self._process.check()
        with self._admission.admit(token_ids):
            if self._admission.in_flight == 1:
                self._moved = time.monotonic()
            logit = await self._ask(self._client, [*token_ids])
            self._moved = time.monotonic()
            self._answers += 1
        if not math.isfinite(logit):
            message = f"expected a finite logit from {self._client.base_url}, got {logit}; check the model's weights"
            raise TrackwayError(ErrorCode.ENGINE_FAILED, message)
        return logit

    def stuck_for(self) -> float:
        """Seconds since the last answer while inputs wait for one. Infinite when the server is lost."""
        if self._process is not None and not self._process.alive:
            return math.inf
        return time.monotonic() - self._moved if self._admission.in_flight else 0.0

    def stats(self) -> EngineStats:
        """Counted here."""
        running = min(self.settings.max_num_seqs, self._admission.in_flight)
        return EngineStats(running, self._admission.in_flight - running, self._answers, 0, self._admission.tokens, 0)

    @abstractmethod
    def _command(self, port: int) -> list[str]:
        """Command of the server process, the interpreter first. `engine_args` are appended."""

    @abstractmethod
    def _environment(self, folder: Path) -> dict[str, str]:
        """Variables of the server process, which `folder` is for."""

    @abstractmethod
    async def _ask(self, http: EngineHttp, token_ids: list[int]) -> float:
        """The server's logit of an input."""


class VllmClassifier(ServerClassifier):
    """A `Classifier` over vLLM 0.32's pooling runner."""

    def _command(self, port: int) -> list[str]:
        settings = self.settings
        options = {
            "--host": "127.0.0.1",
            "--port": port,
            "--model": settings.model_path,
            "--served-model-name": settings.model_name,
            "--runner": "pooling",
            "--dtype": self.dtype,
            "--max-model-len": self.max_len,
            "--max-num-seqs": settings.max_num_seqs,
            "--tensor-parallel-size": settings.tensor_parallel_size,
            "--gpu-memory-utilization": settings.gpu_memory_utilization,
            **({} if settings.config_overrides is None else {"--hf-overrides": settings.config_overrides}),
        }
        switches = {
            "--no-enable-prefix-caching": not settings.prefix_caching,
            "--enforce-eager": settings.enforce_eager,
            "--disable-uvicorn-access-log": True,
        }
        return [
            *(str(settings.engine_python), "-m", "vllm.entrypoints.openai.api_server"),
            *(str(part) for option in options.items() for part in option),
            *(switch for switch, on in switches.items() if on),
        ]

    def _environment(self, folder: Path) -> dict[str, str]:
        return safe_environment()

    async def _ask(self, http: EngineHttp, token_ids: list[int]) -> float:
        body: Json = {"model": self.settings.model_name, "input": token_ids, "use_activation": False}
        reply = await http.post("/classify", body, timeout_s=None, idempotent=True)
        try:
            [data] = ClassifyReply.model_validate(reply).data
            [logit] = data.probs
        except ValueError as error:  # also pydantic's
            raise _not_understood(http, "vLLM", reply) from error
        return logit


class _Embedding(BaseModel):
    embedding: list[float]


class SglangClassifier(ServerClassifier):
    """A `Classifier` over SGLang 0.5.23's native `/classify`."""

    def __init__(self, settings: RolloutSettings, info: ClassifierInfo) -> None:
        super().__init__(settings, info)
        self._admission.max_len = min(self.max_len, info.max_positions - _UNUSED_POSITIONS)

    def _command(self, port: int) -> list[str]:
        settings = self.settings
        options = {
            "--model-path": settings.model_path,
            "--served-model-name": settings.model_name,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": self.dtype,
            "--context-length": self.max_len + _UNUSED_POSITIONS,
            "--max-running-requests": settings.max_num_seqs,
            "--tp-size": settings.tensor_parallel_size,
            "--mem-fraction-static": settings.gpu_memory_utilization,
        }
        if settings.config_overrides is not None:
            options["--json-model-override-args"] = settings.config_overrides
        switches = {
            "--is-embedding": True,  # so SGLang calls what has no generation
            "--disable-radix-cache": not settings.prefix_caching,
            "--disable-cuda-graph": settings.enforce_eager,
        }
        return [
            *(str(settings.engine_python), "-m", "sglang.launch_server"),
            *(str(part) for option in options.items() for part in option),
            *(switch for switch, on in switches.items() if on),
        ]

    def _environment(self, folder: Path) -> dict[str, str]:
        return on_loopback(folder, self.settings.engine_args)

    async def _ask(self, http: EngineHttp, token_ids: list[int]) -> float:
        reply = await http.post("/classify", {"input_ids": token_ids}, timeout_s=None, idempotent=True)
        try:
            [logit] = _Embedding.model_validate(reply).embedding
        except ValueError as error:  # also pydantic's
            raise _not_understood(http, "SGLang", reply) from error
        return logit


def _not_understood(http: EngineHttp, server: str, reply: Json) -> TrackwayError:
    message = f"expected {server}'s answer to /classify with one score, got {str(reply)[:200]}"
    return TrackwayError(ErrorCode.ENGINE_FAILED, f"{message}; check that {http.base_url} serves this classifier")
