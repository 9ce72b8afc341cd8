"""CONTRACT: every output and gradient keeps the error law, for every shape, dtype, layout and
mask.
"""

import math

import pytest
import torch

from tests.numeric.cases import DEVICES, DTYPES, SHAPES, Case
from tests.numeric.law import Inputs, check, check_often, ours, run

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.usefixtures("seed"),
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
BASE = Case("base", B=2, N=3, Lq=70, H=2)


@each_dtype
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.id)
def test_shapes(case, dtype, device):
    if case.by_chance:
        check_often(lambda: case.inputs(dtype, device), dtype)
    else:
        check(case.inputs(dtype, device))


@each_dtype
@pytest.mark.parametrize(
    "needs",
    [tuple(i == j for i in range(5)) for j in range(5)]
    + [(False,) * 5, (True, True, True, False, False)],
    ids=["dq", "dk", "dv", "dbias1", "dbias2", "none", "dq-dk-dv"],
)
def test_each_gradient_alone(needs, dtype, device):
    """A gradient is right without the others, and nobody gets one that did not ask."""
    inputs = BASE.inputs(dtype, device)
    inputs.needs = needs
    check(inputs)


def transposed(inputs):
    """[B, N, H, L, D] storage, as models keep it."""
    for name in ("q", "k", "v"):
        setattr(inputs, name, getattr(inputs, name).transpose(2, 3).contiguous().transpose(2, 3))


def packed_qkv(inputs):
    """Q, K and V as slices of one projection's output."""
    inputs.q, inputs.k, inputs.v = torch.stack((inputs.q, inputs.k, inputs.v), dim=4).unbind(4)


def channels_strided(inputs):
    """A last dimension of stride 2."""
    for name in ("q", "k", "v"):
        setattr(inputs, name, getattr(inputs, name).repeat_interleave(2, dim=-1)[..., ::2])


def unaligned(inputs):
    """Data that starts one element after an aligned address, rows included."""
    for name in ("q", "k", "v"):
        t = getattr(inputs, name)
        shifted = torch.empty(*t.shape[:-1], t.shape[-1] + 1, dtype=t.dtype, device=t.device)[
            ..., 1:
        ]
        setattr(inputs, name, shifted.copy_(t))


def bias_transposed(inputs):
    """A pair bias in [H, Lk, Lq] storage and a mask with a stride."""
    inputs.bias2 = inputs.bias2.transpose(3, 4).contiguous().transpose(3, 4)
    inputs.bias1 = inputs.bias1.repeat_interleave(2, dim=-1)[..., ::2]


def biases_expanded(inputs):
    """Stride-0 biases, as models pass them when they work in chunks."""
    inputs.bias1 = inputs.bias1[:, :1].expand_as(inputs.bias1)
    inputs.bias2 = inputs.bias2[:1].expand_as(inputs.bias2)


def biases_broadcast(inputs):
    """Size-1 dimensions: the gradient is summed over what was broadcast."""
    inputs.bias1 = inputs.bias1[:1, :1]
    inputs.bias2 = inputs.bias2[:1, :, :, :1]


def biases_of_one_key(inputs):
    """The same for all keys: their gradients are zero."""
    inputs.bias1 = inputs.bias1[..., :1]
    inputs.bias2 = inputs.bias2[..., :1]


LAYOUTS = (
    transposed,
    packed_qkv,
    channels_strided,
    unaligned,
    bias_transposed,
    biases_expanded,
    biases_broadcast,
    biases_of_one_key,
)


@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_input_layouts(layout, dtype, device):
    def draw():
        inputs = BASE.inputs(dtype, device)
        layout(inputs)
        return inputs

    if layout is biases_broadcast:
        check_often(draw, dtype)
        return
    result = check(draw())
    if layout is biases_of_one_key:
        assert not result[4].any() and not result[5].any()


GRADIENT_LAYOUTS = {
    "sum": lambda do: torch.ones((), device=do.device, dtype=do.dtype).expand_as(do),
    "transposed": lambda do: do.transpose(2, 4).contiguous().transpose(2, 4),
    "expanded-row": lambda do: do[:, :, :1].expand_as(do),
    "strided": lambda do: do.repeat_interleave(2, dim=-1)[..., ::2],
}


@each_dtype
@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS.values(), ids=GRADIENT_LAYOUTS.keys())
def test_gradient_layouts(layout, dtype, device):
    """`.sum().backward()` hands over stride-0 gradients, transposed consumers other strides."""
    inputs = BASE.inputs(dtype, device)
    inputs.do = layout(torch.randn_like(inputs.q))
    check(inputs)


MASKS = {
    "last-keys": lambda b: b[..., 40:].fill_(-math.inf),
    "first-tile": lambda b: b[..., :64].fill_(-math.inf),
    "every-other-key": lambda b: b[..., ::2].fill_(-math.inf),
    "whole-rows": lambda b: b[:, 1].fill_(-math.inf),
    "everything": lambda b: b.fill_(-math.inf),
    "all-but-one-key": lambda b: b[..., 1:].fill_(-math.inf),
    "finite-1e4": lambda b: b[..., 40:].fill_(-1e4),
    "finite-whole-rows": lambda b: b[:, 1].sub_(1e4),
    "finite-everything": lambda b: b.fill_(-3e4),
    "finite-largest": lambda b: b[..., :64].fill_(torch.finfo(b.dtype).min / 2),
}


@each_dtype
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks(mask, dtype, device):
    """Fully masked rows give 0 and zero gradients, never NaN; finite masks behave as the formula
    says.
    """
    inputs = BASE.inputs(dtype, device)
    mask(inputs.bias1)
    check(inputs)


@each_dtype
def test_pair_bias_masks_single_rows(dtype, device):
    inputs = BASE.inputs(dtype, device)
    inputs.bias2[:, :, 0, 5] = -math.inf
    inputs.bias2[:, :, 1, :, :66] = -math.inf
    o = check(inputs)[0]
    assert (o[:, :, 5, 0] == 0).all()


@each_dtype
@pytest.mark.parametrize("place", ["q", "k", "v", "bias1", "bias2"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
def test_non_finite_inputs_reach_the_same_places(place, value, dtype, device):
    inputs = BASE.inputs(dtype, device)
    tensor = getattr(inputs, place)
    index = (0,) * tensor.dim() if place != "v" else (0, 0, 3, 0, 5)
    if place in ("q", "k") and value == math.inf:
        pytest.skip(
            "inf in q or k gives +inf or -inf scores by the sign of the other factor's rounding"
        )
    tensor[index] = value
    inputs.needs = (False,) * 5
    result = run(ours, inputs)[0]
    from deepspeed4science.reference import evoformer_attention

    reference = run(evoformer_attention, inputs, torch.float64)[0]
    assert (result.isfinite() == reference.isfinite()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_float32_biases_with_16_bit_inputs(dtype, device):
    """A mask of -1e9 in float32 stays finite whatever the dtype of Q."""
    inputs = BASE.inputs(torch.float32, device)
    inputs.bias1[..., 40:] = -1e9
    inputs.q, inputs.k, inputs.v = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v))
    check(inputs)


@each_dtype
def test_gradients_of_large_spread(dtype, device):
    def draw():
        inputs = BASE.inputs(dtype, device)
        spread = torch.exp(3 * torch.randn(*inputs.q.shape[:-1], 1, device=device))
        spread = spread.clamp(max=2e3)  # float16 ends at 65,504
        inputs.do = (torch.randn(inputs.q.shape, device=device) * spread).to(dtype)
        return inputs

    check_often(draw, dtype)


@each_dtype
def test_large_scores(dtype, device):
    """Scores of several hundred: the maximum has to be subtracted before the exponential."""
    inputs = BASE.inputs(dtype, device)
    inputs.q = inputs.q * 16
    check(inputs)


@each_dtype
def test_many_rows(dtype, device):
    """B * N past 65,535, the limit of a CUDA grid's y and z."""
    generator = torch.randn(1, 65_600, 3, 1, 8, device=device).to(dtype)
    inputs = Inputs(
        generator,
        generator.roll(1, 1),
        generator.roll(2, 1),
        torch.randn(1, 65_600, 1, 1, 3, device=device).to(dtype),
        torch.randn(1, 1, 1, 3, 3, device=device).to(dtype),
        # dbias2 sums over N; eager's own sum in 16 bits has no digits left there, so it is left
        # out.
        needs=(True, True, True, True, False),
    )
    check(inputs)


@each_dtype
def test_repeats_are_identical(dtype, device):
    """torch.use_deterministic_algorithms(True): the same bits again."""
    inputs = Case("repeat", B=2, N=9, Lq=131, H=3).inputs(dtype, device)
    inputs.do = torch.randn_like(inputs.q)
    torch.use_deterministic_algorithms(True)
    try:
        first = run(ours, inputs)
        for _ in range(3):
            for a, b in zip(first, run(ours, inputs), strict=True):
                assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
