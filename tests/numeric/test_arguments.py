"""CONTRACT: any scale, masks of booleans and integers, a pair bias expanded over N, different float
dtypes; tensors of other layouts are refused.
"""

import math
from functools import partial

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DEVICES, DTYPES, Case
from tests.numeric.law import check, check_often

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.usefixtures("seed")]
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
CASE = Case("arguments", B=2, N=3, Lq=70, Lk=90, H=2)


@each_dtype
@pytest.mark.parametrize("scale", [0.0, 0.03, 1, 2.5, -0.5, -2])
def test_scales_keep_the_law(scale, dtype, device):
    def draw(case):
        inputs = case.inputs(dtype, device)
        inputs.bias1[..., 5:30] = -math.inf
        inputs.scale = scale
        return inputs

    for Lq in (9, CASE.Lq):
        case = Case("scale", B=2, N=3, Lq=Lq, Lk=90, H=2)
        check_often(partial(draw, case), dtype)


@pytest.mark.parametrize("wrong", [0.5, -0.1768, None])
def test_another_scale_is_noticed(wrong, device):
    inputs = CASE.inputs(torch.float32, device)
    inputs.scale = -0.5

    def of_another(q, k, v, bias1, bias2, scale):
        return DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], scale=wrong)

    with pytest.raises(AssertionError):
        check(inputs, of_another)


@pytest.mark.parametrize("scale", [1e-300, -1e-39])
def test_scales_below_float32_are_zero(scale, device):
    q, k, v, bias1, bias2 = CASE.inputs(torch.float32, device).tensors()
    q.requires_grad_()
    o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], scale=scale)
    assert torch.equal(o, DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], scale=0.0))
    assert not torch.autograd.grad(o.sum(), q)[0].any()


def test_scales_of_numpy(device):
    numpy = pytest.importorskip("numpy")
    q, k, v, *_ = CASE.inputs(torch.float32, device).tensors()
    expected = DS4Sci_EvoformerAttention(q, k, v, scale=0.5)
    assert torch.equal(DS4Sci_EvoformerAttention(q, k, v, scale=numpy.float32(0.5)), expected)

    def attention(q, k, v):
        return DS4Sci_EvoformerAttention(q, k, v, scale=1 / numpy.sqrt(4))

    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), expected)


def test_scales_of_sizes_in_an_exported_program(device):
    """They become constants, and so do the sizes, as in PyTorch's own attention."""

    class Module(torch.nn.Module):
        def forward(self, q):
            return DS4Sci_EvoformerAttention(q, q, q, scale=q.shape[-3] ** -0.5)

    q = torch.randn(2, 9, 2, 8, device=device)
    program = torch.export.export(Module(), (q,), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    assert torch.equal(program.module()(q), Module()(q))


def test_default_scale(device):
    q, k, v, *_ = CASE.inputs(torch.float32, device).tensors()
    given = DS4Sci_EvoformerAttention(q, k, v, scale=CASE.D**-0.5)
    assert torch.equal(DS4Sci_EvoformerAttention(q, k, v), given)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (math.inf, "finite number of float32; got inf"),
        (math.nan, "finite number of float32; got nan"),
        (-1e39, r"finite number of float32; got -1e\+39"),
        (10**400, "finite number of float32; got 10000"),
        (torch.tensor(0.5), "expected a number or None; got Tensor.*multiplies Q"),
        ("1", "got str"),
        (True, "got bool"),
    ],
    ids=["inf", "nan", "float64", "int", "tensor", "str", "bool"],
)
def test_what_is_no_scale(scale, message, device):
    q = torch.randn(2, 9, 2, 8, device=device)
    with pytest.raises(InvalidInputError, match=message):
        DS4Sci_EvoformerAttention(q, q, q, scale=scale)


def test_operators_take_positive_scales(device):
    q = torch.randn(1, 2, 9, 2, 8, device=device)
    for scale in (-1.0, 0.0, 1e-39, 1e39, math.inf, math.nan):
        with pytest.raises(InvalidInputError, match=r"positive normal number.*; got"):
            torch.ops.deepspeed4science.evoformer_attn(q, q, q, None, None, True, None, scale)


@each_dtype
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_masks_of_booleans_and_integers(kind, dtype, device):
    """True and 1 are keys that are seen, in every rank that a bias may have."""
    inputs = CASE.inputs(dtype, device)
    seen = torch.rand(inputs.bias1.shape, device=device) < 0.7
    seen[:, 1] = False
    q, k, v, _, bias2 = inputs.tensors()
    expected = DS4Sci_EvoformerAttention(
        q, k, v, [torch.where(seen, 0.0, -math.inf).to(dtype), bias2]
    )
    assert torch.equal(DS4Sci_EvoformerAttention(q, k, v, [seen.to(kind), bias2]), expected)
    assert not expected[:, 1].any()
    one = seen[0, 0].flatten().to(kind)
    torch.testing.assert_close(
        DS4Sci_EvoformerAttention(q, k, v, [one]).float(),
        evoformer_attention(q.double(), k.double(), v.double(), one).float(),
        rtol=0.02,
        atol=0.02,
    )


@each_dtype
def test_pair_bias_expanded_over_rows(dtype, device):
    """What chunking models make; its gradient is that of the bias before it was expanded."""
    inputs = CASE.inputs(dtype, device)

    def ours(q, k, v, bias1, bias2):
        expanded = bias2.expand(-1, q.shape[1], -1, -1, -1)
        return DS4Sci_EvoformerAttention(q, k, v, [bias1, expanded])

    check(inputs, ours)


@pytest.mark.parametrize("lead", [(4,), (2, 4), (2, 3, 4)], ids=str)
def test_pair_bias_expanded_in_any_rank(lead, device):
    q, k, v = (torch.randn(*lead, 9, 2, 8, device=device) for _ in range(3))
    shared = torch.randn(*lead[:-1], 1, 2, 9, 9, device=device)
    expanded = shared.expand(*lead, 2, 9, 9)
    torch.testing.assert_close(
        DS4Sci_EvoformerAttention(q, k, v, (None, expanded)),
        evoformer_attention(q, k, v, None, shared),
    )
    with pytest.raises(InvalidInputError, match="make each n a batch"):
        DS4Sci_EvoformerAttention(q, k, v, (None, expanded.contiguous()))


def test_pair_bias_expanded_over_part_of_the_batch_and_rows(device):
    """[2, 1, 1, ...] as [2, 3, 4, ...]: a batch of 2 * 3 is no view of it."""
    q, k, v = (torch.randn(2, 3, 4, 9, 2, 8, device=device) for _ in range(3))
    shared = torch.randn(2, 1, 1, 2, 9, 9, device=device, requires_grad=True)
    gradients = []
    for attention, bias in (
        (DS4Sci_EvoformerAttention, shared.expand(2, 3, 4, 2, 9, 9)),
        (lambda q, k, v, biases: evoformer_attention(q, k, v, *biases), shared),
    ):
        attention(q, k, v, (None, bias)).square().sum().backward()
        gradients.append(shared.grad)
        shared.grad = None
    torch.testing.assert_close(*gradients)


PROMOTED = [
    (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
    (torch.float16, torch.float16, torch.bfloat16, torch.float32),
    (torch.float16, torch.float16, torch.float32, torch.float32),
]


@pytest.mark.parametrize(("of_q", "of_k", "of_v", "expected"), PROMOTED)
def test_dtypes_are_promoted(of_q, of_k, of_v, expected, device):
    q, k, v = (
        torch.randn(2, 3, 9, 2, 8, device=device).to(dtype).requires_grad_()
        for dtype in (of_q, of_k, of_v)
    )
    o = DS4Sci_EvoformerAttention(q, k, v)
    assert o.dtype == expected
    assert torch.equal(o, DS4Sci_EvoformerAttention(*(t.to(expected) for t in (q, k, v))))
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert [g.dtype for g in gradients] == [of_q, of_k, of_v]


def test_eight_bits_are_refused(device):
    q = torch.randn(2, 3, 9, 2, 8, device=device)
    eight = q.to(torch.float8_e4m3fn)
    for tensors in ((eight, eight, eight), (eight, q, q), (q, eight, q)):
        with pytest.raises(InvalidInputError, match="float8_e4m3fn"):
            DS4Sci_EvoformerAttention(*tensors)


def test_float64_under_autocast_is_refused(device):
    q = torch.randn(2, 9, 2, 8, device=device, dtype=torch.float64)
    for tensors in ((q, q, q), (q.float(), q, q), (q.float(), q.float(), q)):
        for grad in (False, True):
            with torch.autocast(device, torch.bfloat16), torch.set_grad_enabled(grad):
                tensors = tuple(t.detach().requires_grad_(grad) for t in tensors)
                with pytest.raises(InvalidInputError, match=r"float64\. Cast it"):
                    DS4Sci_EvoformerAttention(*tensors)


def of_other_layout(kind, x):
    if kind == "sparse":
        return x.to_sparse()
    if kind == "mkldnn":
        return x.to_mkldnn()
    layout = torch.strided if kind == "nested" else torch.jagged
    return torch.nested.nested_tensor([x[0], x[0]], layout=layout)


@pytest.mark.parametrize("place", ["Q", "K", "V", "bias1", "bias2", "row_mask"])
@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "nested", "jagged"])
def test_layouts_without_strides_are_refused(kind, place, device):
    if kind == "mkldnn" and (place == "row_mask" or device != "cpu"):
        pytest.skip("there are no such tensors")
    x = torch.randn(2, 3, 9, 2, 8, device=device)
    arguments = {
        **{"Q": x, "K": x, "V": x, "bias1": torch.zeros(2, 3, 1, 1, 9, device=device)},
        **{"bias2": torch.zeros(2, 1, 2, 9, 9, device=device)},
        "row_mask": torch.ones(2, 3, dtype=torch.bool, device=device),
    }
    arguments[place] = of_other_layout(kind, arguments[place])
    biases = [arguments.pop("bias1"), arguments.pop("bias2")]
    word = {"jagged": "nested"}.get(kind, kind)
    with pytest.raises(InvalidInputError, match=rf"{place}: expected a dense .* {word}"):
        DS4Sci_EvoformerAttention(**arguments, biases=biases)


def test_scales_and_masks_in_a_compiled_function(device):
    """Another scale or mask is right, whatever was compiled for the first ones."""

    def step(q, k, v, seen, bias2, scale):
        expanded = bias2.expand(-1, q.shape[1], -1, -1, -1)
        return DS4Sci_EvoformerAttention(q, k.double().float(), v, [seen, expanded], scale=scale)

    tensors = CASE.inputs(torch.float32, device).tensors()
    leaves = [tensors[0].requires_grad_(), tensors[4].requires_grad_()]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.25, -1.0, 0.0, 2):
        seen = torch.rand(tensors[3].shape, device=device) < 0.7
        results = []
        for function in (compiled, step):
            o = function(*tensors[:3], seen, tensors[4], scale)
            results.append((o, *torch.autograd.grad(o.sin().sum(), leaves)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_opcheck_with_a_scale(direction, device):
    q, k, v, bias1, bias2 = Case("opcheck", Lq=9, D=8).inputs(torch.float32, device).tensors()
    mask = torch.tensor([[True, False, True]], device=device)
    ops = torch.ops.deepspeed4science
    forward = (q.requires_grad_(), k, v, bias1, bias2, True, mask, 0.3)
    if direction == "forward":
        torch.library.opcheck(ops.evoformer_attn.default, forward)
        return
    o, lse = (x.detach() for x in ops.evoformer_attn(*forward))
    q = q.detach()
    backward = (torch.randn_like(o), q, k, v, o, lse, bias1, bias2, [True] * 5, mask, 0.3)
    torch.library.opcheck(ops.evoformer_attn_backward.default, backward)
