"""What Serve's health check makes of a replica's own word."""

import subprocess
import sys
from typing import get_args

import httpx
import pytest
import ray
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from ray._common.utils import import_attr
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from trackway.deploy.graph import Replica
from trackway.tools.settings import ToolsSettings
from trackway.wire.service import Ready, ServiceName

pytestmark = pytest.mark.anyio


def replica_that_says(ready: Ready) -> Replica:
    app = FastAPI()

    @app.get("/ready")
    async def answer() -> JSONResponse:
        return JSONResponse(ready.model_dump(), status_code=200 if ready.ready else 503)

    replica = Replica("tools", ToolsSettings())
    replica._app = app
    return replica


@pytest.mark.parametrize(
    "ready", [Ready(ready=True), Ready(ready=False, reason="weights are being loaded")], ids=["ready", "loading"]
)
async def test_a_replica_that_will_be_ready_by_itself_is_healthy(ready: Ready) -> None:
    await replica_that_says(ready).check_health()


async def test_a_replica_that_only_a_restart_mends_is_replaced() -> None:
    with pytest.raises(RuntimeError, match="the engine has made no progress on its work for 61 s"):
        await replica_that_says(
            Ready(ready=False, broken=True, reason="the engine has made no progress on its work for 61 s")
        ).check_health()


@pytest.mark.parametrize("service", get_args(ServiceName))
def test_ray_serve_parses_the_args_of_an_application_as_its_services_settings(service: ServiceName) -> None:
    builder = import_attr(f"trackway.deploy.graph:{service}")
    with pytest.raises(ValidationError, match=f"for {service.capitalize()}Settings\n(.*\n)*no_such_key"):
        call_user_app_builder_with_args_if_necessary(builder, {"no_such_key": 1})


@pytest.mark.slow
def test_a_builder_needs_the_packages_of_its_own_service_only() -> None:
    without = ["bm25s", "cachetools", "datasets", "docstring_parser", "hydra", "jsonschema_rs", "mcp", "pyarrow"]
    without += ["safetensors", "torch", "transformers"]
    program = f"""
import sys
sys.modules |= dict.fromkeys({without})
from trackway.deploy.graph import reward
print(reward.__annotations__["args"].__name__)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.stderr) == ("RewardSettings\n", "")


async def test_a_replica_can_be_called_at_its_nodes_own_address() -> None:
    replica = Replica("tools", ToolsSettings(direct_host="node"))
    async with replica._app.router.lifespan_context(replica._app):
        url = (await replica.describe()).url
    assert url is not None and httpx.URL(url).host == ray.util.get_node_ip_address()
