"""Layers whose linear maps are wrapped, as LoRA does, or have hooks; pairs that are not square."""

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepspeed4science import nn
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.nn import fused
from deepspeed4science.nn.fused.layer import _parts
from deepspeed4science.nn.parameters import is_plain
from tests.numeric import law

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


class Scaled(torch.nn.Module):
    """A factor in float32 for each channel, under autocast, too: like DoRA's."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.factor = torch.nn.Parameter(torch.rand(base.out_features) + 0.5)

    def forward(self, x):
        return self.base(x) * self.factor


class Quantised(torch.Tensor):
    """A weight in steps of a quarter, known to linear maps only."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        if function is torch.nn.functional.linear:
            x, weight, *bias = arguments
            return function(x, weight.as_subclass(torch.Tensor) / 4, *bias)
        if function is torch.cat:
            raise NotImplementedError("torch.cat of quantised weights")
        return super().__torch_function__(function, types, arguments, named or {})


def quantise(part):
    """As weight-only quantisation does: in place, the module stays a linear map."""
    steps = (part.weight.detach() * 4).round().as_subclass(Quantised)
    part.weight = torch.nn.Parameter(steps, requires_grad=False)


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
@pytest.mark.parametrize("kind", TRIANGLES)
def test_a_map_that_gives_float32_under_autocast(kind, name):
    layer, x, mha = layer_and_input(kind)
    setattr(mha, name, Scaled(getattr(mha, name)))
    leaves = [x.requires_grad_(), *layer.parameters()]
    dy = torch.randn_like(x)

    def results(autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    for found, expected in zip(results(True), results(False), strict=True):
        assert law.relative_error(found, expected) < 0.1


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("kind", [nn.EvoformerAttention, *TRIANGLES])
def test_weights_that_are_a_subclass_of_tensors(kind, name, recorded):
    layer, x, mha = layer_and_input(kind)
    plain = copy.deepcopy(layer)
    quantise(getattr(mha, name))
    assert not is_plain(getattr(mha, name))
    with torch.no_grad():
        weight = getattr(getattr(plain, "mha", plain), name).weight
        weight.copy_((weight * 4).round() / 4)
    with torch.set_grad_enabled(recorded):
        found = layer(x)
    torch.testing.assert_close(found, plain(x), rtol=1e-3, atol=1e-3)
    if recorded:
        found.sum().backward()


def test_fake_weights_are_plain():
    with torch._subclasses.FakeTensorMode():
        layer, _, _ = layer_and_input(nn.TriangleAttentionStartingNode)
    assert all(map(is_plain, _parts(layer)))


@pytest.mark.parametrize("name", MAPS)
def test_hooks_are_called(name):
    layer, x, mha = layer_and_input(nn.TriangleAttentionStartingNode)
    expected, seen = layer(x), []
    getattr(mha, name).register_forward_hook(lambda *call: seen.append(name))
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert seen == [name]


class Doubled(nn.EvoformerAttention):
    def forward(self, *arguments, **named):
        return 2 * super().forward(*arguments, **named)


def double_output_map(mha, _):
    mha.linear_o.weight.mul_(2)


def double(mha, how):
    if how == "hook":
        mha.register_forward_hook(lambda module, inputs, o: 2 * o)
    elif how == "pre-hook":
        mha.register_forward_pre_hook(double_output_map)
    elif how == "forward":
        before = mha.forward
        mha.forward = lambda *arguments, **named: 2 * before(*arguments, **named)
    else:
        mha.__class__ = Doubled


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward", "subclass"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", TRIANGLES)
def test_mha_is_called_where_something_waits_for_it(kind, recorded, how):
    layer, x, mha = layer_and_input(kind)
    torch.nn.init.zeros_(mha.linear_o.bias)
    mha.linear_o.requires_grad_(False)
    mask = torch.rand(2, L, L) < 0.7
    expected = x + 2 * layer(x, mask)
    double(mha, how)
    assert not layer.is_one_product()
    with torch.set_grad_enabled(recorded):
        found = layer(x, mask, residual=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", TRIANGLES)
def test_mha_without_a_gate(kind):
    layer, x, mha = layer_and_input(kind)
    torch.nn.init.zeros_(mha.linear_g.weight)
    torch.nn.init.constant_(mha.linear_g.bias, 100)  # open
    expected, mha.linear_g = layer(x), None
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


CHANGES = ["wrapped", "forward", "hook", "pre-hook", "backward hook", "backward pre-hook"]


@pytest.mark.parametrize("change", CHANGES)
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
        elif change == "backward hook":
            part.register_full_backward_hook(print)
        else:
            part.register_full_backward_pre_hook(print)
        assert [is_plain(one) for one in _parts(layer)].count(False) == 1


def on_hopper(layer):
    """Whether Hopper's kernels would take the layer."""
    x = SimpleNamespace(
        is_cuda=True, device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, L, L, 32)
    )
    with mock.patch("deepspeed4science.nn.fused.layer._compiles_for", return_value=True):
        return fused.serves(layer, x)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layer_norm", torch.nn.LayerNorm(32, bias=False)),
        ("layer_norm", torch.nn.LayerNorm(32, elementwise_affine=False)),
        ("linear_z", torch.nn.Linear(32, 4)),
        *((f"mha.linear_{map}", torch.nn.Linear(32, 32)) for map in "qkv"),
        ("mha.linear_g", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kernels_leave_parameters_that_they_do_not_know(name, part):
    layer = nn.TriangleAttentionStartingNode(32, 8, 4)
    assert on_hopper(layer)
    owner, _, own = name.rpartition(".")
    setattr(layer.get_submodule(owner), own, part)
    assert not on_hopper(layer)
    assert layer(torch.randn(1, L, L, 32)).shape == (1, L, L, 32)


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward", "subclass"])
def test_kernels_leave_mha_where_something_waits_for_it(how):
    layer = nn.TriangleAttentionStartingNode(32, 8, 4)
    double(layer.mha, how)
    assert not on_hopper(layer)


@pytest.mark.parametrize("kind", TRIANGLES)
@pytest.mark.parametrize("shape", [(), (L,), (1, L), (L, 1), (L, L), (2, 1, L), (2, L, 1)])
def test_masks_of_fewer_pairs_are_broadcast(kind, shape):
    layer, x, _ = layer_and_input(kind)
    mask = torch.rand(shape) < 0.7
    expected = layer(x, mask.expand(2, L, L))
    torch.testing.assert_close(layer(x, mask), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 1, L, C), (2, L, 1, C), (L, L + 1, C), (L, C), (L, L, 7)])
@pytest.mark.parametrize("kind", TRIANGLES)
def test_pairs_are_square(kind, shape):
    """Attention would take the bias of one row for all."""
    layer, _, _ = layer_and_input(kind)
    with pytest.raises(InvalidInputError, match=r"x: expected pairs \[\*, L, L, c_in\], c_in = 12"):
        layer(torch.randn(shape))
    with pytest.raises(InvalidInputError, match=r"mask: expected \[2, 20, 20\], a number"):
        layer(torch.randn(2, L, L, C), torch.ones(2, L, L, 1))


@pytest.mark.parametrize("kind", TRIANGLES)
def test_batches_are_not_taken_for_templates(kind):
    """As many templates as batches, and a mask without the dimension of templates."""
    layer, _, _ = layer_and_input(kind)
    x, mask = torch.randn(2, 2, L, L, C), torch.rand(2, L, L) < 0.7
    with pytest.raises(InvalidInputError, match=r"mask: expected .* or 1 in .*; got \[2, 20, 20\]"):
        layer(x, mask)
    expected = torch.stack([layer(x[:, n], mask) for n in range(2)], dim=1)
    torch.testing.assert_close(layer(x, mask.unsqueeze(1)), expected, rtol=1e-4, atol=1e-4)
    assert layer(x, mask[:1]).shape == x.shape


def test_biases_in_the_place_of_keys_are_told():
    layer, x, _ = layer_and_input(nn.EvoformerAttention)
    with pytest.raises(InvalidInputError, match=r"kv_x: expected a tensor.*biases=\[bias1"):
        layer(x, [torch.zeros(2, 3, 1, 1, L)])
