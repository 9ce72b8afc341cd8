"""CONTRACT: the op behaves like one of PyTorch's own under compile, export, opcheck, autocast and
higher derivatives.
"""

import io

import pytest
import torch
import torch.utils.checkpoint

from deepspeed4science import DS4Sci_EvoformerAttention, EvoformerFusedAttention
from deepspeed4science.errors import DoubleBackwardError
from deepspeed4science.nn import TriangleAttentionStartingNode
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DEVICES, Case
from tests.numeric.law import relative_error

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.usefixtures("seed")]
CASE = Case("native", B=1, N=2, Lq=24, H=2, D=16)
ALL = [True] * 5


def leaves(device, dtype=torch.float32):
    return [t.requires_grad_() for t in CASE.inputs(dtype, device).tensors()]


def row_mask(device):
    return torch.tensor([[True, False]], device=device)


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize("biases", ["both", "none"])
@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "row-mask"])
def test_opcheck_forward(masked, biases, with_lse, device):
    q, k, v, bias1, bias2 = leaves(device)
    if biases == "none":
        bias1 = bias2 = None
    op = torch.ops.deepspeed4science.evoformer_attn.default
    mask = row_mask(device) if masked else None
    torch.library.opcheck(op, (q, k, v, bias1, bias2, with_lse, mask))


@pytest.mark.parametrize("wanted", [ALL, [True, False, False, False, True]], ids=["all", "some"])
@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "row-mask"])
def test_opcheck_backward(masked, wanted, device):
    tensors = [t.detach() for t in leaves(device)]
    ops = torch.ops.deepspeed4science
    mask = row_mask(device) if masked else None
    o, lse = ops.evoformer_attn(*tensors, True, mask)
    q, k, v, bias1, bias2 = tensors
    arguments = (torch.randn_like(o), q, k, v, o, lse, bias1, bias2, wanted, mask)
    torch.library.opcheck(ops.evoformer_attn_backward.default, arguments)


def test_compile_fullgraph(device):
    """No graph break; values and gradients are those of the eager op."""

    def step(q, k, v, bias1, bias2):
        return DS4Sci_EvoformerAttention(q * 2, k, v, [bias1, bias2]).sin()

    tensors = leaves(device)
    compiled = torch.compile(step, fullgraph=True)
    expected, got = step(*tensors), compiled(*tensors)
    torch.testing.assert_close(got, expected)
    do = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, tensors, do), torch.autograd.grad(expected, tensors, do)
    )


def test_compile_fullgraph_with_a_row_mask(device):
    """Another mask is no new graph, and dynamic sizes are as well."""

    def step(q, k, v, bias1, bias2, mask):
        return DS4Sci_EvoformerAttention(q * 2, k, v, [bias1, bias2], row_mask=mask).sin()

    tensors = leaves(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for mask in (row_mask(device), ~row_mask(device), row_mask(device)[0]):
        expected, got = step(*tensors, mask), compiled(*tensors, mask)
        torch.testing.assert_close(got, expected)
        do = torch.randn_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad(got, tensors, do), torch.autograd.grad(expected, tensors, do)
        )


def test_compile_of_other_ranks_and_dynamic_lengths(device):
    compiled = torch.compile(
        lambda q, bias2: DS4Sci_EvoformerAttention(q, q, q, (None, bias2)),
        fullgraph=True,
        dynamic=True,
    )
    for length in (5, 9, 31):
        q = torch.randn(3, length, 2, 8, device=device)
        bias2 = torch.randn(2, length, length, device=device)
        torch.testing.assert_close(
            compiled(q, bias2), DS4Sci_EvoformerAttention(q, q, q, (None, bias2))
        )


def test_compile_says_what_is_wrong_with_dynamic_shapes(device):
    compiled = torch.compile(
        lambda q, bias1: DS4Sci_EvoformerAttention(q, q, q, [bias1]),
        fullgraph=True,
        dynamic=True,
        backend="eager",
    )
    q, bias1 = torch.randn(2, 9, 2, 8, device=device), torch.zeros(2, 3, 1, 1, 9, device=device)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"at most the 4 dimensions .* got \[2, 3"
    ):
        compiled(q, bias1)


def test_compile_of_checkpointed_layers_with_a_scale(device):
    """Several checkpoints of one graph, with dynamic sizes."""

    def layer(q):
        return q + DS4Sci_EvoformerAttention(q, q, q, scale=0.3)

    def step(q):
        for _ in range(2):
            q = torch.utils.checkpoint.checkpoint(layer, q, use_reentrant=False)
        return q

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    q, *_ = leaves(device)
    torch.testing.assert_close(compiled(q), step(q))


@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "row-mask"])
def test_export(masked, device):
    class Module(torch.nn.Module):
        def forward(self, q, k, v, bias1, bias2, mask=None):
            return DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], row_mask=mask)

    tensors = tuple(t.detach() for t in leaves(device))
    if masked:
        tensors = (*tensors, row_mask(device))
    program = torch.export.export(Module(), tensors)
    assert any("evoformer_attn" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*tensors), Module()(*tensors))


def test_traced_programs(device):
    """torch.jit.trace of modules whose parameters need gradients, as it compares and saves them."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 3 * 32)

        def forward(self, x, mask):
            q, k, v = self.linear(x).unflatten(-1, (3, 2, 16)).unbind(-3)
            return DS4Sci_EvoformerAttention(q, k, v, [mask, None], scale=-0.5)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.triangle = TriangleAttentionStartingNode(16, 16, 2)

        def forward(self, x, mask):
            return self.triangle(x, mask[..., 0, 0, :])

    for module in (Module().to(device), Layer().to(device)):
        x, mask = torch.randn(1, 9, 9, 16, device=device), torch.ones(1, 9, 1, 1, 9, device=device)
        mask = mask.bool()
        module(x, mask)  # a known call is traced, too
        stream = io.BytesIO()
        torch.jit.save(torch.jit.trace(module, (x, mask)), stream)
        stream.seek(0)
        loaded = torch.jit.load(stream)
        x, mask = torch.randn(2, 7, 7, 16, device=device), torch.rand(2, 7, 1, 1, 7, device=device)
        mask = mask < 0.7
        results = []
        for one in (loaded, module):
            o = one(x, mask)
            results.append((o, *torch.autograd.grad(o.sin().sum(), list(one.parameters()))))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(dtype, device):
    """float32 tensors are computed in autocast's dtype; a float32 mask of -1e9 keeps its value."""
    q, k, v, bias1, bias2 = leaves(device)
    with torch.no_grad():
        bias1[..., 3:] = -1e9
    with torch.autocast(device, dtype=dtype):
        o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
    assert o.dtype == dtype
    gradients = torch.autograd.grad(o.float().sum(), (q, k, v, bias1, bias2))
    assert all(g.dtype == torch.float32 for g in gradients)
    reference = evoformer_attention(*(t.detach().double() for t in (q, k, v, bias1, bias2)))
    assert relative_error(o, reference) < 8 * torch.finfo(dtype).eps
    mixed = q.to(dtype)
    with torch.autocast(device, dtype=dtype):
        assert DS4Sci_EvoformerAttention(mixed, k, v).dtype == dtype
        masked = DS4Sci_EvoformerAttention(mixed, k, v, row_mask=row_mask(device))
        assert masked.dtype == dtype and masked[0, 0].any() and not masked[0, 1].any()


def test_double_backward_is_refused(device):
    q, k, v, bias1, bias2 = leaves(device)
    o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="reference"):
        dq.sum().backward()


@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "row-mask"])
def test_checkpoint_recomputes(masked, device):
    tensors = leaves(device)
    mask = row_mask(device) if masked else None

    def attention(q, k, v, bias1, bias2):
        return DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], row_mask=mask)

    plain = torch.autograd.grad(attention(*tensors).sum(), tensors)
    checkpointed = torch.utils.checkpoint.checkpoint(attention, *tensors, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(checkpointed.sum(), tensors), strict=True):
        assert torch.equal(a, b)


def test_graph_is_freed_or_retained_as_usual(device):
    """The backward gives saved tensors back itself, unless somebody wants them again."""
    tensors = leaves(device)
    o = DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:])
    first = torch.autograd.grad(o.sum(), tensors, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(o.sum(), tensors), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o.sum(), tensors)


def test_compiled_autograd(device):
    tensors = leaves(device)
    o = DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:])
    expected = torch.autograd.grad(o.sum(), tensors)

    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:]).sum().backward()
    for tensor, b in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.grad, b)


def test_called_without_lse_backward_recomputes_it(device):
    tensors = leaves(device)
    mask = row_mask(device)
    o, lse = torch.ops.deepspeed4science.evoformer_attn(*tensors, False, mask)
    assert lse.numel() == 0
    expected = DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:], row_mask=mask)
    do = torch.randn_like(o)
    for a, b in zip(
        torch.autograd.grad(o, tensors, do), torch.autograd.grad(expected, tensors, do), strict=True
    ):
        assert torch.equal(a, b)


def test_both_public_names_agree(device):
    tensors = [t.detach() for t in leaves(device)]
    assert torch.equal(
        EvoformerFusedAttention.apply(*tensors),
        DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:]),
    )


def test_tensors_without_data(device):
    """On the meta device and under a fake-tensor mode: shapes of O and all gradients."""
    tensors = leaves(device)

    def shapes(these):
        o = DS4Sci_EvoformerAttention(*these[:3], these[3:])
        return [t.shape for t in (o, *torch.autograd.grad(o.sum(), these))]

    expected = [tensors[0].shape, *(t.shape for t in tensors)]
    assert shapes([t.detach().to("meta").requires_grad_() for t in tensors]) == expected
    with torch._subclasses.FakeTensorMode() as mode:
        assert shapes([mode.from_tensor(t) for t in tensors]) == expected


def test_inference_mode(device):
    tensors = [t.detach() for t in leaves(device)]
    with torch.inference_mode():
        o = DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:])
    assert o.isfinite().all()


def test_number_of_threads_does_not_change_results(device):
    if device != "cpu":
        pytest.skip("threads are the CPU backend's")
    inputs = Case("threads", B=2, N=7, Lq=150, H=3).inputs(torch.float32, device)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            tensors = [t.detach().requires_grad_() for t in inputs.tensors()]
            o = DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:])
            results.append((o, *torch.autograd.grad(o.sum(), tensors)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
