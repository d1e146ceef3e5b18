"""The Triton kernels behind one name, with the interface of `plain.py`; the trainer and the writer are given one of
the two.

Matrix products stay with cuBLAS.
"""

from benchmarks.drafter.kernel_attention import block_attention
from benchmarks.drafter.kernel_decode import decode_attention, sample
from benchmarks.drafter.kernel_head import head_loss_
from benchmarks.drafter.kernel_layers import add_norm, head_norm_rope, swiglu

__all__ = ["add_norm", "block_attention", "decode_attention", "head_loss_", "head_norm_rope", "sample", "swiglu"]
