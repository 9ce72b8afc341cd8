"""Triangle layers whose norm, pair bias, gate and output run in Triton kernels, which read the
pairs only a few times (docs/kernels/triangle-layers.md).
"""

from deepspeed4science.nn.fused.layer import serves, triangle_attention

__all__ = ["serves", "triangle_attention"]
