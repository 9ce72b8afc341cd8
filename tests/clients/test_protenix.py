"""Protenix 2 on this op: both of the back ends that it has for others' kernels."""

import importlib

import pytest

from deepspeed4science import drop_in, nn
from tests.clients import compare

CLIENT = "protenix"
pytestmark = pytest.mark.usefixtures("seed", "client")


@pytest.fixture
def triangular(client):
    return importlib.import_module("protenix.model.triangular.triangular")


@compare.each
@compare.precision
@compare.mask_kind
@pytest.mark.parametrize("backend", ["cuequivariance", "deepspeed"])
@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
def test_triangle_attention(triangular, device, autocast, mask, backend, starting):
    layer = triangular.TriangleAttention(compare.C, compare.D, compare.H, starting=starting)
    seen = compare.pair_mask(mask, device, rows=1)[0]

    def switched(module, x, mask):
        with drop_in.switch("protenix"):
            return module(x, mask=mask, triangle_attention=backend)

    compare.check_one_pair_map(layer, switched, seen, autocast=autocast)


@compare.each
@compare.precision
@pytest.mark.parametrize("kind", ["Outgoing", "Incoming"])
def test_triangle_multiplication(triangular, device, autocast, kind):
    layer = getattr(triangular, f"TriangleMultiplication{kind}")(compare.C, compare.C)
    seen = compare.pair_mask("padded", device, rows=1)[0]

    def switched(module, x, mask):
        with drop_in.switch("protenix"):
            return module(x, mask=mask, triangle_multiplicative="cuequivariance")

    compare.check_one_pair_map(layer, switched, seen, autocast=autocast)


def test_our_triangle_attention_takes_its_parameters(triangular):
    seen = compare.pair_mask("ragged", "cpu", rows=1)[0]
    compare.check_same(
        nn.TriangleAttentionStartingNode(compare.C, compare.D, compare.H, bias=False),
        compare.randomised(triangular.TriangleAttention(compare.C, compare.D, compare.H)),
        [(compare.L, compare.L, compare.C)],
        lambda module, x: module(x, seen),
        lambda module, x: module(x, mask=seen.to(x.dtype)),
    )


def test_recipes_of_the_readme(client, capsys):
    compare.check_recipes(CLIENT, capsys)
