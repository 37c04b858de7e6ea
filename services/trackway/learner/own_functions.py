"""A user's own estimators and losses, by `module:function`."""

import importlib
from collections.abc import Callable

from trackway.serving.own_code import loading


def own_function(key: str, name: str) -> Callable[..., object]:
    """The function that `name`, `module:function`, stands for.

    Raises ValueError naming `key` when the module cannot be imported or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    with loading(f"{key}={name}"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{key}: expected a function {function_name!r} in {module_name}, found none; correct the name")
    return function
