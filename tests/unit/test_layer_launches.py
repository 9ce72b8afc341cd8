"""What the launches of a triangle layer's Triton kernels hand over: without a GPU, and without
Triton where it is not installed.
"""

import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from deepspeed4science.nn import fused  # noqa: E402

ROWS, C, H = 5, 32, 4


@dataclass
class Descriptor:
    """Has the fields of Triton's."""

    base: object
    shape: list
    strides: list
    block_shape: list


def imitation():
    """Modules of Triton that suffice to define the kernels."""
    triton, language, tools, descriptor = (
        ModuleType(name)
        for name in ("triton", "triton.language", "triton.tools", "triton.tools.tensor_descriptor")
    )
    triton.jit, language.constexpr, triton.language = (lambda function: function), int, language
    descriptor.TensorDescriptor = Descriptor
    return {one.__name__: one for one in (triton, language, tools, descriptor)}


@pytest.fixture
def launch(monkeypatch):
    """launch.py"""
    absent = find_spec("triton") is None
    for name, module in imitation().items() if absent else ():
        monkeypatch.setitem(sys.modules, name, module)
    module = importlib.import_module(f"{fused.__name__}.launch")
    monkeypatch.setattr(module, "_num_multiprocessors", lambda _: 132)
    yield module
    if absent:  # what was imported with the imitation is forgotten
        for name in ("launch", "kernels"):
            delattr(fused, name)
            del sys.modules[f"{fused.__name__}.{name}"]


def one_column():
    """Contiguous pairs of one column; their stride along it is not that from pair to pair."""
    x = torch.randn(1, 1, ROWS, C).transpose(1, 2)
    assert x.is_contiguous() and x.stride(-2) == ROWS * C
    return x


@pytest.mark.parametrize("ending", [False, True])
def test_rows_of_pairs_of_one_column(launch, ending):
    """A process has one, if columns are sharded over many."""
    x, dy, norm, weight = one_column(), one_column(), torch.ones(C), torch.randn(C, C)
    product = torch.randn(1, ROWS, 1, 4 * C)
    gate, dgate = (one.narrow(-1, 3 * C, C) for one in (product, torch.empty_like(product)))
    o = torch.randn(1, *((1, ROWS) if ending else (ROWS, 1)), H, C // H)
    dz, of_norm = torch.zeros(1, 1, H, ROWS, 1), (norm, norm, weight[:H])
    with mock.patch.object(launch._Kernel, "launch") as noted:
        normed, _ = launch.norm_pair_bias(x, *of_norm, torch.bfloat16, 1e-5, ending)
        launch.gated_output(o, gate, weight, None, x, ending)
        launch.gated_output_backward(dy, weight, o, gate, dgate, True, ending)
        launch.norm_pair_bias_backward(dy, dz, x, *of_norm, dy, 1e-5, ending)
    assert normed.stride() == (ROWS * C, C, C, 1)
    _, output, output_backward, sums, gate_sums, norm_backward = (
        call.args for call in noted.call_args_list
    )
    dense, apart = ([ROWS, C], [C, 1]), ([ROWS, C], [4 * C, 1])
    assert matrices(output)[1:] == [apart, dense]  # the gate and the residual
    assert matrices(output_backward)[::2] == [dense, apart]  # dy and the gate
    strides = [arguments[3][-1] for arguments in (output_backward, sums, gate_sums)]
    assert strides == [4 * C, C, 4 * C]  # of dgate, dy and dgate
    assert matrices(norm_backward) == [dense] * 3


def matrices(arguments):
    """Sizes and strides of the descriptors."""
    return [(list(one.shape), list(one.strides)) for one in arguments[1]]
