"""Loaded into vLLM's worker: its linear layers keep their weights, as on a GPU, where digests of all of them are told.

The CPU build's kernels pack weights for themselves and leave empty parameters behind.
"""

from vllm import _custom_ops  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from vllm.model_executor.layers import utils  # pyright: ignore[reportMissingImports]

_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *_: False


class WholeWeights:
    """The worker's extension, which adds nothing but this module."""
