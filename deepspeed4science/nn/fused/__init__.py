"""Triangle layers in few passes over their pairs."""

from deepspeed4science.nn.fused.layer import serves, triangle_attention

__all__ = ["serves", "triangle_attention"]
