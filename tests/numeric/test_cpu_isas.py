"""Every instruction set of this processor keeps the error law, not only the one it would choose;
sums over rows n.
"""

import math

import pytest
import torch

from deepspeed4science import dispatch
from deepspeed4science.backends.cpu import CpuBackend
from op_builder.errors import BuildError
from op_builder.toolchain import cpu_isa
from op_builder.toolchain.cpu_isa import CPU_ISAS
from tests.numeric.cases import DTYPES, Case
from tests.numeric.law import check, check_calls, equal_rows
from tests.numeric.test_unseen_queries import assert_zero_gradients, one_visible_key

pytestmark = pytest.mark.usefixtures("seed")

CASES = (
    Case("typical", B=2, N=5, Lq=130, H=3),
    Case("ragged", Lq=71, Lk=37, D=19, Dv=40),
    Case("wide", Lq=33, Lk=50, D=300, Dv=140),
    Case("one-key", Lq=7, Lk=1),
    Case("no-bias", Lq=40, bias1=False, bias2=False),
)


@pytest.fixture(params=CPU_ISAS)
def isa(request, monkeypatch):
    """Forces one instruction set upon the op."""
    monkeypatch.setenv("DS4S_CPU_ISA", request.param)
    try:
        cpu_isa.best("bf16")
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(dispatch, "BACKENDS", (CpuBackend(),))
    return request.param


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_instruction_set_keeps_the_law(isa, dtype, ran):
    for case in CASES:
        check(case.inputs(dtype, "cpu"))
    masked = CASES[0].inputs(dtype, "cpu")
    masked.bias1[:, 1] = -math.inf
    masked.bias1[:, 2, ..., :64] = -math.inf
    check(masked)
    single = Case("one-visible", N=3, Lq=70, Lk=150).inputs(dtype, "cpu")
    one_visible_key(single)
    assert_zero_gradients(single)
    expected = "avx512" if isa == "amx" and dtype != torch.bfloat16 else isa
    assert {name.rpartition("_")[2] for name in ran} == {expected}


@pytest.mark.usefixtures("one_thread")
def test_nan_of_a_row_reaches_no_row_of_fewer_keys(isa):
    """Sums over keys may be padded to 32 of them, in memory that an earlier row n has used."""
    case = Case("stale", N=4, Lq=20, Lk=90, H=1, bias2=False)
    inputs = case.inputs(torch.bfloat16, "cpu")
    inputs.q[:, 0] = math.nan
    inputs.bias1[:, 1:, ..., 37:] = -math.inf
    assert check(inputs)[1][:, 1:].isfinite().all()


@pytest.mark.parametrize("N", [20, 50, 300])
def test_equal_rows_are_added_as_exactly_as_by_eager(N):
    one = Case("equal", N=1, Lq=34, Lk=43, H=4, bias1=False)
    check_calls(lambda: equal_rows(one.inputs(torch.float32, "cpu"), N), draws=8)


def test_pair_bias_larger_than_a_cores_cache():
    """The rows n of a head come one after another then, not the heads of a row n."""
    check(Case("large-bias2", B=2, N=2, Lq=260, Lk=400, H=4, D=8).inputs(torch.float32, "cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_more_blocks_of_queries_than_chunks(dtype):
    """Sums over queries are then over several blocks, before those of chunks are added."""
    check(Case("long", N=2, Lq=1100, Lk=30, H=1, D=8).inputs(dtype, "cpu"))
