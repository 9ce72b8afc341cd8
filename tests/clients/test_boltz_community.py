"""boltz-community, a fork of Boltz 2, on this op: only with any_version."""

import importlib

import pytest

from deepspeed4science import drop_in
from deepspeed4science.errors import DropInError
from tests.clients import compare

CLIENT = "boltz-community"
pytestmark = pytest.mark.usefixtures("seed", "client")
LAYERS = "boltz.model.layers"


def test_it_is_refused_without_any_version():
    with pytest.raises(DropInError, match=r"got boltz-community 2\.13\.0.*any_version=True"):
        drop_in.switch("boltz")


@compare.each
@compare.precision
@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
def test_triangle_attention(monkeypatch, device, autocast, starting):
    module = importlib.import_module(f"{LAYERS}.triangular_attention.attention")
    layer = module.TriangleAttention(compare.C, compare.D, compare.H, starting=starting)
    seen = compare.pair_mask("ragged", device)

    def switched(module, x):
        with drop_in.switch("boltz", any_version=True), monkeypatch.context() as patch:
            # Where a kernel is not available, it falls back to this, with a warning.
            patch.delattr(f"{LAYERS}.triangular_attention.primitives._attention")
            return module(x, mask=seen.to(x.dtype), use_kernels=True)

    compare.check(
        compare.randomised(layer).to(device),
        [(2, compare.L, compare.L, compare.C)],
        lambda module, x: module(x, mask=seen.to(x.dtype)),
        switched,
        autocast=autocast,
        read=seen[..., None],
    )


def test_it_asks_opt_core_before_the_replaced_function(client):
    """docs/models.md says how to turn this off."""
    text = (client / f"{LAYERS.replace('.', '/')}/triangular_attention/primitives.py").read_text()
    helper = text[text.index("def _kernel_or_none") :]
    order = "flashpairformer.triangle_attention(", "kernel_triangular_attn(**kwargs)"
    assert helper.index(order[0]) < helper.index(order[1])
    flashpairformer = importlib.import_module(f"{LAYERS}.flashpairformer")
    assert flashpairformer.ENV_VAR == "BOLTZ_FLASHPAIRFORMER"
    assert "off" in flashpairformer.TIERS
