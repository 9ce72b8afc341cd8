"""Layers whose linear maps are wrapped, as LoRA does, or have hooks; pairs that are not square."""

import copy

import pytest
import torch

from deepspeed4science import nn
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.nn.fused.layer import _parts
from deepspeed4science.nn.parameters import is_plain

pytestmark = pytest.mark.usefixtures("seed")
C, D, H, L = 12, 8, 3, 20
TRIANGLES = [nn.TriangleAttentionStartingNode, nn.TriangleAttentionEndingNode]
MAPS = ["linear_q", "linear_k", "linear_v", "linear_g", "linear_o"]


def low_rank(base):
    shapes = (2, base.in_features), (base.out_features, 2)
    return (torch.nn.Parameter(torch.randn(shape)) for shape in shapes)


class Lora(torch.nn.Module):
    """A low-rank term beside a linear map, which keeps its own weight: like PEFT's."""

    def __init__(self, base):
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.a, self.b = low_rank(base)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def other_forward(part):
    """As accelerate replaces `forward` of a module, for itself alone."""
    before, part.a, part.b = part.forward, *low_rank(part)
    part.forward = lambda x: before(x) + x @ part.a.T @ part.b.T
    return part


class Unnamed(torch.nn.Module):
    """A wrapper that has none of a linear map's attributes."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a, self.b = low_rank(base)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def layer_and_input(kind):
    if kind is nn.EvoformerAttention:
        layer, x = kind(C, C, C, D, H), torch.randn(2, 3, L, C)
    else:
        layer, x = kind(C, D, H), torch.randn(2, L, L, C)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer, x, getattr(layer, "mha", layer)


@pytest.mark.parametrize("wrap", [Lora, Unnamed, other_forward])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("kind", [nn.EvoformerAttention, *TRIANGLES])
def test_an_adapter_is_used(kind, name, recorded, wrap):
    layer, x, mha = layer_and_input(kind)
    plain = copy.deepcopy(layer)
    wrapped = wrap(getattr(mha, name))
    setattr(mha, name, wrapped)
    with torch.no_grad():
        getattr(getattr(plain, "mha", plain), name).weight += wrapped.b @ wrapped.a
    expected = plain(x)
    with torch.set_grad_enabled(recorded):
        found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    if recorded:
        found.sum().backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in (wrapped.a, wrapped.b))


@pytest.mark.parametrize("name", MAPS)
def test_hooks_are_called(name):
    layer, x, mha = layer_and_input(nn.TriangleAttentionStartingNode)
    expected, seen = layer(x), []
    getattr(mha, name).register_forward_hook(lambda *call: seen.append(name))
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert seen == [name]


@pytest.mark.parametrize("change", ["wrapped", "forward", "hook", "pre-hook", "backward hook"])
def test_kernels_that_know_weights_only_leave_it_to_the_modules(change):
    layer, _, _ = layer_and_input(nn.TriangleAttentionStartingNode)
    names = [f"mha.{name}" for name in MAPS] + ["linear_z", "layer_norm"]
    assert all(map(is_plain, _parts(layer))) and len(_parts(layer)) == len(names)
    for name in names:
        layer, _, _ = layer_and_input(nn.TriangleAttentionStartingNode)
        part = layer.get_submodule(name)
        if change == "wrapped":
            layer.set_submodule(name, torch.nn.Sequential(part))
        elif change == "forward":
            part.forward = print
        elif change == "hook":
            part.register_forward_hook(print)
        elif change == "pre-hook":
            part.register_forward_pre_hook(print)
        else:
            part.register_full_backward_hook(print)
        assert [is_plain(one) for one in _parts(layer)].count(False) == 1


@pytest.mark.parametrize("shape", [(2, 1, L, C), (2, L, 1, C), (L, L + 1, C), (L, C), (L, L, 7)])
@pytest.mark.parametrize("kind", TRIANGLES)
def test_pairs_are_square(kind, shape):
    """Attention would take the bias of one row for all."""
    layer, _, _ = layer_and_input(kind)
    with pytest.raises(InvalidInputError, match=r"x: expected pairs \[\*, L, L, c_in\], c_in = 12"):
        layer(torch.randn(shape))
    with pytest.raises(InvalidInputError, match=r"mask: expected \[2, 20, 20\], a number"):
        layer(torch.randn(2, L, L, C), torch.ones(2, L, L, 1))


def test_biases_in_the_place_of_keys_are_told():
    layer, x, _ = layer_and_input(nn.EvoformerAttention)
    with pytest.raises(InvalidInputError, match=r"kv_x: expected a tensor.*biases=\[bias1"):
        layer(x, [torch.zeros(2, 3, 1, 1, L)])
