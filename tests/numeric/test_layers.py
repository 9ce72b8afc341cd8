"""Layers against the algorithms of the papers, written down here in plain PyTorch: the error law
for the result, the gradient of the input and that of every parameter.
"""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from deepspeed4science import nn
from deepspeed4science.errors import ForwardModeError, InvalidInputError
from tests.numeric import law
from tests.numeric.cases import DEVICES

pytestmark = pytest.mark.usefixtures("seed")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
C, D, H, L, CS, CZ = 12, 8, 2, 9, 10, 16


def norm(x, w, name):
    weight, bias = w.get(f"{name}.weight"), w.get(f"{name}.bias")
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


def linear(x, w, name):
    x = x @ w[f"{name}.weight"].T
    return x + w[f"{name}.bias"] if f"{name}.bias" in w else x


def attention(x, w, mha, bias, seen):
    """x [..., L, C], bias [..., H, L, L], seen [..., L]"""
    q, k, v = (
        linear(x, w, f"{mha}linear_{part}").unflatten(-1, (H, D)).transpose(-2, -3)
        for part in "qkv"
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(D) + bias
    scores = scores.masked_fill(~seen[..., None, None, :], -math.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1)[..., None, None, None], 0.0)
    o = (weights @ v).transpose(-2, -3).flatten(-2)
    return linear(o * linear(x, w, f"{mha}linear_g").sigmoid(), w, f"{mha}linear_o")


def triangle(x, w, seen, ending, transposed=False):
    """Algorithms 13 and 14, the pairs (i, .) or (., j) one after the other.

    transposed   with b_kj in the place of b_jk, b_ik in that of b_ki
    """
    x = norm(x, w, "layer_norm")
    z = linear(x, w, "linear_z")
    z = z.transpose(1, 2) if transposed else z
    out = [None] * L
    for n in range(L):
        if ending:
            bias = z.permute(0, 3, 2, 1)  # b_ki
            out[n] = attention(x[:, :, n], w, "mha.", bias, seen[:, :, n])
        else:
            bias = z.permute(0, 3, 1, 2)  # b_jk
            out[n] = attention(x[:, n], w, "mha.", bias, seen[:, n])
    return torch.stack(out, dim=2 if ending else 1)


def triangle_at_once(x, w, seen, ending, transposed=False):
    """The same with all pairs in each product, as models have it: sums over rows n that are taken
    apart, as those above, are half as wrong.
    """
    if ending:
        x, seen = x.transpose(1, 2), seen.mT
        return triangle_at_once(x, w, seen, False, transposed).transpose(1, 2)
    x = norm(x, w, "layer_norm")
    bias = linear(x, w, "linear_z").permute(0, 3, 1, 2).unsqueeze(1)
    bias = bias.mT if transposed else bias
    return attention(x, w, "mha.", bias, seen)


def pair_bias(a, z, *rest):
    """Algorithm 24, with and without s; 26."""
    *s, w, seen = rest
    if s:
        (s,) = s
        s_ = norm(s, w, "layer_norm_a.layer_norm_s")
        scale = linear(s_, w, "layer_norm_a.linear_g").sigmoid()
        a = scale * norm(a, {}, "") + linear(s_, w, "layer_norm_a.linear_s")
    else:
        a = norm(a, w, "layer_norm_a")
    bias = linear(norm(z, w, "layer_norm_z"), w, "linear_z").movedim(-1, -3)
    o = attention(a, w, "mha.", bias, seen)
    if "linear_ada_out.weight" in w:
        o = o * linear(s, w, "linear_ada_out").sigmoid()
    return o


def randomised(layer):
    """With no parameter at 0, where a wrong one would not show."""
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def check(layer, reference, eager, inputs, seen, dtype, device, *, autocast=False, compiled=False):
    """`layer(*inputs, mask=seen)` against `reference(*inputs, weights, seen)` in float64, allowed
    what `eager`, with the same arguments, is wrong by; on inputs of those shapes.
    """
    layer, seen = layer.to(device), seen.to(device)
    ulp = torch.finfo(torch.bfloat16 if autocast else dtype).eps

    def ours(*arguments):
        *leaves, weights, _ = arguments
        return torch.func.functional_call(layer, weights, tuple(leaves), {"mask": seen})

    if compiled:
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")

    def draw():
        drawn = [torch.randn_like(x, device=device).to(dtype) for x in inputs]
        do_ = torch.randn_like(drawn[0])

        def run(function, dtype, autocast):
            weights = {
                name: x.detach().to(dtype).requires_grad_() for name, x in layer.named_parameters()
            }
            leaves = [x.to(dtype).requires_grad_() for x in drawn]
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                o = function(*leaves, weights, seen)
            return [
                o.detach(),
                *torch.autograd.grad(o, [*leaves, *weights.values()], do_.to(o.dtype)),
            ]

        results = (
            run(ours, dtype, autocast),
            run(eager, dtype, autocast),
            run(reference, torch.float64, False),
        )
        names = ["O", *(f"d{n}" for n in range(len(inputs))), *dict(layer.named_parameters())]
        compared = dict(zip(names, zip(*results, strict=True), strict=True))
        for name, (x, _, ref) in compared.items():
            assert x.shape == ref.shape and (autocast or x.dtype == dtype), name
        return {name: found for name, found in compared.items() if not law.is_rounding(found[2])}

    law.check_stacked(draw, ulp)


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
@pytest.mark.parametrize("ending", [False, True], ids=["starting", "ending"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"bias": False, "transpose_bias": True}],
    ids=["alphafold2", "alphafold3", "transposed"],
)
def test_triangle_attention(device, dtype, ending, options):
    kind = nn.TriangleAttentionEndingNode if ending else nn.TriangleAttentionStartingNode
    layer = randomised(kind(C, D, H, **options))
    transposed = options.get("transpose_bias", False)
    seen = torch.rand(2, L, L) < 0.7
    seen[0, :, 6:] = False  # padded, both ways
    seen[0, 6:] = False
    seen[1, torch.arange(L), torch.arange(L)] = True

    check(
        layer,
        partial(triangle, ending=ending, transposed=transposed),
        partial(triangle_at_once, ending=ending, transposed=transposed),
        [torch.randn(2, L, L, C)],
        seen,
        dtype,
        device,
    )


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
@pytest.mark.parametrize("adaptive", [False, True])
def test_attention_with_pair_bias(device, dtype, adaptive):
    layer = randomised(nn.AttentionPairBias(C, CZ, D, H, c_s=CS if adaptive else None))
    seen = torch.rand(3, L) < 0.7
    seen[:, 0] = True
    inputs = [torch.randn(3, L, C), torch.randn(3, L, L, CZ)]
    inputs += [torch.randn(3, L, CS)] if adaptive else []

    check(layer, pair_bias, pair_bias, inputs, seen, dtype, device)


def test_pairs_shared_by_samples():
    layer = randomised(nn.AttentionPairBias(C, CZ, D, H))
    a, z, seen = torch.randn(2, 4, L, C), torch.randn(2, 1, L, L, CZ), torch.rand(2, 1, L) < 0.7
    seen[..., 0] = True
    w = dict(layer.named_parameters())
    expected = pair_bias(a, z, w, seen.expand(2, 4, L))
    torch.testing.assert_close(layer(a, z, mask=seen), expected, rtol=1e-4, atol=1e-5)
    expanded = layer(a, z.expand(2, 4, L, L, CZ), mask=seen.expand(2, 4, L))
    torch.testing.assert_close(expanded, expected, rtol=1e-4, atol=1e-5)


def test_samples_are_not_taken_for_batches():
    """As many samples as batches, and pairs, s or a mask without the dimension of samples."""
    layer, adaptive = nn.AttentionPairBias(C, CZ, D, H), nn.AttentionPairBias(C, CZ, D, H, c_s=CS)
    a, z, mask = torch.randn(2, 2, L, C), torch.randn(2, L, L, CZ), torch.ones(2, L)
    with pytest.raises(InvalidInputError, match=r"z: expected .* 1 in their place; got \[2, 9"):
        layer(a, z)
    with pytest.raises(InvalidInputError, match=r"mask: expected .* 1 in their place; got \[2, 9"):
        layer(a, z.unsqueeze(1), mask=mask)
    with pytest.raises(InvalidInputError, match=r"s: expected .* 1 in their place; got \[2, 9"):
        adaptive(a, z.unsqueeze(1), torch.randn(2, L, CS))
    for few in (mask[0], mask[:1]):
        assert layer(a, z[:1], mask=few).shape == a.shape


def test_arguments_of_pair_bias_that_do_not_fit():
    a, z, s = torch.randn(2, 3, L, C), torch.randn(2, 3, L, L, CZ), torch.randn(2, 3, L, CS)
    plain, adaptive = nn.AttentionPairBias(C, CZ, D, H), nn.AttentionPairBias(C, CZ, D, H, c_s=CS)
    for call in (lambda: plain(a, z, s), lambda: adaptive(a, z)):
        with pytest.raises(InvalidInputError, match=r"s: expected \[\*, L, c_s\].*; got"):
            call()
    for fewer in ((a, z[0, 0]), (a[0, 0], z[0, 0, 0])):
        with pytest.raises(InvalidInputError, match=r"z: expected \[\*, L, L, c_z\].*; got"):
            plain(*fewer)
    square = torch.ones(2, 3, L, L)  # a mask of pairs
    for wrong, match in (
        ((a[..., :-1], z), rf"a: expected tokens \[\*, L, c_a\], c_a = {C}; got"),
        ((a[0, 0, 0], z), "a: expected tokens"),
        ((a, z[..., :-1]), rf"z: expected .*c_z = {CZ}.*; got"),
        ((a, z[..., :-1, :-1, :]), "z: expected .* with L and the leading dimensions of a,"),
        ((a, z.expand(2, *z.shape)), "z: expected .* with L and the leading dimensions of a,"),
        ((a, z, None, square), "mask: expected .*one number for each token.*; got"),
        ((a, z, None, square[..., 0, :-1]), "mask: expected .*one number for each token.*; got"),
    ):
        with pytest.raises(InvalidInputError, match=match):
            plain(*wrong)
    for wrong in (s[..., :-1], s[..., :-1, :], s.expand(2, *s.shape), s[..., 0, 0, 0]):
        with pytest.raises(InvalidInputError, match=rf"s: expected .*c_s = {CS}.*; got"):
            adaptive(a, z, wrong)
    assert adaptive(a, z, s[:1, :1, :1]).shape == a.shape
    with pytest.raises(InvalidInputError, match="norm_a: expected True with c_s"):
        nn.AttentionPairBias(C, CZ, D, H, c_s=CS, norm_a=False)


def test_inputs_of_attention_that_do_not_fit():
    layer = nn.EvoformerAttention(C, CZ, CZ, D, H)
    x, keys = torch.randn(2, L, C), torch.randn(2, L, CZ)
    for wrong, match in (
        ((x[..., :-1], keys), rf"q_x: expected .*c_q = {C}; got \[2, 9, {C - 1}\]"),
        ((x, x), rf"kv_x: expected .*c_k = {CZ}; got \[2, 9, {C}\]"),
        ((x[0, 0], keys), "q_x: expected"),
    ):
        with pytest.raises(InvalidInputError, match=match):
            layer(*wrong)


@pytest.mark.parametrize("heads", [0, -1, 1.5])
def test_numbers_of_heads_that_there_are_not(heads):
    for layer in (
        partial(nn.EvoformerAttention, C, C, C, D),
        partial(nn.AttentionPairBias, C, CZ, D),
        partial(nn.TriangleAttentionEndingNode, C, D),
    ):
        with pytest.raises(InvalidInputError, match=r"heads: expected integers from 1 up; got"):
            layer(heads)


def test_an_initialisation_that_there_is_not():
    with pytest.raises(InvalidInputError, match=r"init: expected .*'zero'; got 'glorrot'"):
        nn.EvoformerAttention(C, C, C, D, H, init="glorrot")


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", [nn.TriangleAttentionStartingNode, nn.TriangleAttentionEndingNode])
def test_forward_mode_of_a_layer_raises(kind, recorded):
    layer, x = kind(C, D, H), torch.randn(1, L, L, C, requires_grad=recorded)
    with forward_ad.dual_level(), pytest.raises(ForwardModeError, match="reverse-mode"):
        layer(forward_ad.make_dual(x, torch.ones_like(x)))


def test_attention_of_other_keys():
    layer = randomised(nn.EvoformerAttention(C, 7, 7, D, H, gating=False))
    q_x, kv_x = torch.randn(3, 5, C), torch.randn(3, L, 7)
    w = dict(layer.named_parameters())
    heads = (
        x.unflatten(-1, (H, D)).transpose(1, 2)
        for x in (
            linear(q_x, w, "linear_q"),
            linear(kv_x, w, "linear_k"),
            linear(kv_x, w, "linear_v"),
        )
    )
    q, k, v = heads
    o = (q @ k.mT / math.sqrt(D)).softmax(-1) @ v
    expected = linear(o.transpose(1, 2).flatten(-2), w, "linear_o")
    torch.testing.assert_close(layer(q_x, kv_x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["starting", "ending", "pair_bias"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compile_whole(kind, autocast):
    inputs, seen = [torch.randn(1, L, L, C)], torch.ones(1, L, L, dtype=torch.bool)
    if kind == "pair_bias":
        layer, reference, eager = nn.AttentionPairBias(C, CZ, D, H, c_s=CS), pair_bias, pair_bias
        inputs = [torch.randn(2, L, C), torch.randn(2, L, L, CZ), torch.randn(2, L, CS)]
        seen = torch.ones(2, L, dtype=torch.bool)
    else:
        starting, ending = nn.TriangleAttentionStartingNode, nn.TriangleAttentionEndingNode
        layer = (ending if kind == "ending" else starting)(C, D, H)
        reference = partial(triangle, ending=kind == "ending")
        eager = partial(triangle_at_once, ending=kind == "ending")
    options = {"autocast": autocast, "compiled": True}
    check(randomised(layer), reference, eager, inputs, seen, torch.float32, "cpu", **options)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_half_precision_with_either_weights(weights):
    layer = randomised(nn.TriangleAttentionStartingNode(C, D, H))
    x = torch.randn(1, L, L, C)
    expected = layer(x)
    o = layer.to(weights)(x.bfloat16())
    assert o.dtype == torch.bfloat16 and law.relative_error(o, expected) < 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
def test_autocast_of_either_weights(autocast, weights, device):
    """Autocast in float16, a GPU's default, of a model in bfloat16, and the reverse."""
    triangles = randomised(nn.TriangleAttentionEndingNode(C, D, H)).to(device)
    alone = randomised(nn.EvoformerAttention(C, C, C, D, H)).to(device)
    x = torch.randn(1, L, L, C, device=device)
    for layer in (triangles, alone):
        expected = layer(x)
        with torch.autocast(device, autocast):
            o = layer.to(weights)(x.to(weights))
        o.float().sum().backward()
        assert o.dtype == autocast and law.relative_error(o, expected) < 0.05


def test_initialisation():
    layer = nn.TriangleAttentionStartingNode(64, 16, 4)
    assert (layer(torch.randn(1, 5, 5, 64)) == 0).all()  # a residual begins as the identity
    mha = layer.mha
    assert (mha.linear_g.weight == 0).all() and (mha.linear_g.bias == 1).all()
    bound = math.sqrt(6 / (64 + 64))
    assert 0.95 * bound < mha.linear_q.weight.abs().max() <= bound
    assert 0.8 < layer.linear_z.weight.std() * 8 < 1.2
    pairs = nn.AttentionPairBias(64, 256, 16, 4, c_s=8)
    assert (pairs.linear_ada_out.bias == -2).all() and (pairs.linear_ada_out.weight == 0).all()
    assert 0.9 < pairs.linear_z.weight.std() * 16 < 1.1
    assert pairs.linear_z.weight.abs().max() <= 2 / (16 * 0.8796) + 1e-6
    assert (pairs.mha.linear_o.weight != 0).any() and (pairs.mha.linear_q.bias == 0).all()


def test_names_of_other_packages():
    triangle_layer = nn.TriangleAttentionEndingNode(C, D, H)
    state = triangle_layer.state_dict()
    theirs = {
        name.replace("linear_z.", "linear."): torch.randn_like(x) for name, x in state.items()
    }
    assert "linear.weight" in theirs
    triangle_layer.load_state_dict(theirs)
    torch.testing.assert_close(triangle_layer.linear_z.weight, theirs["linear.weight"])
    layer = nn.AttentionPairBias(16, 6, 8, 2)
    shapes = {
        "norm_s.weight": (16,),
        "norm_s.bias": (16,),
        "proj_q.weight": (16, 16),
        "proj_q.bias": (16,),
        "proj_k.weight": (16, 16),
        "proj_v.weight": (16, 16),
        "proj_g.weight": (16, 16),
        "proj_z.0.weight": (6,),
        "proj_z.0.bias": (6,),
        "proj_z.1.weight": (2, 6),
        "proj_o.weight": (16, 16),
    }
    boltz = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    torch.nn.ModuleDict({"model": layer}).load_state_dict(boltz)
    torch.testing.assert_close(layer.mha.linear_k.weight, boltz["model.proj_k.weight"])
    torch.testing.assert_close(layer.linear_z.weight, boltz["model.proj_z.1.weight"])
    layer.load_state_dict(layer.state_dict())
    again = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    again.load_state_dict({name.removeprefix("model."): x for name, x in boltz.items()})


def test_projections_are_one_product_and_no_copies(monkeypatch):
    """q, k and v go to the op as views of one tensor, of the ending node, too."""
    from deepspeed4science.nn import attention as module

    seen = {}
    real = module.DS4Sci_EvoformerAttention

    def note(q, k, v, biases):
        seen.update(storages={x.untyped_storage().data_ptr() for x in (q, k, v, biases[1])})
        return real(q, k, v, biases)

    monkeypatch.setattr(module, "DS4Sci_EvoformerAttention", note)
    for kind in (nn.TriangleAttentionStartingNode, nn.TriangleAttentionEndingNode):
        with torch.no_grad():
            kind(C, D, H)(torch.randn(1, L, L, C))
        assert len(seen["storages"]) == 1
