"""The demo, `python -m deepspeed4science demo`: a real protein family through all four Evoformer
attentions.
"""

from deepspeed4science.demo.cli import main

__all__ = ["main"]
