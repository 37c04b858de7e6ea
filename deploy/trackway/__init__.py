"""Train, evaluate and deploy tool-using agents from Python.

    import trackway

    run = trackway.train(tools=[calculator], reward=score, config="tiny_demo").wait()
    print(run.metrics())
    print(trackway.evaluate(run, n=4))

`local` and `connect` keep services for several calls. Names are imported at first use: `import trackway` loads neither
torch nor Ray. The packages below this one are in three folders of a checkout and in one of an installation.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trackway.deploy.api.run import Evaluated, Run
    from trackway.deploy.api.services import Services, connect, evaluate, local, rollout, train

__path__ = __import__("pkgutil").extend_path(__path__, __name__)  # in this form mkdocstrings knows it

__all__ = ["Evaluated", "Run", "Services", "connect", "evaluate", "local", "rollout", "train"]

_MODULES = {"Evaluated": "run", "Run": "run"}


if not TYPE_CHECKING:  # there the names are imported, and any other is a package

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "rollout":
            return import_module(f"{__name__}.rollout")
        return getattr(import_module(f"{__name__}.deploy.api.{_MODULES.get(name, 'services')}"), name)


class _Function(ModuleType):
    """The package of the rollout service, which is also the function `trackway.rollout`."""

    def __call__(self, *arguments: object, **options: object) -> object:
        return self.__wrapped__(*arguments, **options)

    @property
    def __wrapped__(self) -> Callable[..., object]:
        """The function, whose signature `help` and editors show."""
        return import_module(f"{__name__}.deploy.api.services").rollout


class _Package(ModuleType):
    """This package, which the import of a package below it sets as an attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "rollout" and isinstance(value, ModuleType):
            value.__class__ = _Function
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
