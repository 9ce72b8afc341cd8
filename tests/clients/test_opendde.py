"""OpenDDE on this op, which it takes for cuEquivariance; that it calls on GPUs only."""

import importlib

import pytest
import torch

from deepspeed4science import drop_in, triangle
from tests.clients import compare

CLIENT = "opendde"
pytestmark = pytest.mark.usefixtures("seed", "client")


@pytest.fixture(autouse=True)
def cuequivariance(client):
    with drop_in.use_as_cuequivariance():
        yield


def test_it_finds_cuequivariance():
    """With one of these modules missing, `auto` stays on plain PyTorch in silence."""
    environment = importlib.import_module("opendde.utils.environment")
    for name in environment.GPU_OPTIONAL_MODULES:
        assert environment.probe_optional_module(name).usable, name


def check(layer, device, autocast, monkeypatch, option, name):
    """`layer` without, and with, the option for cuEquivariance's function `name`, which is ours."""
    seen = compare.pair_mask("padded", device, rows=1)[0]
    library = importlib.import_module("cuequivariance_torch.primitives.triangle")
    ours = getattr(triangle, name)
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return ours(*arguments, **options)

    monkeypatch.setattr(library, name, counted)

    def switched(module, x, mask):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            return module(x, mask=mask, **{option: "cuequivariance"})

    compare.check_one_pair_map(layer, switched, seen, autocast=autocast)
    assert calls


@compare.each
@compare.precision
@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
def test_triangle_attention(monkeypatch, device, autocast, starting):
    module = importlib.import_module("opendde.model.triangular.triangular")
    layer = module.TriangleAttention(compare.C, compare.D, compare.H, starting=starting)
    check(layer, device, autocast, monkeypatch, "triangle_attention", "triangle_attention")


@compare.each
@compare.precision
@pytest.mark.parametrize("kind", ["Outgoing", "Incoming"])
def test_triangle_multiplication(monkeypatch, device, autocast, kind):
    module = importlib.import_module("opendde.model.triangular.triangular")
    layer = getattr(module, f"TriangleMultiplication{kind}")(compare.C, compare.C)
    name = "triangle_multiplicative_update"
    check(layer, device, autocast, monkeypatch, "triangle_multiplicative", name)
