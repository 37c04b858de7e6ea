"""GSM8K from the hub: the real `datasets` client, in a process of its own, against a hub of ours."""

import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI, Form, Response

from trackway.trainer.data.row_files import read_rows

COMMIT = "c" * 40
README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""
MAKE = """import sys
from pathlib import Path
from trackway.trainer.data import make_gsm8k
make_gsm8k(None, Path(sys.argv[1]))
"""


class Serving(Protocol):
    def __call__(self, app: FastAPI) -> Any: ...


def parquet(*records: tuple[str, str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"question": [q for q, _ in records], "answer": [a for _, a in records]}), sink)
    return sink.getvalue()


def small_hub() -> FastAPI:
    """As much of the hub's API as `datasets` asks for, with a small openai/gsm8k."""
    files = {
        "README.md": README.encode(),
        "main/train-00000-of-00001.parquet": parquet(("Six and one?", "#### 7"), ("Ten times 100?", "#### 1,000")),
        "main/test-00000-of-00001.parquet": parquet(("Two and two?", "#### 4")),
        "socratic/train-00000-of-00001.parquet": parquet(("no", "#### 0")),
    }
    app = FastAPI()

    def entry(path: str) -> dict[str, object]:
        if path in files:
            return {"type": "file", "path": path, "size": len(files[path]), "oid": path}
        return {"type": "directory", "path": path, "oid": path}

    @app.get("/api/datasets/openai/gsm8k")
    @app.get("/api/datasets/openai/gsm8k/revision/{revision}")
    def info(revision: str = "main") -> dict[str, object]:
        siblings = [{"rfilename": path} for path in files]
        return {"id": "openai/gsm8k", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}

    @app.get("/api/datasets/openai/gsm8k/tree/{revision}")
    @app.get("/api/datasets/openai/gsm8k/tree/{revision}/{folder:path}")
    def tree(revision: str, folder: str = "", recursive: bool = False) -> list[dict[str, object]]:
        below = f"{folder}/" if folder else ""
        inside = {path[len(below) :] for path in files if path.startswith(below)}
        names = inside if recursive else {path.partition("/")[0] for path in inside}
        return [entry(below + name) for name in sorted(names)]

    @app.post("/api/datasets/openai/gsm8k/paths-info/{revision}")
    def paths_info(revision: str, paths: Annotated[list[str], Form()]) -> list[dict[str, object]]:
        known = {*files, "main", "socratic"}
        return [entry(path) for path in paths if path in known]

    @app.api_route("/datasets/openai/gsm8k/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def resolve(revision: str, path: str) -> Response:
        if path not in files:
            return Response(status_code=404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        return Response(files[path], headers={"X-Repo-Commit": COMMIT, "ETag": f'"{path}"'})

    return app


def make(endpoint: str, home: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """`make_gsm8k` without a local copy, on a machine whose hub is at `endpoint`."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings
    command = [sys.executable, "-c", MAKE, str(out)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def silent() -> Any:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_the_rows_come_from_the_hub_and_later_from_its_cache(serving: Serving, tmp_path: Path) -> None:
    with serving(small_hub()) as url:
        online = make(url, tmp_path / "home", tmp_path / "online")
    offline = make(url, tmp_path / "home", tmp_path / "offline")

    assert (online.returncode, offline.returncode) == (0, 0), online.stderr + offline.stderr
    for out in ("online", "offline"):
        train, test = (read_rows(tmp_path / out / f"{split}.parquet") for split in ("train", "test"))
        assert [(row.index, row.reward_model.ground_truth) for row in train] == [(0, "7"), (1, "1000")]
        assert [(row.extra_info["question"], row.extra_info["split"]) for row in test] == [("Two and two?", "test")]


@pytest.mark.extended
@pytest.mark.slow
def test_a_hub_that_never_answers_is_given_up_and_the_option_for_a_local_copy_is_named(
    silent: str, tmp_path: Path
) -> None:
    started = time.monotonic()

    made = make(silent, tmp_path / "home", tmp_path / "out")

    assert time.monotonic() - started < 60
    assert "expected openai/gsm8k on the Hugging Face hub or in its cache, got ReadTimeout" in made.stderr
    assert "pass the folder of a local copy as --local-dataset-path" in made.stderr
    assert not (tmp_path / "out").exists()
