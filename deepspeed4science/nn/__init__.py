"""Layers of AlphaFold-type models around the op, with OpenFold's parameter names.

    EvoformerAttention                gated attention with biases (AlphaFold 2, algorithms 7 and 8)
    TriangleAttentionStartingNode     algorithm 13
    TriangleAttentionEndingNode       algorithm 14
    AttentionPairBias                 AlphaFold 3, algorithm 24

`load_state_dict` takes the parameters of OpenFold 2's, OpenFold 3's and Boltz's layers: names.py.
Plain PyTorch, for torch.compile(fullgraph=True) to fuse: one projection for all that a layer reads,
and no transposed copies.
"""

from deepspeed4science.nn.attention import EvoformerAttention
from deepspeed4science.nn.pair_bias import AttentionPairBias
from deepspeed4science.nn.triangle import TriangleAttentionEndingNode, TriangleAttentionStartingNode

__all__ = [
    "AttentionPairBias",
    "EvoformerAttention",
    "TriangleAttentionEndingNode",
    "TriangleAttentionStartingNode",
]
