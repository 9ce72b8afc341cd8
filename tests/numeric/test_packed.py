"""Triangle attention whose gradients are columns of one tensor, against the same layer without:
kernels write dq, dk and dv with the strides of a product's columns.
"""

import contextlib
import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deepspeed4science import nn
from deepspeed4science.errors import DoubleBackwardError
from deepspeed4science.nn import attention, triangle
from deepspeed4science.packed import backward_packed_op
from deepspeed4science.reference import evoformer_attention
from tests.numeric import law
from tests.numeric.cases import DEVICES

pytestmark = pytest.mark.usefixtures("seed")
EACH = pytest.mark.parametrize("device", DEVICES)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
# Shape of pairs, channels of a head, heads, and whether there is a mask: calls of few scores, odd
# lengths, several of a batch, every tier of head dimensions.
SIZES = {
    "few": ((2, 5, 5), 8, 2, True),
    "odd": ((2, 37, 37), 8, 3, True),
    "d16": ((70, 70), 16, 4, True),
    "d32": ((1, 2, 130, 130), 32, 4, False),
    "d64": ((1, 96, 96), 64, 2, True),
    "d128": ((1, 66, 66), 128, 1, True),
}


@contextlib.contextmanager
def plainly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triangle, "can_be_recorded", lambda _: False)
        yield


def gradients(layer, x, mask, do_):
    o = layer(x, mask)
    return o.detach(), *torch.autograd.grad(o, [x, *layer.parameters()], do_)


def exact_gradients(layer, x, mask, do_):
    """The same in float64, around the definition of the op."""
    with plainly(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention,
            "DS4Sci_EvoformerAttention",
            lambda q, k, v, biases: evoformer_attention(q, k, v, *biases),
        )
        wide = x.detach().double().requires_grad_()
        return gradients(copy.deepcopy(layer).double(), wide, mask, do_.double())


def inputs(shape, D, H, masked, device, dtype, ending, transposed=False):
    """(layer, x, mask, do_)"""
    kind = nn.TriangleAttentionEndingNode if ending else nn.TriangleAttentionStartingNode
    layer = kind(24, D, H, transpose_bias=transposed).to(device, dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(*shape, 24, device=device, dtype=dtype, requires_grad=True)
    mask = torch.rand(shape, device=device) < 0.7 if masked else None
    return layer, x, mask, torch.randn_like(x)


@EACH
@DTYPES
@pytest.mark.parametrize("size", [*SIZES, "odd-transposed"])
@pytest.mark.parametrize("ending", [False, True], ids=["starting", "ending"])
def test_as_exact_as_the_parts(device, dtype, size, ending):
    """The error law, with the layer by its parts in place of eager: the order of additions, and so
    the rounding of each result, varies from run to run.
    """

    size, _, transposed = size.partition("-")

    def draw():
        layer, *tensors = inputs(*SIZES[size], device, dtype, ending, transposed == "transposed")
        found = gradients(layer, *tensors)
        with plainly():
            by_parts = gradients(layer, *tensors)
        exact = exact_gradients(layer, *tensors)
        for one, other in zip(found, exact, strict=True):
            assert law.same_non_finite(one, other)
        results = [joined(each, exact) for each in (found, by_parts, exact)]
        return dict(zip(("O", "dx", "parameters"), zip(*results, strict=True), strict=True))

    law.check_stacked(draw, torch.finfo(dtype).eps)


def joined(gradients, exact):
    """(O, dx, all parameters' gradients), these relative to the norms of the exact ones. Alone,
    each has so few elements that its error depends on chance.
    """
    o, dx, *of_parameters = gradients
    relative = [
        one.double().flatten() / ref.norm()
        for one, ref in zip(of_parameters, exact[2:], strict=True)
        if not law.is_rounding(ref)
    ]
    return o, dx, torch.cat(relative)


@EACH
def test_length_at_which_dq_is_added_up_in_memory(device):
    if device == "cpu":
        pytest.skip("GPUs have other kernels above 1,536 queries; for a CPU it is only long")
    layer, *tensors = inputs((1600, 1600), 32, 1, False, device, torch.bfloat16, ending=True)
    found = gradients(layer, *tensors)
    with plainly():
        by_parts = gradients(layer, *tensors)
    for one, other in zip(found, by_parts, strict=True):
        assert law.same_non_finite(one, other)
        # Each of the two is off by up to two roundings of its own.
        assert law.relative_error(one, other) <= 4 * torch.finfo(torch.bfloat16).eps


@EACH
@pytest.mark.parametrize("ending", [False, True])
def test_opcheck(device, ending):
    L, H, D, W = 4, 2, 8, 128
    o, product = torch.randn(1, L, L, H, D), torch.randn(1, L, L, W)
    lse, bias2 = torch.randn(1, L, H, L), torch.randn(1, 1, H, L, L)
    tensors = (torch.randn_like(o), torch.randn(1, L, L, H * D), product, o, lse)
    tensors = [x.to(device) for x in tensors]
    torch.library.opcheck(backward_packed_op, (*tensors, None, bias2.to(device), ending))


def test_double_backward_is_refused():
    layer = nn.TriangleAttentionStartingNode(12, 8, 2)
    torch.nn.init.normal_(layer.mha.linear_o.weight)
    x = torch.randn(1, 5, 5, 12, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="first derivatives only"):
        dx.sum().backward()


def test_operations_are_counted():
    layer = nn.TriangleAttentionStartingNode(12, 8, 2)
    x = torch.randn(1, 5, 5, 12, requires_grad=True)

    def count():
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        return counter.get_total_flops()

    counted = count()
    with plainly():
        assert counted == count()


def test_what_torch_func_and_inference_take():
    layer = nn.TriangleAttentionStartingNode(12, 8, 2)
    torch.nn.init.normal_(layer.mha.linear_o.weight)
    x = torch.randn(1, 5, 5, 12, requires_grad=True)
    weights = {name: value.detach() for name, value in layer.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(layer, weights, (x.detach(),)).square().sum()

    found = torch.func.grad(loss)(weights)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    for one, other in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer(x.clone()))
