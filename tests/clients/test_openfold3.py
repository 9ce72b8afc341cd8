"""OpenFold 3 on this op: its flags for DeepSpeed's kernels and for its own in Triton."""

import copy
import importlib

import pytest
import torch

from benchmarks import blocks as benchmark
from deepspeed4science import drop_in, nn
from tests.clients import compare
from tests.numeric import law

CLIENT = "openfold3"
pytestmark = pytest.mark.usefixtures("seed", "client")
FLAGS = ("use_deepspeed_evo_attention", "use_triton_triangle_kernels")
LAYERS = "openfold3.core.model.layers"


def layer(module, name, *arguments, **options):
    kind = getattr(importlib.import_module(f"{LAYERS}.{module}"), name)
    return compare.randomised(kind(*arguments, **options))


def switched(flag, call):
    def run(module, *inputs):
        with drop_in.switch("openfold3"):
            return call(module, *inputs, **{flag: True})

    return run


@compare.each
@compare.precision
@compare.mask_kind
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("node", ["Starting", "Ending"])
def test_triangle_attention(client, device, autocast, mask, flag, node):
    module = layer(
        "triangular_attention", f"TriangleAttention{node}Node", compare.C, compare.D, compare.H
    )
    seen = compare.pair_mask(mask, device)

    def call(module, x, **flags):
        return module(x, mask=seen.to(x.dtype), **flags)

    shapes = [(2, compare.L, compare.L, compare.C)]
    compare.check(
        module.to(device), shapes, call, switched(flag, call), autocast=autocast,
        read=seen[..., None],
    )  # fmt: skip


@compare.each
@compare.precision
@compare.mask_kind
def test_attention_with_pair_bias(client, device, autocast, mask):
    module = layer("attention_pair_bias", "AttentionPairBias", 24, 24, 24, 0, 10, 8, 3)
    seen = compare.pair_mask(mask, device)[:, 0]

    def call(module, a, z, **flags):
        return module(a, z, mask=seen.to(a.dtype), **flags)

    size = (2, compare.L)
    shapes = [(*size, 24), (*size, size[1], 10)]
    compare.check(module.to(device), shapes, call, switched(FLAGS[0], call), autocast=autocast)


def test_templates_and_chunks(client):
    """Six dimensions, and chunks in which each row has a pair bias of its own."""
    module = layer(
        "triangular_attention", "TriangleAttentionStartingNode", compare.C, compare.D, compare.H
    )
    x = torch.randn(2, 3, compare.L, compare.L, compare.C)
    with torch.no_grad(), drop_in.switch("openfold3"):
        for chunk_size in (None, 4):
            o = module(x, chunk_size=chunk_size, use_triton_triangle_kernels=True)
            torch.testing.assert_close(o, module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("node", ["Starting", "Ending"])
def test_our_triangle_attention_takes_its_parameters(client, node):
    name = f"TriangleAttention{node}Node"
    sizes = (compare.C, compare.D, compare.H)
    seen = compare.pair_mask("ragged", "cpu")
    compare.check_same(
        getattr(nn, name)(*sizes, bias=False),
        layer("triangular_attention", name, *sizes),
        [(2, compare.L, compare.L, compare.C)],
        lambda module, x: module(x, seen),
        lambda module, x: module(x, mask=seen.to(x.dtype)),
    )


def test_the_ending_node_of_its_pair_blocks(client):
    """Its bias is that of (i, k), where algorithm 14 has that of (k, i)."""
    pair = compare.randomised(pairformer_block()).pair_stack
    torch.nn.init.zeros_(pair.tri_att_start.mha.linear_o.weight)
    sizes = (compare.C, compare.D, compare.H)
    z = torch.randn(2, compare.L, compare.L, compare.C)
    seen = compare.pair_mask("ragged", "cpu")
    with torch.no_grad():
        theirs = pair.tri_att_start_end(z, None, seen, False, False) - z
        for transposed in (True, False):
            ours = nn.TriangleAttentionEndingNode(*sizes, bias=False, transpose_bias=transposed)
            ours.load_state_dict(pair.tri_att_end.state_dict())
            assert torch.allclose(theirs, ours(z, seen), rtol=1e-4, atol=1e-4) == transposed


def test_the_benchmark_replaces_layers_of_a_block_by_equal_ones(client):
    block = benchmark.pairformer_block(torch.device("cpu")).eval()
    layers = benchmark.with_layers(block, "eager")
    s, z = torch.randn(1, 10, benchmark.SINGLE), torch.randn(1, 10, 10, benchmark.PAIR)
    with torch.no_grad():
        (expected, found) = (through([one], (s, z), {}) for one in (block, layers))
    for one, other, before in zip(found, expected, (s, z), strict=True):
        assert law.relative_error(one - before, other - before) < 1e-5


@pytest.mark.parametrize("diffusion", [False, True])
def test_our_attention_with_pair_bias_takes_its_parameters(client, diffusion):
    name = "DiffusionAttentionPairBias" if diffusion else "AttentionPairBias"
    seen = compare.pair_mask("ragged", "cpu")[:, 0]
    shapes = [(2, compare.L, 24), (2, compare.L, compare.L, 10)]
    shapes += [(2, compare.L, 14)] if diffusion else []
    compare.check_same(
        nn.AttentionPairBias(24, 10, 8, 3, c_s=14 if diffusion else None, norm_z=not diffusion),
        layer("attention_pair_bias", name, 24, 24, 24, 14, 10, 8, 3),
        shapes,
        lambda module, *x: module(*x, mask=seen),
        lambda module, *x: module(*x, mask=seen.to(x[0].dtype)),
    )


def test_recipes_of_the_readme(client, capsys):
    compare.check_recipes(CLIENT, capsys)


def pairformer_block():
    module = importlib.import_module("openfold3.core.model.latent.pairformer")
    return module.PairFormerBlock(
        c_s=24,
        c_z=compare.C,
        c_hidden_pair_bias=8,
        no_heads_pair_bias=3,
        c_hidden_mul=16,
        c_hidden_pair_att=compare.D,
        no_heads_pair=compare.H,
        transition_type="swiglu",
        transition_n=2,
        pair_dropout=0.0,
        fuse_projection_weights=False,
        inf=1e9,
    )


@compare.each
@compare.precision
def test_a_pairformer_block(client, device, autocast):
    seen = compare.pair_mask("padded", device)
    tokens = seen[:, 0]

    def call(module, s, z, **flags):
        s, z = module(s, z, tokens.to(s.dtype), seen.to(s.dtype), **flags)
        return torch.cat([(s * tokens[..., None]).flatten(), (z * seen[..., None]).flatten()])

    block = compare.randomised(pairformer_block(), std=0.1).to(device)
    shapes = [(2, compare.L, 24), (2, compare.L, compare.L, compare.C)]
    compare.check(block, shapes, call, switched(FLAGS[0], call), autocast=autocast)


@pytest.mark.parametrize("flag", FLAGS)
def test_only_triangles_of_a_pairformer_block_take_it(client, monkeypatch, flag):
    """It calls its attention of tokens without a flag."""
    attention = importlib.import_module("openfold3.core.model.primitives.attention")
    rows = []
    with drop_in.switch("openfold3"), monkeypatch.context() as patch:
        ours = attention._deepspeed_evo_attn

        def counted(q, k, v, biases):
            rows.append(q.shape[-4])
            return ours(q, k, v, biases)

        for name in ("_deepspeed_evo_attn", "_triton_evo_attn"):
            patch.setattr(attention, name, counted)
        block, z = pairformer_block(), torch.randn(1, compare.L, compare.L, compare.C)
        # Its Triton kernels of triangle multiplication want a GPU.
        patch.setattr(block.pair_stack, "tri_mul_out_in", lambda z, **_: z)
        with torch.no_grad():
            block(z[:, 0], z, torch.ones(1, compare.L), torch.ones(z.shape[:3]), **{flag: True})
    assert rows == [compare.L, compare.L]


STEPS = 60


def through(blocks, inputs, flags):
    s, z = inputs
    for block in blocks:
        s, z = block(s, z, torch.ones_like(s[..., 0]), torch.ones_like(z[..., 0]), **flags)
    return s, z


def losses(blocks, inputs, targets, flags):
    """Of training those blocks, in float32."""
    blocks = copy.deepcopy(blocks)
    optimizer = torch.optim.Adam(blocks.parameters(), lr=0.005)
    curve = []
    for _ in range(STEPS):
        s, z = through(blocks, inputs, flags)
        loss = (s - targets[0]).square().mean() + (z - targets[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return torch.tensor(curve, dtype=torch.float64)


def test_training_follows_the_plain_path(client):
    """Within ten times what a disturbance of all weights by 1e-7 does: float32 can tell, bfloat16
    could not tell a halved dbias2 from noise.
    """
    blocks, teachers = (
        torch.nn.ModuleList(compare.randomised(pairformer_block(), std=0.2) for _ in range(2))
        for _ in range(2)
    )
    shapes = [(2, compare.L, 24), (2, compare.L, compare.L, compare.C)]
    inputs = [torch.randn(*shape) for shape in shapes]
    with torch.no_grad():
        targets = through(teachers, inputs, {})
    plain = losses(blocks, inputs, targets, {})
    noise = torch.zeros(STEPS, dtype=torch.float64)
    for _ in range(2):
        disturbed = copy.deepcopy(blocks)
        for parameter in disturbed.parameters():
            parameter.data *= 1 + 1e-7 * torch.randn_like(parameter)
        difference = (losses(disturbed, inputs, targets, {}) - plain).abs()
        noise = torch.maximum(noise, difference.cummax(0).values)
    with drop_in.switch("openfold3"):
        ours = losses(blocks, inputs, targets, {FLAGS[0]: True})
    excess = ((ours - plain).abs() / (noise + 1e-7 * plain)).max()
    assert plain[-1] < 0.9 * plain[0], "it does not learn"
    assert excess <= 10, f"{excess:.1f} times what a disturbance of 1e-7 does"
