"""BoltzGen on this op: Boltz's layers under other names."""

import importlib

import pytest
import torch

from deepspeed4science import drop_in
from tests.clients import compare

CLIENT = "boltzgen"
pytestmark = pytest.mark.usefixtures("seed", "client")
LAYERS = "boltzgen.model.layers"


@compare.each
@compare.precision
@pytest.mark.parametrize(
    "kind",
    ["TriangleAttention", "TriangleMultiplicationOutgoing", "TriangleMultiplicationIncoming"],
)
def test_triangles(client, monkeypatch, device, autocast, kind):
    attention = kind == "TriangleAttention"
    place = "triangular_attention.attention" if attention else "triangular"
    sizes = (compare.C, compare.D, compare.H) if attention else (compare.C,)
    layer = getattr(importlib.import_module(f"{LAYERS}.{place}"), kind)(*sizes)
    seen = compare.pair_mask("padded", device)

    def plain(module, x):
        with monkeypatch.context() as patch:
            if x.dtype == torch.float64:  # the products of its plain path are in float32
                patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return module(x, mask=seen.to(x.dtype))

    def switched(module, x):
        with drop_in.switch("boltzgen"):
            return module(x, mask=seen.to(x.dtype), use_kernels=True)

    compare.check(
        compare.randomised(layer).to(device),
        [(2, compare.L, compare.L, compare.C)],
        plain,
        switched,
        autocast=autocast,
        read=seen[..., None],
    )


def test_recipes_of_the_readme(client, capsys):
    compare.check_recipes(CLIENT, capsys)
