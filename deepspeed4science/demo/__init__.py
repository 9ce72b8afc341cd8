"""The demo: a real protein family through all four Evoformer attentions. `python -m
deepspeed4science demo`.
"""

from deepspeed4science.demo.cli import main

__all__ = ["main"]
