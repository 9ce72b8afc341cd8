"""CONTRACT: any rank, any bias sequence, and typed errors that say expected, got and what to do."""

import copy

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.call import ForwardCall
from deepspeed4science.dispatch import choose
from deepspeed4science.errors import EvoformerError, InvalidInputError, NoBackendError
from deepspeed4science.problem import describe
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import Case

pytestmark = pytest.mark.usefixtures("seed")
CASE = Case("contract", B=2, N=3, Lq=9, H=2, D=8)


@pytest.mark.parametrize(
    "lead", [(), (4,), (2, 4), (2, 3, 4), (2, 1, 3, 4)], ids=lambda lead: f"rank{len(lead) + 3}"
)
@pytest.mark.parametrize("transposed", [False, True])
def test_any_rank(lead, transposed):
    q, k, v = (
        torch.randn(*lead, 2, 9, 8) if transposed else torch.randn(*lead, 9, 2, 8) for _ in range(3)
    )
    if transposed:
        q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
    bias1 = torch.randn(*lead, 1, 1, 9)
    bias2 = torch.randn(*(*lead[:-1], 1)[: len(lead)], 2, 9, 9)
    o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
    assert o.shape == q.shape
    torch.testing.assert_close(o, evoformer_attention(q, k, v, bias1, bias2))


def test_biases_of_lower_rank_broadcast():
    q = torch.randn(2, 3, 9, 2, 8)
    bias1, bias2 = torch.randn(9), torch.randn(2, 9, 9)
    o = DS4Sci_EvoformerAttention(q, q, q, [bias1, bias2])
    torch.testing.assert_close(o, evoformer_attention(q, q, q, bias1, bias2))


def test_rank6_bias_shared_by_part_of_the_batch():
    q = torch.randn(2, 3, 4, 9, 2, 8)
    bias2 = torch.randn(2, 1, 1, 2, 9, 9, requires_grad=True)
    o = DS4Sci_EvoformerAttention(q, q, q, [None, bias2])
    torch.testing.assert_close(o, evoformer_attention(q, q, q, None, bias2))
    (ours,) = torch.autograd.grad(o.sin().sum(), bias2)
    (reference,) = torch.autograd.grad(evoformer_attention(q, q, q, None, bias2).sin().sum(), bias2)
    torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("kind", [list, tuple])
def test_bias_sequences(count, kind):
    inputs = CASE.inputs(torch.float32, "cpu")
    biases = kind([inputs.bias1, inputs.bias2][:count])
    before = copy.copy(biases)
    o = DS4Sci_EvoformerAttention(inputs.q, inputs.k, inputs.v, biases)
    padded = (*before, None, None)[:2]
    torch.testing.assert_close(o, evoformer_attention(inputs.q, inputs.k, inputs.v, *padded))
    assert len(biases) == count and all(a is b for a, b in zip(biases, before, strict=True))


@pytest.mark.parametrize("dim", [0, 1, 3], ids=["B", "N", "H"])
def test_empty_dimensions_give_empty_results_and_zero_bias_gradients(dim):
    inputs = CASE.inputs(torch.float32, "cpu")
    q, k, v = (
        t.narrow(dim, 0, 0).detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)
    )
    bias1 = torch.zeros(1, 1, 1, 1, 9, requires_grad=True)
    bias2 = torch.zeros(1, 1, 1, 9, 9, requires_grad=True)
    expanded = bias2.expand(-1, q.shape[1], -1, -1, -1)
    for biases in ([bias1, bias2], [bias1, expanded]):
        o = DS4Sci_EvoformerAttention(q, k, v, biases)
        assert o.shape == q.shape and o.numel() == 0
        dq, dbias1, dbias2 = torch.autograd.grad(o.sum(), (q, bias1, bias2))
        assert dq.shape == q.shape and dbias2.shape == bias2.shape
        assert (dbias1 == 0).all() and (dbias2 == 0).all()


def make(**changes):
    """The arguments of a good call with some of them replaced by functions of the good ones."""
    inputs = CASE.inputs(torch.float32, "cpu")
    arguments = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "biases": [inputs.bias1, inputs.bias2],
        "row_mask": None,
    }
    return {
        name: changes[name](value) if name in changes else value
        for name, value in arguments.items()
    }


BAD = {
    "k-wrong-heads": ({"k": lambda k: k[:, :, :, :1]}, "K: expected"),
    "k-wrong-channels": ({"k": lambda k: k[..., :4]}, "K: expected"),
    "k-wrong-batch": ({"k": lambda k: k[:1]}, "K: expected"),
    "v-wrong-length": ({"v": lambda v: v[:, :, :5]}, "V: expected"),
    "rank-2": ({"q": lambda q: q[0, 0, 0]}, "rank >= 3"),
    "ranks-differ": ({"k": lambda k: k[0]}, "one rank"),
    "rank-4-leads-differ": (
        {"q": lambda q: q[0], "k": lambda k: k[0, :1], "v": lambda v: v[0], "biases": lambda b: []},
        "leading dimensions",
    ),
    "float64": ({name: lambda t: t.double() for name in "qkv"}, "or float16; .* takes float64"),
    # The reference does not take integers either.
    "int": (
        {name: lambda t: t.int() for name in "qkv"},
        r"or float16; got torch.int32. Cast it\.$",
    ),
    "dtypes-differ-by-float64": ({"k": lambda k: k.double()}, "got torch.float64"),
    "dtypes-differ-by-integers": ({"k": lambda k: k.long()}, "dtype of Q"),
    "devices-differ": ({"k": lambda k: k.to("meta")}, "device of Q"),
    "not-a-tensor": ({"q": lambda q: q.tolist()}, "expected a tensor"),
    "three-biases": ({"biases": lambda b: [*b, b[0]]}, "at most 2"),
    "bias-not-a-list": ({"biases": lambda b: b[0]}, "list or tuple"),
    "bias-not-a-tensor": ({"biases": lambda b: [1.0]}, "tensor or None"),
    "bias1-wrong-length": ({"biases": lambda b: [b[0][..., :5]]}, "bias1: expected"),
    "pair-bias-first": ({"biases": lambda b: [b[1]]}, r"\[None, bias2\]"),
    "biases-swapped": ({"biases": lambda b: [b[1], b[0]]}, "bias1: expected"),
    "bias2-with-rows": (
        {"biases": lambda b: [None, b[1].repeat(1, 3, 1, 1, 1)]},
        r"bias2: expected .* make each n a batch",
    ),
    "bias2-expanded-over-other-rows": (
        {"biases": lambda b: [None, b[1].expand(2, 4, 2, 9, 9)]},
        "bias2: expected",
    ),
    "bias2-of-no-rows": (
        {"biases": lambda b: [None, b[1].expand(2, 1, 2, 9, 9)[:, :0]]},
        "bias2: expected",
    ),
    "bias2-wrong-heads": (
        {"biases": lambda b: [None, b[1].repeat(1, 1, 2, 1, 1)]},
        "bias2: expected",
    ),
    "bias-rank-6": ({"biases": lambda b: [b[0][None]]}, "at most the 5 dimensions"),
    "bias2-bool": ({"biases": lambda b: [None, b[1] > 0]}, "torch.where"),
    "bias1-complex": ({"biases": lambda b: [b[0] * 1j]}, "bias1: expected"),
    "bias-float64": ({"biases": lambda b: [b[0].double()]}, "bias1: expected"),
    "bias-device": ({"biases": lambda b: [b[0].to("meta")]}, "device of Q"),
    "row-mask-float": ({"row_mask": lambda m: torch.ones(2, 3)}, "torch.bool.*row_mask != 0"),
    "row-mask-of-keys": (
        {"row_mask": lambda m: torch.ones(2, 9, dtype=torch.bool)},
        r"row_mask: expected .* \[2, 3\]; got \[2, 9\]",
    ),
    "row-mask-rank-3": (
        {"row_mask": lambda m: torch.ones(2, 3, 1, dtype=torch.bool)},
        "row_mask: expected at most the 2 leading dimensions",
    ),
    "row-mask-device": (
        {"row_mask": lambda m: torch.ones(2, 3, dtype=torch.bool, device="meta")},
        "device of Q",
    ),
    "row-mask-not-a-tensor": ({"row_mask": lambda m: [True]}, "row_mask: expected a tensor"),
    "row-mask-rank-6-lead": (
        {
            **{name: lambda t: t[None].expand(4, *t.shape) for name in "qkv"},
            "biases": lambda b: [],
            "row_mask": lambda m: torch.ones(5, 2, 3, dtype=torch.bool),
        },
        "row_mask: expected leading dimensions",
    ),
    "no-queries": ({"q": lambda q: q[:, :, :0], "biases": lambda b: []}, "at least 1"),
    "no-keys": (
        {"k": lambda k: k[:, :, :0], "v": lambda v: v[:, :, :0], "biases": lambda b: []},
        "at least 1",
    ),
    "no-channels": ({"q": lambda q: q[..., :0], "k": lambda k: k[..., :0]}, "at least 1"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(changes, message):
    """A clear error of our own, and everything the caller passed is as it was."""
    arguments = make(**changes)
    biases = arguments["biases"]
    tensors = [
        t for t in (arguments["q"], arguments["k"], arguments["v"]) if isinstance(t, torch.Tensor)
    ]
    copies = [t.clone() for t in tensors if t.device.type == "cpu"]
    before = copy.copy(biases)
    with pytest.raises(InvalidInputError, match=message) as caught:
        DS4Sci_EvoformerAttention(
            arguments["q"],
            arguments["k"],
            arguments["v"],
            biases,
            row_mask=arguments["row_mask"],
        )
    assert isinstance(caught.value, (EvoformerError, ValueError))
    if isinstance(biases, list):
        assert len(biases) == len(before) and all(
            a is b for a, b in zip(biases, before, strict=True)
        )
    for tensor, saved in zip((t for t in tensors if t.device.type == "cpu"), copies, strict=True):
        assert torch.equal(tensor, saved)


NOT_OF_THE_FORWARD = {
    "no-lse": ("lse", lambda lse: lse.new_empty(0)),
    "lse-of-half": ("lse", lambda lse: lse.half()),
    "lse-transposed": ("lse", lambda lse: lse.mT),
    "o-of-half": ("o", lambda o: o.half()),
    "o-of-other-rows": ("o", lambda o: o[:, :1]),
    "do-of-bfloat16": ("do_", lambda do_: do_.bfloat16()),
    "do-of-one-query": ("do_", lambda do_: do_[:, :, :1]),
    "do-elsewhere": ("do_", lambda do_: do_.to("meta")),
}


@pytest.mark.parametrize(
    ("name", "change"), NOT_OF_THE_FORWARD.values(), ids=NOT_OF_THE_FORWARD.keys()
)
def test_the_backward_operator_takes_results_of_the_forward(name, change):
    inputs = Case("backward", N=2, Lq=70, Lk=40, H=3, D=8).inputs(torch.float32, "cpu")
    operators = torch.ops.deepspeed4science
    o, lse = operators.evoformer_attn(*inputs.tensors(), True)
    results = {"do_": torch.randn_like(o), "o": o, "lse": lse}
    results[name] = change(results[name])
    with pytest.raises(
        InvalidInputError, match=r"^(dO|O|lse): expected .* as the forward returns it.*; got"
    ):
        operators.evoformer_attn_backward(
            *(results["do_"], *inputs.tensors()[:3], results["o"], results["lse"]),
            *(inputs.bias1, inputs.bias2, [True] * 5),
        )


def test_the_backward_operator_takes_lse_of_any_strides():
    """Kernels have no strides of it. With partial_keys, P follows from it alone."""
    inputs = Case("backward", N=2, Lq=70, Lk=40, H=3, D=8).inputs(torch.float32, "cpu")
    operators = torch.ops.deepspeed4science
    o, lse = operators.evoformer_attn(*inputs.tensors(), True)
    found = [
        operators.evoformer_attn_backward(
            *(torch.ones_like(o), *inputs.tensors()[:3], o, one),
            *(inputs.bias1, inputs.bias2, [True] * 5),
            partial_keys=True,
        )
        for one in (lse, lse.mT.contiguous().mT)
    ]
    assert all(map(torch.equal, *found))


def test_inputs_are_not_written():
    inputs = CASE.inputs(torch.float32, "cpu")
    saved = [t.clone() for t in inputs.tensors()]
    versions = [t._version for t in inputs.tensors()]
    leaves = [t.requires_grad_() for t in inputs.tensors()]
    DS4Sci_EvoformerAttention(*leaves[:3], leaves[3:]).sum().backward()
    for leaf, copy_, version in zip(leaves, saved, versions, strict=True):
        assert torch.equal(leaf, copy_) and leaf._version == version


def test_a_row_mask_does_not_choose_the_kernel():
    inputs = CASE.inputs(torch.float32, "cpu")
    call = ForwardCall(*inputs.tensors(), with_lse=False)
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert describe(call._replace(row_mask=mask)) == describe(call)


def test_a_device_without_backend_is_refused_with_reasons():
    call = ForwardCall(*CASE.inputs(torch.float32, "cpu").tensors(), with_lse=False)
    problem = describe(call)
    assert choose(problem, "fwd", call[:3]).backend.name == "Cpu"
    with pytest.raises(NoBackendError, match="Cpu: tensors are on xpu:0"):
        choose(problem._replace(device=torch.device("xpu:0")), "fwd", call[:3])
