"""Triangle layers in few passes: on GPUs Triton's kernels, elsewhere what they compute in plain
PyTorch, which is what this file makes of layers there.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deepspeed4science import nn
from deepspeed4science.errors import DoubleBackwardError
from deepspeed4science.nn import fused
from deepspeed4science.nn.fused import operators
from tests.numeric import law
from tests.numeric.cases import DEVICES

pytestmark = pytest.mark.usefixtures("seed")
EACH = pytest.mark.parametrize("device", DEVICES)


@dataclass(frozen=True)
class Case:
    id: str
    shape: tuple = (1, 70, 70)  # of pairs
    channels: int = 128
    heads: int = 4
    ending: bool = False
    bias: bool = False
    transpose_bias: bool = False
    residual: bool = True
    masked: bool = False
    x: torch.dtype = torch.float32
    autocast: torch.dtype | None = torch.bfloat16

    def layer(self, device):
        kind = nn.TriangleAttentionEndingNode if self.ending else nn.TriangleAttentionStartingNode
        options = {"bias": self.bias, "transpose_bias": self.transpose_bias}
        layer = kind(self.channels, self.channels // self.heads, self.heads, **options)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return layer.to(device, torch.float32 if self.autocast else self.x)


CASES = [
    Case("starting"),
    Case("starting-alphafold2-mask", bias=True, masked=True),
    Case("starting-without-residual", residual=False),
    Case("ending", ending=True),
    Case("ending-alphafold2-mask", ending=True, bias=True, masked=True),
    Case("ending-without-residual", ending=True, residual=False),
    Case("starting-transposed", transpose_bias=True),
    Case("ending-transposed-mask", ending=True, transpose_bias=True, masked=True),
    Case("batch-odd", (2, 67, 67), masked=True),
    Case("batch-odd-ending", (2, 67, 67), ending=True, bias=True),
    Case("batch-odd-ending-transposed", (2, 67, 67), ending=True, transpose_bias=True),
    Case("no-batch", (65, 65)),
    Case("64-channels", channels=64),
    Case("64-channels-ending", channels=64, ending=True, bias=True),
    Case("32-channels", channels=32, bias=True),
    Case("bf16", x=torch.bfloat16, autocast=None),
    Case("bf16-ending", x=torch.bfloat16, autocast=None, ending=True, bias=True),
    Case("fp16", autocast=torch.float16),
    Case("few-scores", (1, 20, 20), bias=True),
    Case("four-pairs", (3, 2, 2), bias=True),
    Case("heads-of-16", heads=8, masked=True),
]


def everywhere(device):
    """Layers take few passes."""
    if device == "cpu":
        return mock.patch.object(fused, "serves", _always)
    return ExitStack()


def _always(*_):  # torch.compile traces it, and no mock
    return True


def by_parts():
    stack = ExitStack()
    stack.enter_context(mock.patch.object(fused, "serves", return_value=False))
    stack.enter_context(
        mock.patch("deepspeed4science.nn.attention.DS4Sci_EvoformerAttention", law.plain)
    )
    stack.enter_context(
        mock.patch("deepspeed4science.nn.triangle.can_be_recorded", return_value=False)
    )
    return stack


def gradients(layer, case, x, mask, dy, dtype=None, autocast=None):
    """Of x and of each parameter, behind the result."""
    weights = {n: p.detach().to(dtype or p.dtype) for n, p in layer.named_parameters()}
    leaves = [x.detach().to(dtype or x.dtype), *weights.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        y = torch.func.functional_call(
            layer, weights, (leaves[0], mask), {"residual": case.residual}
        )
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@EACH
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_error_law(device, case):
    layer = case.layer(device)
    if device == "cpu":  # there it is about what is put together, and not about tiles
        case = replace(case, shape=tuple(min(size, 20) for size in case.shape))
    shape = (*case.shape, case.channels)
    rounded = case.autocast or case.x

    def draw():
        x = torch.randn(shape, device=device).to(case.x)
        dy = torch.randn_like(x)
        mask = torch.rand(case.shape, device=device) < 0.7 if case.masked else None
        run = partial(gradients, layer, case, x, mask, dy)
        with (
            everywhere(device),
            mock.patch.object(fused, "triangle_attention", wraps=fused.triangle_attention) as taken,
        ):
            found = run(autocast=case.autocast)
            assert taken.called
        with by_parts():
            eager, exact = run(autocast=case.autocast), run(torch.float64)
        names = ["y", "dx", *dict(layer.named_parameters())]
        compared = dict(zip(names, zip(found, eager, exact, strict=True), strict=True))
        for name, (one, other, _) in compared.items():
            assert one.shape == other.shape and one.dtype == other.dtype, name
        return compared

    # on a GPU the error of delta decides about gradients of heads with few channels (math.md)
    law.check_stacked(draw, torch.finfo(rounded).eps, draws=48 if device == "cuda" else 1)


@EACH
@pytest.mark.parametrize("ending", [False, True])
def test_compile_whole(device, ending):
    case = Case("", ending=ending, bias=True)
    layer = case.layer(device)
    x = torch.randn(1, 66, 66, 128, device=device)
    with everywhere(device):
        expected = gradients(layer, case, x, None, x, autocast=torch.bfloat16)
        backend = "aot_eager" if device == "cpu" else "inductor"
        layer.compile(fullgraph=True, backend=backend)
        found = gradients(layer, case, x, None, x, autocast=torch.bfloat16)
    for one, other in zip(found, expected, strict=True):
        assert law.relative_error(one, other) < 0.01


@EACH
def test_inference(device):
    layer = Case("").layer(device)
    x = torch.randn(1, 66, 66, 128, device=device)
    with everywhere(device), torch.autocast(x.device.type, torch.bfloat16):
        expected = layer(x.clone().requires_grad_(), residual=True)
        with torch.no_grad():
            assert torch.equal(layer(x, residual=True), expected)


@EACH
def test_addresses_of_any_alignment(device):
    """Parts of larger tensors need not begin at multiples of 16 bytes."""
    case = Case("", bias=True)
    layer = case.layer(device)
    x, dy = (torch.randn(1, 66, 66, 128, device=device) for _ in range(2))
    with everywhere(device):
        expected = gradients(layer, case, x, None, dy, autocast=torch.bfloat16)
        found = gradients(layer, case, _unaligned(x), None, _unaligned(dy), autocast=torch.bfloat16)
    for one, other in zip(found, expected, strict=True):
        assert law.relative_error(one, other) < 1e-3


def _unaligned(x):
    """A copy that begins 4 bytes behind an aligned address."""
    whole = x.new_empty(x.numel() + 1)
    return whole[1:].view(x.shape).copy_(x)


@EACH
@pytest.mark.parametrize("ending", [False, True])
def test_parameters_of_any_strides(device, ending):
    """As `load_state_dict(assign=True)` leaves them where arrays of another program are transposed.
    Kernels read parameters, but for those of the joined product, by address.
    """
    layer = Case("", ending=ending, bias=True, x=torch.bfloat16, autocast=None).layer(device)
    x = torch.randn(1, 20, 20, 128, device=device, dtype=torch.bfloat16)
    apart = {
        name: torch.stack([one, torch.zeros_like(one)], dim=-1)[..., 0]
        for name, one in layer.state_dict().items()
    }
    with everywhere(device), mock.patch.object(operators, "forward", wraps=operators.forward) as to:
        expected = layer(x)
        layer.load_state_dict(apart, assign=True)
        assert not any(one.is_contiguous() for one in layer.parameters())
        found = layer(x)
    by_address = ("norm_weight", "norm_bias", "z_weight", "out_weight", "out_bias")
    for call in to.call_args_list:
        assert all(getattr(call.args[0], name).is_contiguous() for name in by_address)
    torch.testing.assert_close(found, expected)


@EACH
def test_no_batch_element(device):
    case = Case("", bias=True)
    layer = case.layer(device)
    x = torch.randn(0, 5, 5, 128, device=device)
    with everywhere(device):
        y, dx, *rest = gradients(layer, case, x, None, x, autocast=torch.bfloat16)
    assert y.shape == dx.shape == x.shape
    assert all((one == 0).all() for one in rest)


def test_residual_of_other_layers():
    """Where kernels take no such call."""
    layer = Case("", channels=32, heads=4).layer("cpu")
    x = torch.randn(1, 9, 9, 32)
    assert not fused.serves(layer, x)
    torch.testing.assert_close(layer(x, residual=True), x + layer(x))


@EACH
def test_operations_are_counted(device):
    """As those of the parts, whose product has columns of zeros, too."""
    layer = Case("").layer(device)
    x = torch.randn(1, 20, 20, 128, device=device, requires_grad=True)

    def count():
        with FlopCounterMode(display=False) as counter:
            with torch.autocast(x.device.type, torch.bfloat16):
                y = layer(x)
            y.sum().backward()
        return counter.get_total_flops()

    with everywhere(device):
        counted = count()
    with mock.patch.object(fused, "serves", return_value=False):
        assert 0.9 * count() < counted < count()


@EACH
def test_double_backward_is_refused(device):
    layer = Case("").layer(device)
    x = torch.randn(1, 66, 66, 128, device=device, requires_grad=True)
    with everywhere(device), torch.autocast(x.device.type, torch.bfloat16):
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(DoubleBackwardError, match="first derivatives only"):
            dx.sum().backward()


@EACH
@pytest.mark.parametrize("ending", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(device, ending, bias):
    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, device=device, dtype=dtype)

    x, norm, weight = random(1, 8, 8, 32), random(32), random(32, 32)
    some, dtype = random(32) if bias else None, torch.bfloat16
    parameters = (norm, norm, random(4, 32), *[weight] * 4, some, weight, some)
    arguments = (x, *parameters, None, dtype, 4, 1e-5, ending, True)
    torch.library.opcheck(operators.forward_op, arguments)
    y, *kept = operators.forward_op(*arguments)
    arguments = (y, x, norm, norm, random(4, 32), weight, *kept, None, bias, 1e-5, ending, True)
    torch.library.opcheck(operators.backward_op, arguments)
