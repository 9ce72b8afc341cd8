"""OpenFold 3's third flag, `use_cueq_triangle_kernels`: it wants cuEquivariance, for which it takes
this op, and a GPU.
"""

import contextlib
import importlib

import pytest
import torch

from deepspeed4science import drop_in, triangle
from tests.clients import compare

CLIENT = "openfold3"
pytestmark = pytest.mark.usefixtures("seed", "client")
LAYERS = "openfold3.core.model.layers"
FLAG = {"use_cueq_triangle_kernels": True}
C = 32  # its triangle multiplication wants multiples


@pytest.fixture
def attention(client, monkeypatch):
    """Its module of attention, imported as on a GPU."""
    with drop_in.use_as_cuequivariance(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        module = importlib.import_module("openfold3.core.model.primitives.attention")
        importlib.import_module(f"{LAYERS}.triangular_multiplicative_update")
    assert module.cueq_is_installed
    assert module.triangle_attention is triangle.triangle_attention
    return module


@pytest.fixture
def layer(attention):
    """Makes one of its layers."""

    def make(module, name, *arguments):
        kind = getattr(importlib.import_module(f"{LAYERS}.{module}"), name)
        return compare.randomised(kind(*arguments))

    return make


def triangle_attention(layer, node):
    name = f"TriangleAttention{node}Node"
    return layer("triangular_attention", name, C, compare.D, compare.H)


@compare.each
@compare.precision
@pytest.mark.parametrize("switched", [False, True], ids=["library", "switch"])
@pytest.mark.parametrize("node", ["Starting", "Ending"])
def test_triangle_attention(attention, layer, monkeypatch, device, autocast, switched, node):
    seen = compare.pair_mask("padded", device)

    def call(module, x, **flags):
        return module(x, mask=seen.to(x.dtype), **flags)

    def ours(module, x):
        with contextlib.ExitStack() as stack:
            stack.enter_context(monkeypatch.context()).delattr(attention, "_attention")
            if switched:
                stack.enter_context(drop_in.switch("openfold3"))
            return call(module, x, **FLAG)

    compare.check(
        triangle_attention(layer, node).to(device),
        [(2, compare.L, compare.L, C)],
        call,
        ours,
        autocast=autocast,
        read=seen[..., None],
    )


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("node", ["Starting", "Ending"])
@pytest.mark.parametrize("lead", [(), (1,), (2,), (2, 3)], ids=str)
def test_dimensions_and_chunks(layer, lead, node, chunk_size):
    module = triangle_attention(layer, node)
    x = torch.randn(*lead, compare.L, compare.L, C)
    with torch.no_grad():
        o = module(x, chunk_size=chunk_size, **FLAG)
        torch.testing.assert_close(o, module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Outgoing", "Incoming"])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_triangle_multiplication(layer, lead, kind):
    module = layer("triangular_multiplicative_update", f"TriangleMultiplication{kind}", C, C)
    x = torch.randn(*lead, compare.L, compare.L, C)
    mask = (torch.rand(x.shape[:-1]) < 0.7).float()
    with torch.no_grad():
        o = module(x, mask=mask, **FLAG)
        torch.testing.assert_close(o, module(x, mask=mask), rtol=1e-4, atol=1e-4)
