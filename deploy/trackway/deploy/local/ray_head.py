"""Runs Ray's command line for a machine that only serves: `python -m trackway.deploy.local.ray_head start --head ...`.

A dashboard that it starts loads nothing but Serve's REST API, and no server for Ray's remote clients starts. `ray
start` has no options for either.
"""

from collections.abc import Callable

from ray._private import ray_constants, services
from ray.scripts import scripts

DASHBOARD_MODULES = "--modules-to-load=ServeHead"
"""An option of the dashboard's own program."""

_start: Callable[..., object] = services.start_ray_process


def _start_ray_process(command: list[str], process_type: str, *args: object, **options: object) -> object:
    added = [DASHBOARD_MODULES] if process_type == ray_constants.PROCESS_TYPE_DASHBOARD else []
    return _start([*command, *added], process_type, *args, **options)


if __name__ == "__main__":
    services.start_ray_process = _start_ray_process
    scripts.get_ray_client_dependency_error = lambda: "not needed"  # pyright: ignore[reportPrivateImportUsage]
    scripts.main()
