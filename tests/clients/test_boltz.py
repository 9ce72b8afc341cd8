"""Boltz 2 on this op."""

import importlib

import pytest
import torch

from deepspeed4science import drop_in, nn
from deepspeed4science.drop_in import clients
from tests.clients import compare

CLIENT = "boltz"
pytestmark = pytest.mark.usefixtures("seed", "client")
LAYERS = "boltz.model.layers"


@pytest.fixture
def attention(client):
    return importlib.import_module(f"{LAYERS}.triangular_attention.attention")


def kernels(module, x, mask):
    with drop_in.switch("boltz"):
        return module(x, mask=mask.to(x.dtype), use_kernels=True)


def plain(module, x, mask):
    return module(x, mask=mask.to(x.dtype))


@compare.each
@compare.precision
@compare.mask_kind
@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
def test_triangle_attention(attention, device, autocast, mask, starting):
    layer = attention.TriangleAttention(compare.C, compare.D, compare.H, starting=starting)
    seen = compare.pair_mask(mask, device)
    compare.check(
        compare.randomised(layer).to(device),
        [(2, compare.L, compare.L, compare.C)],
        lambda module, x: plain(module, x, seen),
        lambda module, x: kernels(module, x, seen),
        autocast=autocast,
        read=seen[..., None],
    )


@compare.each
@compare.precision
@pytest.mark.parametrize("kind", ["Outgoing", "Incoming"])
def test_triangle_multiplication(client, monkeypatch, device, autocast, kind):
    module = importlib.import_module(f"{LAYERS}.triangular_mult")
    layer = getattr(module, f"TriangleMultiplication{kind}")(compare.C)
    seen = compare.pair_mask("padded", device)

    def plain(module, x):
        with monkeypatch.context() as patch:
            if x.dtype == torch.float64:  # the products of its plain path are in float32
                patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return module(x, mask=seen.to(x.dtype))

    compare.check(
        compare.randomised(layer).to(device),
        [(2, compare.L, compare.L, compare.C)],
        plain,
        lambda module, x: kernels(module, x, seen),
        autocast=autocast,
        read=seen[..., None],
    )


@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
def test_our_triangle_attention_takes_its_parameters(attention, starting):
    kind = nn.TriangleAttentionStartingNode if starting else nn.TriangleAttentionEndingNode
    theirs = attention.TriangleAttention(compare.C, compare.D, compare.H, starting=starting)
    seen = compare.pair_mask("ragged", "cpu")
    compare.check_same(
        kind(compare.C, compare.D, compare.H, bias=False),
        compare.randomised(theirs),
        [(2, compare.L, compare.L, compare.C)],
        lambda module, x: module(x, seen),
        lambda module, x: plain(module, x, seen),
    )


@pytest.mark.parametrize("module", ["attention", "attentionv2"], ids=["boltz1", "boltz2"])
def test_our_attention_with_pair_bias_takes_its_parameters(client, module):
    first = module == "attention"
    theirs = importlib.import_module(f"{LAYERS}.{module}").AttentionPairBias(
        c_s=24, c_z=10, num_heads=3
    )
    seen = compare.pair_mask("ragged", "cpu")[:, 0]
    shapes = [(2, compare.L, 24), (2, compare.L, compare.L, 10)]

    def call(module, a, z):
        mask = seen.to(a.dtype)
        return module(a, z, mask) if first else module(a, z, mask, a)

    compare.check_same(
        nn.AttentionPairBias(24, 10, 8, 3, norm_a=first),
        compare.randomised(theirs),
        shapes,
        lambda module, a, z: module(a, z, mask=seen),
        call,
    )


def test_affinities_are_said_to_be_computed_without_kernels(client):
    """Its command line passes use_kernels to one of the two models that it loads."""
    main = (client / "boltz/main.py").read_text()
    calls = [call.split("model_module.eval()")[0] for call in main.split(".load_from_checkpoint(")]
    assert ["use_kernels" in call for call in calls[1:]] == [True, False]
    assert "affinity_checkpoint" in calls[2]
    assert "not for affinities" in clients.find(CLIENT).hint


def test_recipes_of_the_readme(client, capsys):
    compare.check_recipes(CLIENT, capsys)
