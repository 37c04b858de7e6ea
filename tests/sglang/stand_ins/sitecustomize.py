"""Declares torchvision's operators where its compiled library needs CUDA and does not load.

torchvision registers shapes for them when it is imported, and SGLang imports it for every model.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

OPERATORS = ("nms", "qnms")


class _Declaring(MetaPathFinder):
    """Acts on the first import that needs the operators, and finds no module itself."""

    declared: Any = None

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname != "torchvision._meta_registrations":
            return
        sys.meta_path.remove(self)
        import torch

        if hasattr(torch.ops.torchvision, OPERATORS[0]):
            return
        self.declared = torch.library.Library("torchvision", "FRAGMENT")
        for operator in OPERATORS:
            self.declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(self)  # the declarations live as long as their library


_kept: list[_Declaring] = []
sys.meta_path.insert(0, _Declaring())
