"""The names that other packages give to these layers' parameters; `load_state_dict` accepts them.

The parameters of OpenFold 2's and 3's `Attention` have the same names as EvoformerAttention's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

# Prefix of a name in the other package -> ours. Other prefixes are equal.
TRIANGLE: Mapping[str, str] = {
    # OpenFold 2 (TriangleAttention), Boltz and Protenix (TriangleAttention); OpenFold 3 has ours.
    "linear.": "linear_z.",
}
PAIR_BIAS: Mapping[str, str] = {
    # Boltz and BoltzGen (AttentionPairBias); OpenFold 3's AttentionPairBias and
    # DiffusionAttentionPairBias have ours.
    "norm_s.": "layer_norm_a.",
    "proj_q.": "mha.linear_q.",
    "proj_k.": "mha.linear_k.",
    "proj_v.": "mha.linear_v.",
    "proj_g.": "mha.linear_g.",
    "proj_o.": "mha.linear_o.",
    "proj_z.0.": "layer_norm_z.",
    "proj_z.1.": "linear_z.",
}


def accept(layer: nn.Module, names: Mapping[str, str]) -> None:
    """Make `load_state_dict` of the layer, and of a model that holds it, accept `names`, too."""
    layer.register_load_state_dict_pre_hook(partial(_rename, names))


def _rename(
    names: Mapping[str, str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any
) -> None:
    for name in list(state):
        for theirs, ours in names.items():
            if name.startswith(prefix + theirs):
                state[prefix + ours + name.removeprefix(prefix + theirs)] = state.pop(name)
