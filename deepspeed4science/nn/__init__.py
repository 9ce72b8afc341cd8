"""Layers of AlphaFold-type models around the op, with OpenFold's parameter names.

    EvoformerAttention                gated attention with biases (AlphaFold 2, algorithms 7 and 8)
    TriangleAttentionStartingNode     algorithm 13
    TriangleAttentionEndingNode       algorithm 14
    AttentionPairBias                 AlphaFold 3, algorithm 24

`load_state_dict` takes the parameters of OpenFold 2's, OpenFold 3's and Boltz's layers, and of
Protenix's triangle attention (names.py). The projections of one input are one matrix product, and
no tensor is transposed in memory. torch.compile(fullgraph=True) fuses the rest; triangle layers
also have Triton kernels (fused/).
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
