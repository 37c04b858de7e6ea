"""What may go wrong between a publisher and its readers, with real processes: whoever dies, readers stay right."""

import asyncio
import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import fsspec
import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.services.rollout.engine_runs import watching
from tests.waiting import async_until
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore, WholeWeights
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = pytest.mark.anyio

DYING = """
import sys, time
from fsspec.implementations.local import LocalFileSystem
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore, WholeWeights
from pathlib import Path

def half(self, source, target, **options):
    data = Path(source).read_bytes()
    with open(target, "wb") as file:
        file.write(data[: len(data) // 2])
    print("half", flush=True)
    time.sleep(600)

LocalFileSystem.put_file = half
store, new, old = WeightStore(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
base = WholeWeights(store.manifest(1), old) if sys.argv[3] else None
store.publish(2, "dying", new, ANY_PROOF, base=base)
"""

REPLICA = """
import sys, uvicorn
from pathlib import Path
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings

settings = RolloutSettings(
    model_path=Path(sys.argv[1]), weights_url=sys.argv[2], weights_cache=Path(sys.argv[3]), device="cpu"
)
uvicorn.run(create_app(settings), host="127.0.0.1", port=int(sys.argv[4]), log_level="warning")
"""


@contextmanager
def program(text: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def in_bfloat16(source: Path, into: Path, changed: int = 0) -> Path:
    """A copy of a model in bfloat16, of which so many values of a matrix are moved to a neighbour."""
    folder = Path(shutil.copytree(source, into))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int16).view(-1)[:changed] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("as_delta", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "delta"])
async def test_a_trainer_killed_while_it_publishes_leaves_readers_at_the_old_version(
    engine: TorchEngine, store: WeightStore, model_path: Path, other_path: Path, tmp_path: Path, as_delta: bool
) -> None:
    old = other_path
    if as_delta:
        old = in_bfloat16(model_path, tmp_path / "old")
        other_path = in_bfloat16(model_path, tmp_path / "new", changed=50)
    store.publish(1, "run", old, ANY_PROOF)
    with program(DYING, store.url, other_path, old if as_delta else "") as trainer:
        assert trainer.stdout is not None
        assert await asyncio.to_thread(trainer.stdout.readline) == "half\n"
        trainer.send_signal(signal.SIGKILL)
        await asyncio.to_thread(trainer.wait, 10)
        async with watching(engine, store, tmp_path / "cache") as watcher:
            assert (engine.version, watcher.latest, watcher.ready().ready) == (1, 1, True)
            store.claim("run").close()
            base = WholeWeights(store.manifest(1), old) if as_delta else None
            store.publish(2, "run", other_path, ANY_PROOF, base=base)
            await watcher.catch_up(2)
            assert (store.manifest(2).delta is not None) is as_delta


class StallingFiles(http.server.SimpleHTTPRequestHandler):
    """A store behind HTTP that stops in the middle of the weights until it is let go."""

    stalled, go_on = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        if not self.path.endswith(".safetensors") or self.go_on.is_set():
            super().do_GET()
            return
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        self.stalled.set()
        self.go_on.wait(60)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def http_store(store: WeightStore, tmp_path: Path) -> Iterator[tuple[WeightStore, str]]:
    """A store to publish into, and the URL that it is read from."""
    (tmp_path / "weights").mkdir()
    handler = partial(StallingFiles, directory=str(tmp_path / "weights"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield store, f"http://127.0.0.1:{server.server_port}"
        StallingFiles.go_on.set()
        server.shutdown()
        thread.join(60)


@pytest.mark.slow
async def test_a_replica_killed_while_it_loads_is_right_when_it_is_back(
    http_store: tuple[WeightStore, str], model_path: Path, other_path: Path, tmp_path: Path
) -> None:
    store, url = http_store
    anchor = in_bfloat16(other_path, tmp_path / "anchor")
    manifest = store.publish(7, "run", anchor, ANY_PROOF)
    cache, port = tmp_path / "cache", free_port()
    with program(REPLICA, model_path, url, cache, port) as replica:
        assert await asyncio.to_thread(StallingFiles.stalled.wait, 60)
        replica.send_signal(signal.SIGKILL)
        await asyncio.to_thread(replica.wait, 10)
    [torn] = cache.glob(".*.tmp")
    assert torn.name.startswith(".7.")
    StallingFiles.go_on.set()
    new = in_bfloat16(other_path, tmp_path / "new", changed=50)
    assert store.publish(8, "run", new, ANY_PROOF, base=WholeWeights(manifest, anchor)).delta is not None
    with program(REPLICA, model_path, url, cache, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            await async_until(lambda: is_ready(client))
            body = {"token_ids": [11, 12], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
            [choice] = (await client.post("/inference/v1/generate", json=body)).json()["choices"]
    assert choice["weight_versions"] == [{"version": 8, "start": 0, "end": 4}]
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "7", "8"]


async def is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def test_a_replica_without_room_for_new_weights_keeps_the_old_ones_and_says_why(
    engine: TorchEngine, model_path: Path, other_path: Path, small_disk: Path, tmp_path: Path
) -> None:
    store = WeightStore(f"memory://{tmp_path.name}")
    store.publish(1, "run", other_path, ANY_PROOF)
    big = tmp_path / "big"
    big.mkdir()
    for file in other_path.iterdir():
        (big / file.name).write_bytes(file.read_bytes())
    (big / "padding.bin").write_bytes(bytes(2_000_000))
    async with watching(engine, store, small_disk / "cache") as watcher:
        assert engine.version == 1
        store.publish(2, "run", big, ANY_PROOF)
        watcher._wait_s = 0.3
        with pytest.raises(TrackwayError, match="No space left on device") as raised:
            await watcher.catch_up(2)
        assert raised.value.code is ErrorCode.WEIGHTS_BEHIND
        assert (engine.version, watcher.ready().ready) == (1, True)
        store.publish(3, "run", other_path, ANY_PROOF)
        watcher._wait_s = 10.0
        await watcher.catch_up(3)
    assert sorted(path.name for path in (small_disk / "cache").iterdir()) == [".lock", "1", "3"]  # nothing of 2
    fsspec.filesystem("memory").store.clear()


async def test_of_copied_versions_only_the_last_three_stay(
    engine: TorchEngine, other_path: Path, tmp_path: Path
) -> None:
    store = WeightStore(f"memory://{tmp_path.name}")
    async with watching(engine, store, tmp_path / "cache") as watcher:
        for version in (1, 2, 3, 4):
            store.publish(version, "run", other_path, ANY_PROOF)
            await watcher.catch_up(version)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock", "2", "3", "4"]
    fsspec.filesystem("memory").store.clear()
