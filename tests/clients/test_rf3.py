"""RosettaFold 3 on this op, which it takes for cuEquivariance; that it takes in bfloat16 only."""

import importlib

import pytest
import torch

from deepspeed4science import drop_in, triangle
from tests.clients import compare

CLIENT = "rf3"
pytestmark = pytest.mark.usefixtures("seed", "client")
C = 32  # its triangle multiplication wants multiples


@pytest.fixture
def attention(client, monkeypatch):
    """Its module, imported as on a GPU."""
    with drop_in.use_as_cuequivariance(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        module = importlib.import_module("rf3.model.layers.attention")
    assert module.SHOULD_USE_CUEQUIVARIANCE
    assert module.cuet.triangle_attention is triangle.triangle_attention
    return module


def check(layer, device, monkeypatch):
    real = torch.is_autocast_enabled  # which it asks of GPUs
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=device: real(kind))

    def plain(module, x):
        module.use_cuequivariance = False
        return module(x)

    def switched(module, x):
        module.use_cuequivariance = True
        return module(x)

    shapes = [(2, compare.L, compare.L, C)]
    compare.check(compare.randomised(layer).to(device), shapes, plain, switched, autocast=True)


@compare.each
@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
def test_triangle_attention(attention, monkeypatch, device, starting):
    layer = attention.TriangleAttention(C, compare.H, compare.D, start_node=starting)
    check(layer, device, monkeypatch)


@compare.each
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_triangle_multiplication(attention, monkeypatch, device, direction):
    check(attention.TriangleMultiplication(C, direction=direction), device, monkeypatch)
