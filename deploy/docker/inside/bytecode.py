"""Inside the image: compile what pods import until they work, since a pod can write no bytecode itself.

Everything would be three times as much: 70 MB instead of 30 without torch, 450 MB instead of 150 with it.
"""

import importlib
import importlib.util
import pkgutil
import py_compile
import sys
from pathlib import Path

RAY = [
    *("ray.scripts.scripts", "ray.dashboard.dashboard", "ray.dashboard.agent", "ray._private.runtime_env.agent.main"),
    *("ray._private.workers.default_worker", "ray._private.log_monitor", "ray.util.client.server.server"),
    *("ray.autoscaler._private.monitor", "ray.autoscaler.v2.monitor"),
    *("ray.autoscaler._private.kuberay.run_autoscaler", "ray.serve.scripts", "ray.serve.schema"),
    *("ray.serve._private.controller", "ray.serve._private.proxy", "ray.serve._private.replica"),
    *("ray.serve.experimental.consistent_hash_router", "ray.util.state", "ray.util.metrics"),
]
SERVICES = [
    *("httpx_aiohttp", "tenacity", "opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    *("fastapi.openapi.docs", "uvicorn.protocols.http.httptools_impl", "uvicorn.loops.uvloop", "pydantic_settings"),
    *("mcp.client.stdio", "mcp.server", "bm25s", "jsonschema_rs", "docstring_parser", "yaml"),
    *("typer", "typer.rich_utils", "rich.live", "rich.progress", "rich.tree", "rich.markdown"),
]
TRAINING = [
    *("torch.optim.adamw", "safetensors.torch", "transformers.models.auto.modeling_auto", "transformers.models.qwen3"),
    *(
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.generation",
    ),
    *("transformers.models.auto.tokenization_auto", "hydra", "datasets", "pyarrow.parquet", "fsspec"),
    *("mlflow.server", "mlflow.tracking.client", "mlflow.store.tracking.sqlalchemy_store", "mlflow.server.fastapi_app"),
    *("matplotlib.pyplot", "torch.utils.tensorboard", "wandb"),
]


def imported() -> list[Path]:
    """The source files of all that these modules import."""
    import ray.dashboard.modules as modules

    plugins = [plugin.name for plugin in pkgutil.walk_packages(modules.__path__, f"{modules.__name__}.")]
    for name in [*RAY, *plugins, *SERVICES, *TRAINING]:
        if importlib.util.find_spec(name.partition(".")[0]):  # an image without torch has less
            importlib.import_module(name)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [Path(file) for file in files if file and file.endswith(".py") and file.startswith(sys.prefix)]


if __name__ == "__main__":
    for source in imported():
        py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True)
