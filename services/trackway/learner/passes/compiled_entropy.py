"""The entropy compiled by `torch.compile`, which reads the logits once and keeps no tensor of their size.

The numbers of a row do not depend on what was compiled before: the first rows that the function sees, whose number the
compiler may use as a hint, are always those of the probe below. So a resumed run repeats exactly.
"""

import importlib
import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from trackway.learner.algorithm import entropy_from_logits

PROBE_ROWS = 64


def compiled_entropy(like: Tensor, *, with_gradient: bool) -> Callable[[Tensor], Tensor]:
    """`entropy_from_logits` compiled for logits [n, V] of the width, type and device of `like` [V], for any n.

    Raises ValueError where it cannot be compiled, as without a C++ compiler.
    """
    _import_setuptools()
    compiled = torch.compile(entropy_from_logits, dynamic=True, fullgraph=True)

    def entropy(logits: Tensor) -> Tensor:
        # The compiler takes 0 and 1 rows for constants, and would make functions for them.
        if len(logits) < 2:
            return entropy(torch.cat([logits, logits]))[:1] if len(logits) else entropy_from_logits(logits)
        # Logits have their type already, and any other state of autocast would make a second function.
        with torch.autocast(like.device.type, torch.bfloat16, enabled=False, cache_enabled=False):
            return compiled(logits)

    rows = PROBE_ROWS + (len(like) == PROBE_ROWS)  # of equal sizes the compiler takes one for the other
    probe = torch.zeros(rows, *like.shape, dtype=like.dtype, device=like.device, requires_grad=with_gradient)
    try:
        with torch.set_grad_enabled(with_gradient):
            entropies = entropy(probe)
        if with_gradient:
            entropies.sum().backward()
    except Exception as error:  # torch's compilers raise errors of many types
        cause = getattr(error, "inner_exception", error)
        raise ValueError(
            "expected a compiler that torch.compile can use for actor.use_torch_compile (on CPUs a C++ compiler, such "
            f"as the package g++), got {type(cause).__name__}: {str(cause).strip().splitlines()[0]}; install it, or "
            "set the key to false"
        ) from error
    return entropy


def _import_setuptools() -> None:
    """Imports what torch's compiler needs of it, also on Python 3.11 after a library has looked for pip.

    A search for pip hides setuptools' own distutils from setuptools (`spec_for_pip` in its `_distutils_hack`).
    """
    try:
        importlib.import_module("setuptools")
    except ImportError:
        return  # torch says what it lacks
    except AssertionError:
        os.environ["SETUPTOOLS_USE_DISTUTILS"] = "stdlib"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that of the standard library is deprecated
            importlib.import_module("setuptools")
