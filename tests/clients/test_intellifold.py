"""IntelliFold on this op: switched, and with its own operators around what DeepSpeed's builder
loads.
"""

import importlib
import re

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention, drop_in, nn
from op_builder import EvoformerAttnBuilder, EvoformerAttnCPUBuilder
from op_builder.errors import ToolchainError
from tests.clients import compare

CLIENT = "intellifold"
pytestmark = pytest.mark.usefixtures("seed", "client")
MODEL = "intellifold.openfold.model"
FLAG = {"use_deepspeed_evo_attention": True}


def layer(module, name, *arguments, **options):
    kind = getattr(importlib.import_module(f"{MODEL}.{module}"), name)
    return compare.randomised(kind(*arguments, **options))


def triangle(starting=True):
    sizes = (compare.C, compare.D, compare.H)
    return layer("triangular_attention", "TriangleAttention", *sizes, starting=starting)


@compare.each
@compare.precision
@compare.mask_kind
@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
def test_triangle_attention(device, autocast, mask, starting):
    seen = compare.pair_mask(mask, device)

    def plain(module, x, **flags):
        return module(x, mask=seen.to(x.dtype), **flags)

    def switched(module, x):
        with drop_in.switch("intellifold"):
            return plain(module, x, **FLAG)

    compare.check(
        triangle(starting).to(device),
        [(2, compare.L, compare.L, compare.C)],
        plain,
        switched,
        autocast=autocast,
        read=seen[..., None],
    )


@compare.each
@compare.precision
def test_pair_weighted_averaging(device, autocast):
    """Attention with queries and keys of 0: the weights are those of the pair bias."""
    module = layer("pairformer", "MSAPairWeightedAveraging", compare.C, compare.D, compare.H, 10)

    def switched(module, m, z):
        with drop_in.switch("intellifold"):
            return module(m, z, **FLAG)

    shapes = [(2, 5, compare.L, compare.C), (2, compare.L, compare.L, 10)]
    compare.check(
        module.to(device), shapes, lambda module, m, z: module(m, z), switched, autocast=autocast
    )


def test_its_own_operators(client, monkeypatch):
    """They call `EvoformerAttnBuilder().load().attention` and `.attention_bwd`: here, on a CPU."""
    name = "intellifold.openfold.utils.kernel.traceable_evoformer_attn"
    with drop_in.use_as_deepspeed():
        own = importlib.import_module(name)
        assert own.EvoformerAttnBuilder is EvoformerAttnBuilder
        monkeypatch.setattr(own, "EvoformerAttnBuilder", EvoformerAttnCPUBuilder)
        for operator in ("deepspeed_evoformer_attention", "deepspeed_evoformer_attention_bwd"):
            own.lib.impl(operator, getattr(own, f"{operator}_impl"), "CPU")  # they have CUDA's
        shape = (2, 3, compare.L, compare.H, compare.D)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        bias1 = torch.where(torch.rand(2, 3, 1, 1, compare.L) < 0.3, -1e9, 0.0)
        bias2 = torch.randn(2, 1, compare.H, compare.L, compare.L, requires_grad=True)
        leaves = (q, k, v, bias2)
        do_ = torch.randn(shape)
        found = [own.DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])]
        found += torch.autograd.grad(found[0], leaves, do_)
    expected = [DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])]
    expected += torch.autograd.grad(expected[0], leaves, do_)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
def test_our_triangle_attention_takes_its_parameters(client, starting):
    """Its ending node has the pair bias of (i, k), where algorithm 14 has that of (k, i)."""
    seen = compare.pair_mask("ragged", "cpu")
    sizes, options = (compare.C, compare.D, compare.H), {"bias": False}
    ours = nn.TriangleAttentionStartingNode(*sizes, **options)
    if not starting:
        ours = nn.TriangleAttentionEndingNode(*sizes, **options, transpose_bias=True)
    compare.check_same(
        ours,
        triangle(starting),
        [(2, compare.L, compare.L, compare.C)],
        lambda module, x: module(x, seen),
        lambda module, x: module(x, mask=seen.to(x.dtype)),
    )


def test_the_list_that_its_layer_norm_sets_is_told(client, monkeypatch):
    """It sets TORCH_CUDA_ARCH_LIST where it compiles that layer norm, for 9.0 too."""
    place = client / "intellifold/openfold/utils/layer_norm/torch_ext_compile.py"
    (architectures,) = re.findall(r'"TORCH_CUDA_ARCH_LIST"\] = "(.*)"', place.read_text())
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
    message = "add 9.0 to TORCH_CUDA_ARCH_LIST, or unset it .*may have set it .*start it again"
    with pytest.raises(ToolchainError, match=message):
        EvoformerAttnBuilder().arch_for((9, 0))


def test_recipes_of_the_readme(client, capsys):
    compare.check_recipes(CLIENT, capsys)
