"""Train, evaluate and deploy tool-using agents from Python.

    import trackway

    run = trackway.train(rows, tools=[calculator], reward=score, config="tiny_demo").wait()
    print(run.metrics())
    print(trackway.evaluate(run, held_out, tools=[calculator], reward=score))

`local` and `connect` keep services for several calls. Names are imported at first use: `import trackway` loads neither
torch nor Ray. The packages below this one are in three folders of a checkout and in one of an installation.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trackway.deploy.api.run import Evaluated, Run
    from trackway.deploy.api.services import Services, connect, evaluate, local, rollouts, train

__path__ = __import__("pkgutil").extend_path(__path__, __name__)  # in this form mkdocstrings knows it

__all__ = ["Evaluated", "Run", "Services", "connect", "evaluate", "local", "rollouts", "train"]

_MODULES = {"Evaluated": "run", "Run": "run"}


if not TYPE_CHECKING:  # there the names are imported, and any other is a package

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.deploy.api.{_MODULES.get(name, 'services')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
