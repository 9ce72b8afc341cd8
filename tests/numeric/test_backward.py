"""CONTRACT, backward: any set of gradients, rows of any size, rows that a finite mask hides
whole.
"""

import itertools

import pytest
import torch

from tests.numeric.cases import DEVICES, DTYPES, Case
from tests.numeric.law import check, check_each_query, check_weights, ours, run

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.usefixtures("seed")]
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())

NAMES = ("dq", "dk", "dv", "dbias1", "dbias2")
# One alone, and dq, dk, dv together: test_error_law.py.
SETS = [
    needs
    for needs in itertools.product((False, True), repeat=5)
    if 2 <= sum(needs) < 5 and needs != (True, True, True, False, False)
]
SETS_OF_THREE = [needs for needs in itertools.product((False, True), repeat=3) if any(needs)]


def set_name(needs):
    return "-".join(itertools.compress(NAMES, needs))


@pytest.mark.parametrize("needs", SETS, ids=set_name)
def test_each_set_of_gradients(needs, device):
    """Passes that share what they compute leave out what nobody wants, and nothing else."""
    inputs = Case("set", B=2, N=3, Lq=70, H=2).inputs(torch.float16, device)
    inputs.needs = needs
    check(inputs)


@pytest.mark.parametrize("needs", SETS_OF_THREE, ids=set_name)
def test_each_set_of_gradients_without_biases(needs, device):
    case = Case("set", B=2, N=3, Lq=70, H=2, bias1=False, bias2=False)
    inputs = case.inputs(torch.float16, device)
    inputs.needs = (*needs, False, False)
    check(inputs)


@each_dtype
def test_small_rows_beside_large_ones(dtype, device):
    inputs = Case("rows", B=1, N=5, Lq=130, Lk=70, H=3).inputs(dtype, device)
    check_each_query(inputs)


@each_dtype
def test_rows_of_dbias2_add_up_to_zero(dtype, device):
    """math.md (16a). Errors that all keys of a query share are most of the error of a sum over
    pairs, such as the gradient of the pair bias's weights.
    """
    inputs = Case("sums", B=2, N=40, Lq=70, Lk=90, H=2).inputs(dtype, device)
    inputs.bias1[:, ::2, ..., 7:] = -torch.inf
    inputs.bias2 = inputs.bias2.float()
    dbias2 = run(ours, inputs)[5].double()
    assert (dbias2.sum(-1).abs() / dbias2.abs().sum(-1)).max() < 2e-6


@pytest.mark.parametrize(("Lq", "Lk"), [(70, 90), (600, 440), (600, 441)])
def test_bias_gradients_are_dense(Lq, Lk, device):
    """Functions of other libraries take any gradient for contiguous. What keeps one keeps its
    storage. Above 2**20 elements, sums of bias gradients are rounded elsewhere.
    """
    inputs = Case("dense", B=2, N=3, Lq=Lq, Lk=Lk, H=2).inputs(torch.bfloat16, device)
    leaves = [inputs.bias1.requires_grad_(), inputs.bias2.requires_grad_()]
    o = ours(inputs.q, inputs.k, inputs.v, *leaves)
    for gradient, leaf in zip(torch.autograd.grad(o, leaves, o), leaves, strict=True):
        assert gradient.dtype == leaf.dtype and gradient.is_contiguous()
        assert gradient.untyped_storage().nbytes() == gradient.nbytes


@pytest.mark.parametrize("place", ["q", "k", "v", "do", "bias1", "bias2"])
def test_nan_reaches_the_same_gradients(place, device):
    """One NaN among finite numbers; `check` compares places first."""
    inputs = Case("nan", B=1, N=3, Lq=70, Lk=90, H=2).inputs(torch.bfloat16, device)
    inputs.do = torch.randn_like(inputs.q)
    tensor = getattr(inputs, place)
    tensor[tuple(size // 2 for size in tensor.shape)] = torch.nan
    check(inputs)


@pytest.mark.parametrize("value", [-3e4, -1e6, -1e9])
def test_a_finite_key_mask_on_all_keys(value, device):
    """A float near -1e9 has no digits left for log(sum): nothing may be rebuilt from lse alone."""
    inputs = Case("hidden", B=1, N=4, Lq=100, Lk=200, H=2).inputs(torch.bfloat16, device)
    inputs.bias1[:, 1:3] = value
    check_weights(inputs)


def test_a_moderate_pair_bias_on_all_keys(device):
    inputs = Case("hidden", B=1, N=4, Lq=100, Lk=200, H=2).inputs(torch.bfloat16, device)
    inputs.bias2[:, :, :, 30:70] = -3e4
    check_weights(inputs)


@pytest.mark.parametrize("value", [-1e6, -1e9, -1e37, -3e38])
def test_queries_hidden_by_pair_bias_disturb_no_others(value, device):
    """Their own gradient is lost with the digits of lse (docs/limits.md)."""
    inputs = Case("hidden", B=1, N=4, Lq=100, Lk=200, H=2).inputs(torch.bfloat16, device)
    inputs.bias2[:, :, :, 30:70] = value
    inputs.do = torch.randn_like(inputs.q)
    inputs.do[:, :, 30:70] = 0
    check_weights(inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_lowest_key_masks_of_a_row_differ(dtype, device):
    """Two masks of all keys, neither of which may become the other: the lower one hides its keys,
    beside the other the scores keep their digits.
    """
    inputs = Case("lowest-keys", B=1, N=2, Lq=70, Lk=200, H=2).inputs(dtype, device)
    inputs.bias1[:, 1] = -3.3e38
    inputs.bias1[:, 1, ..., 64::3] = -2.5e38
    check(inputs)


def test_the_lowest_pair_biases_of_a_query_differ(device):
    """In base 2, or divided by the scale, they would overflow."""
    inputs = Case("lowest", B=1, N=2, Lq=70, Lk=200, H=2).inputs(torch.bfloat16, device)
    inputs.bias2[:, :, :, 30:50] = -3.3e38
    inputs.bias2[:, :, :, 30:50, 64::3] = -2.5e38
    inputs.do = torch.randn_like(inputs.q)
    inputs.do[:, :, 30:50] = 0
    check_weights(inputs)
