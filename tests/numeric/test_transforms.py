"""CONTRACT: no derivative is wrong in silence. vmap, grad, vjp, jacrev and functionalize of
torch.func give what the definition gives, forward mode raises, FLOP are counted.
"""

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp
from torch.utils.flop_counter import FlopCounterMode

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.errors import DoubleBackwardError, ForwardModeError
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DEVICES, Case

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.usefixtures("seed")]
CASE = Case("transforms", B=2, N=3, Lq=9, Lk=11, H=2, D=8)
MAPPED = 3


def ours(q, k, v, bias1, bias2, row_mask=None):
    return DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], row_mask=row_mask)


def tensors(device):
    return CASE.inputs(torch.float32, device).tensors()


def agree(transformed, function=ours):
    """`transformed(f)` is the same of both."""
    expected = transformed(evoformer_attention)
    torch.testing.assert_close(transformed(function), expected, rtol=1e-4, atol=1e-5)
    flat = torch.utils._pytree.tree_leaves(expected)
    assert all(x.any() for x in flat), "nothing to compare"


# Which of q, k, v, bias1 and bias2 are mapped, and over which dimension.
MAPS = {
    "q": (0, None, None, None, None),
    "bias1": (None, None, None, 5, None),
    "bias2": (None, None, None, None, 1),
    "biases": (None, None, None, 0, -1),
    "qkv": (0, 2, -1, None, None),
    "all": (0, 1, 5, 0, 2),
}
each_map = pytest.mark.parametrize("dims", MAPS.values(), ids=MAPS.keys())


def mapped_tensors(dims, device, shared_bias2=False):
    plain = list(tensors(device))
    if shared_bias2:
        plain[4] = plain[4][:1]
    return [
        t if d is None else torch.stack([torch.randn_like(t) for _ in range(MAPPED)], d)
        for t, d in zip(plain, dims, strict=True)
    ]


@each_map
def test_vmap(dims, device):
    arguments = mapped_tensors(dims, device)
    agree(lambda f: torch.vmap(f, dims)(*arguments))


@each_map
@pytest.mark.parametrize("only_mapped", [False, True], ids=["all", "only-mapped"])
def test_autograd_of_vmap(only_mapped, dims, device):
    """Also where nothing but the mapped inputs requires a gradient."""
    arguments = mapped_tensors(dims, device, shared_bias2=True)

    def transformed(f):
        leaves = [
            t.detach().requires_grad_(d is not None or not only_mapped)
            for t, d in zip(arguments, dims, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return torch.autograd.grad(torch.vmap(f, dims)(*leaves).sin().sum(), wanted)

    agree(transformed)


@each_map
@pytest.mark.parametrize("shared", [False, True], ids=["each-B", "one-for-all-B"])
def test_vmap_of_grad(shared, dims, device):
    """Every mapped call has gradients of its own, of inputs that are not mapped, too."""
    arguments = mapped_tensors(dims, device, shared_bias2=shared)

    def transformed(f):
        return torch.vmap(grad(lambda *t: f(*t).sin().sum(), argnums=(0, 1, 2, 3, 4)), dims)(
            *arguments
        )

    agree(transformed)


@each_map
def test_grad_of_vmap(dims, device):
    arguments = mapped_tensors(dims, device)

    def transformed(f):
        return grad(lambda *t: torch.vmap(f, dims)(*t).sin().sum(), argnums=(0, 1, 2, 3, 4))(
            *arguments
        )

    agree(transformed)


def test_vmap_of_masks_and_other_ranks(device):
    q, k, v, bias1, bias2 = tensors(device)
    masks = torch.tensor([[[True, False, True]] * 2, [[False, True, True]] * 2], device=device)
    agree(lambda f: torch.vmap(lambda m: f(q, k, v, bias1, bias2, row_mask=m))(masks))
    agree(lambda f: torch.vmap(f, (0, 0, 0, None, None))(q, k, v, bias1[0], bias2[0]))
    agree(lambda f: torch.vmap(torch.vmap(f, (0, 0, 0, 0, None)))(q, k, v, bias1, bias2[:, 0]))
    agree(lambda f: torch.vmap(f, chunk_size=1)(q, k, v, bias1, bias2))


def test_vmap_over_nothing(device):
    """Empty results, as of PyTorch's own attention."""
    q, k, v, bias1, bias2 = tensors(device)
    none = torch.randn(0, *q.shape, device=device)
    assert torch.vmap(lambda x: ours(x, k, v, bias1, bias2))(none).shape == none.shape
    gradients = torch.vmap(grad(lambda x, b: ours(x, k, v, bias1, b).sum(), argnums=(0, 1)))
    dq, dbias2 = gradients(none, torch.randn(0, *bias2.shape, device=device))
    assert dq.shape == none.shape and dbias2.shape == (0, *bias2.shape)


def test_vmap_of_the_operators(device):
    """Called directly they map by the same rule, and not one by one."""
    q, k, v, bias1, bias2 = mapped_tensors(MAPS["all"], device)
    op = torch.ops.deepspeed4science.evoformer_attn
    expected = torch.vmap(evoformer_attention, MAPS["all"])(q, k, v, bias1, bias2)
    for call in (lambda *t: op(*t, True)[0], lambda *t: op(*t, False)[0]):
        o = torch.vmap(call, MAPS["all"])(q, k, v, bias1, bias2)
        torch.testing.assert_close(o, expected)


def test_reverse_mode_of_torch_func(device):
    q, k, v, bias1, bias2 = tensors(device)
    everything = (q, k, v, bias1, bias2)
    do = torch.randn(2, 3, 9, 2, 8, device=device)
    agree(lambda f: vjp(f, *everything)[1](do))
    agree(lambda f: grad(lambda *t: f(*t).sin().sum(), argnums=(0, 1, 2, 3, 4))(*everything))
    agree(lambda f: jacrev(lambda b: f(q, k, v, bias1, b).sum((0, 1, 3)))(bias2))
    mask = torch.tensor([[True, False, True]] * 2, device=device)
    agree(lambda f: grad(lambda x: f(x, k, v, None, bias2, row_mask=mask).sin().sum())(q))


def test_vmap_of_the_backward_with_one_batch(device):
    """The results of the one forward are expanded over all cotangents, without a copy."""
    q, k, v, bias1, bias2 = (
        Case("one", N=2, Lq=40, H=2, D=8).inputs(torch.float32, device).tensors()
    )
    agree(lambda f: jacrev(lambda x: f(x, k, v, bias1, bias2).sum((1, 3))[..., 0])(q))
    many = torch.randn(50, *q.shape, device=device)
    agree(lambda f: torch.vmap(vjp(f, q, k, v, bias1, bias2)[1])(many))


def test_reverse_mode_under_autocast(device):
    """What is saved is what was computed with."""
    q, k, v, bias1, bias2 = tensors(device)

    def gradients(f):
        with torch.autocast(device, torch.float16):
            return grad(lambda *t: f(*t).float().sin().sum(), argnums=(0, 4))(q, k, v, bias1, bias2)

    torch.testing.assert_close(
        gradients(ours), gradients(evoformer_attention), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("only", [None, 0, 3, 4], ids=["all", "q", "bias1", "bias2"])
def test_autograd_of_functionalize(only, device):
    everything = tensors(device)

    def transformed(f):
        leaves = [
            t.detach().requires_grad_(only is None or i == only) for i, t in enumerate(everything)
        ]
        o = functionalize(lambda *t: f(*t).sin())(*leaves)
        return torch.autograd.grad(o.sum(), [leaf for leaf in leaves if leaf.requires_grad])

    agree(transformed)


def test_functionalize_and_vmap_in_both_orders(device):
    q, k, v, bias1, bias2 = tensors(device)

    def of_k(f):
        return lambda key: f(q, key, v, bias1, bias2)

    keys = torch.stack([k, 2 * k])
    agree(lambda f: torch.vmap(functionalize(of_k(f)))(keys))
    agree(lambda f: functionalize(torch.vmap(of_k(f)))(keys))


def by_dual_tensors(f, q):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(q, q))).tangent


def compiled_jvp(f, q):
    return torch.compile(lambda x: jvp(f, (x,), (x,))[1], backend="eager")(q)


def dual_tensor_into_compiled(f, q):
    return by_dual_tensors(torch.compile(f, backend="eager"), q)


FORWARD_MODE = {
    "jvp": lambda f, q: jvp(f, (q,), (q,))[1],
    "jacfwd": lambda f, q: jacfwd(lambda x: f(x).sum())(q),
    "hessian": lambda f, q: hessian(lambda x: f(x).sum())(q),
    "dual": by_dual_tensors,
    "dual-and-gradient": lambda f, q: by_dual_tensors(f, q.detach().requires_grad_()),
    "vmap-of-jvp": lambda f, q: torch.vmap(lambda x: jvp(f, (x,), (x,))[1])(q[None]),
    "jvp-of-vmap": lambda f, q: jvp(torch.vmap(f), (q[None],), (q[None],))[1],
    "compiled": compiled_jvp,
    "dual-into-compiled": dual_tensor_into_compiled,
}


@pytest.mark.parametrize("ask", FORWARD_MODE.values(), ids=FORWARD_MODE.keys())
@pytest.mark.parametrize("as_operator", [False, True], ids=["function", "operator"])
def test_forward_mode_raises(as_operator, ask, device):
    if as_operator and ask is FORWARD_MODE["hessian"]:
        pytest.skip("torch.func differentiates the function; of the operator PyTorch refuses it")
    q, k, v, bias1, bias2 = tensors(device)
    op = torch.ops.deepspeed4science.evoformer_attn

    def function(x):
        if as_operator:
            return op(x, k, v, bias1, bias2, True)[0]
        return ours(x, k, v, bias1, bias2)

    with pytest.raises(ForwardModeError, match="vjp or jacrev"):
        ask(function, q)


def test_operators_are_not_compiled_themselves(device, monkeypatch):
    """A frame that torch.compile gives up is run as it is, and then what it calls is compiled."""
    callbacks = []
    functions = torch.ops.deepspeed4science._registered.functions["evoformer_attn"]
    kernel = functions["CompositeExplicitAutograd"]

    def watched(*arguments):
        callbacks.append(get_eval_frame_callback())
        return kernel(*arguments)

    monkeypatch.setitem(functions, "CompositeExplicitAutograd", watched)

    def given_up(*arguments):
        for _ in range(1):  # a loop that breaks a graph
            torch._dynamo.graph_break()
            o = torch.ops.deepspeed4science.evoformer_attn(*arguments, True)[0]
        return o

    torch.compile(given_up, backend="eager")(*tensors(device))
    assert callbacks == [None]


def test_a_tangent_of_zero_is_noticed(device):
    """What the operator gave before it raised."""
    q, k, v, bias1, bias2 = tensors(device)

    def detached(q, k, v, bias1, bias2):
        return evoformer_attention(q.detach(), k, v, bias1, bias2)

    def tangent(f):
        return jvp(lambda x: f(x, k, v, bias1, bias2), (q,), (q,))[1]

    with pytest.raises(AssertionError):
        agree(tangent, detached)


def test_dual_level_without_dual_tensors(device):
    everything = tensors(device)
    with forward_ad.dual_level():
        inside = ours(*everything)
    torch.testing.assert_close(inside, ours(*everything))


def test_second_derivatives_of_torch_func_raise(device):
    q, k, v, bias1, bias2 = tensors(device)
    twice = jacrev(jacrev(lambda x: ours(x, k, v, bias1, bias2).sum()))
    with pytest.raises(DoubleBackwardError, match="reference"):
        twice(q)


@pytest.mark.parametrize("needs", ["11111", "10000", "00100", "00001", "01100"])
def test_flop_are_counted(needs, device):
    """Two products forward; backward one for each gradient, Q K^T, and dO V^T unless only dV is
    wanted.
    """
    case = Case("flop", B=2, N=3, Lq=9, Lk=11, H=2, D=8, Dv=5)
    leaves = [
        t.requires_grad_(need == "1")
        for t, need in zip(case.inputs(torch.float32, device).tensors(), needs, strict=True)
    ]
    product = 2 * 2 * 3 * 2 * 9 * 11  # of depth 1
    with FlopCounterMode(display=False) as forward:
        o = ours(*leaves)
    assert forward.get_total_flops() == product * (8 + 5)
    with FlopCounterMode(display=False) as backward:
        o.sum().backward()
    expected = {"11111": 3 * 8 + 2 * 5, "10000": 2 * 8 + 5, "00100": 8 + 5}
    expected |= {"00001": 8 + 5, "01100": 2 * 8 + 2 * 5}
    assert backward.get_total_flops() == product * expected[needs]
