"""BoltzGen on this op: Boltz's layers under other names."""

import importlib

import pytest
import torch

from deepspeed4science import drop_in, nn
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


@pytest.mark.parametrize("kind", ["Starting", "Ending"])
def test_our_triangle_attention_takes_its_parameters(client, kind):
    module = importlib.import_module(f"{LAYERS}.triangular_attention.attention")
    theirs = getattr(module, f"TriangleAttention{kind}Node")(compare.C, compare.D, compare.H)
    seen = compare.pair_mask("ragged", "cpu")
    compare.check_same(
        getattr(nn, f"TriangleAttention{kind}Node")(compare.C, compare.D, compare.H, bias=False),
        compare.randomised(theirs),
        [(2, compare.L, compare.L, compare.C)],
        lambda module, x: module(x, seen),
        lambda module, x: module(x, mask=seen.to(x.dtype)),
    )


def test_our_attention_with_pair_bias_takes_its_parameters(client, monkeypatch):
    module = importlib.import_module(f"{LAYERS}.attention")
    theirs = module.AttentionPairBias(c_s=24, c_z=10, num_heads=3)
    seen = compare.pair_mask("ragged", "cpu")[:, 0]

    def call(module, a, z):
        with monkeypatch.context() as patch:
            if a.dtype == torch.float64:  # its attention is in float32
                patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return module(a, z, seen.to(a.dtype), a)

    compare.check_same(
        nn.AttentionPairBias(24, 10, 8, 3, norm_a=False),
        compare.randomised(theirs),
        [(2, compare.L, 24), (2, compare.L, compare.L, 10)],
        lambda module, a, z: module(a, z, mask=seen),
        call,
    )


def test_norms_of_queries_and_keys_are_refused(client):
    theirs = importlib.import_module(f"{LAYERS}.attention").AttentionPairBias(
        c_s=24, c_z=10, num_heads=3, use_qk_norm=True
    )
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_norm"):
        nn.AttentionPairBias(24, 10, 8, 3, norm_a=False).load_state_dict(theirs.state_dict())


def test_recipes_of_the_readme(client, capsys):
    compare.check_recipes(CLIENT, capsys)
