"""flash_qla: the Gated Delta Rule (linear attention) as ahead-of-time compiled CUDA kernels, with a CPU implementation.

`chunk_gated_delta_rule` is the function to start with. The same capabilities are torch ops, `torch.ops.flash_qla.*`.
Importing this package loads the compiled library but does not initialise CUDA.
"""

from . import _autograd, _cpu, _fakes
from ._library import build_info
from ._version import __version__
from .ops import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

__all__ = [
    "__version__",
    "build_info",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
]
