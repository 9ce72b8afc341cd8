"""CONTRACT: real masks. Rows that one large finite number hides whole keep the error law, hidden
tiles of keys are not read, rows that nobody reads (row_mask) give 0 whatever they hold.
"""

import math

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DEVICES, DTYPES, Case
from tests.numeric.law import check, check_weights, determinism, ours, run

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.usefixtures("seed")]
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def held(value, dtype):
    """The number as the dtype can hold it: float16 ends at 65,504."""
    return max(min(value, 6e4), -6e4) if dtype == torch.float16 else value


@each_dtype
@pytest.mark.parametrize("read", ["all", "hidden"])
@pytest.mark.parametrize("value", [-1e9, 1e4, -3e38])
def test_rows_that_one_number_hides_beside_visible_ones(value, read, dtype, device):
    """Neighbouring n share blocks of queries. Read "hidden": only their gradients count."""
    inputs = Case("whole", B=2, N=5, Lq=70, Lk=150, H=2).inputs(dtype, device)
    rows = [1, 2, 4]
    inputs.bias1[:, rows] = held(value, dtype)
    inputs.do = torch.randn_like(inputs.q)
    if read == "hidden":
        inputs.do[:, [0, 3]] = 0
    if read == "all" and dtype != torch.float32:
        check_weights(inputs)
    else:
        check(inputs)


@each_dtype
@pytest.mark.parametrize("value", [-1e9, 1e4, -3e38])
def test_one_number_on_top_of_a_mask(value, dtype, device):
    """What the number is added to still counts: here a mask of single keys, and all its zeros."""
    inputs = Case("on-top", B=1, N=3, Lq=70, Lk=300, H=2).inputs(dtype, device)
    hidden = torch.rand(inputs.bias1.shape, device=device) < 0.3
    inputs.bias1.zero_()
    inputs.bias1[:, 1:] = held(value, dtype)
    inputs.bias1[hidden] = -math.inf
    check(inputs)


@each_dtype
def test_many_rows_that_one_number_hides(dtype, device):
    """Past the runs of n in which float32 sums dbias2 on a CPU, with rows that see nothing."""
    inputs = Case("many", B=1, N=75, Lq=20, Lk=130, H=2, D=16).inputs(dtype, device)
    inputs.bias1[:, 1::3] = held(-1e9, dtype)
    inputs.bias1[:, ::3] = -math.inf
    inputs.bias1[:, 60:] = -math.inf
    inputs.bias1[..., 100:] = -math.inf
    check(inputs)


def ragged(b, value):
    """Batches of real lengths 1, 0.8, 0.6 and 0.4: their padding hidden as keys and as rows."""
    for batch, share in enumerate((1, 0.8, 0.6, 0.4)[: b.shape[0]]):
        b[batch, ..., round(share * b.shape[-1]) :] = value
        b[batch, round(share * b.shape[1]) :] = value


def every_row_another(b, value):
    for n in range(b.shape[1]):
        b[:, n, ..., : 97 * n] = value
        b[:, n, ..., 97 * n + 150 :] = value


def one_visible_key_in_a_tile(b, value):
    visible = b[..., [5, 200, 333, 500]].clone()
    b[...] = value
    b[..., [5, 200, 333, 500]] = visible


def single_key(b, value):
    visible = b[..., 450].clone()
    b[...] = value
    b[..., 450] = visible


TILES = {
    "last": lambda b, value: b[..., 240:].fill_(value),
    "first": lambda b, value: b[..., :300].fill_(value),
    "middle": lambda b, value: b[..., 130:400].fill_(value),
    # Of 96 and of 192 keys; the next tile follows at once, and is whole.
    "ends-of-tiles": lambda b, value: (b[..., 80:96].fill_(value), b[..., 176:192].fill_(value)),
    "both-ends": lambda b, value: (b[..., :100].fill_(value), b[..., 490:].fill_(value)),
    "one-visible-key-in-a-tile": one_visible_key_in_a_tile,
    "single-key": single_key,
    "every-row-another": every_row_another,
    "first-row": lambda b, value: b[:, :1].fill_(value),
    "last-row": lambda b, value: b[:, -1:].fill_(value),
    "ragged": ragged,
}


@each_dtype
@pytest.mark.parametrize("value", [-math.inf, -1e9], ids=["inf", "1e9"])
@pytest.mark.parametrize("hide", TILES.values(), ids=TILES.keys())
def test_hidden_tiles(hide, value, dtype, device):
    """No tile length divides 501. `poisoned_memory` shows what nobody writes."""
    B = 4 if hide is ragged else 2
    inputs = Case("tiles", B=B, N=5, Lq=70, Lk=501, H=2, D=16).inputs(dtype, device)
    hide(inputs.bias1, value if math.isinf(value) else held(value, dtype))
    check(inputs)


@pytest.mark.parametrize("hide", TILES.values(), ids=TILES.keys())
def test_hidden_tiles_in_rows_on_16_bytes(hide, device):
    """Whose masks are read otherwise; the rows of 501 are not."""
    inputs = Case("tiles", B=4, N=5, Lq=70, Lk=504, H=2).inputs(torch.bfloat16, device)
    hide(inputs.bias1, -math.inf)
    check(inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("visible", [330, 280, 90])
def test_last_keys_hidden_in_all_rows(visible, dtype, device):
    """On Hopper, dbias2 has tiles of 168 or 144 keys, not 192; past them nothing is added to it."""
    inputs = Case("cut", B=2, N=20, Lq=70, Lk=384, H=2).inputs(dtype, device)
    inputs.bias1[..., visible:] = -math.inf
    inputs.bias1[1, ..., visible // 2 :] = held(-1e9, dtype)
    check(inputs)


@pytest.mark.parametrize("Lk", [4500, 4504])
def test_hidden_tiles_of_long_rows(Lk, device):
    """Longer than what one word of steps tells of."""
    inputs = Case("long", N=3, Lq=40, Lk=Lk, H=1).inputs(torch.bfloat16, device)
    inputs.bias1[:, 0, ..., 100:4400] = -math.inf
    inputs.bias1[:, 1, ..., :3000] = -1e9
    inputs.bias1[:, 2] = -1e9
    check(inputs)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 3)], ids=["one", "B", "N"])
def test_hidden_tiles_by_a_broadcast_mask(shape, device):
    inputs = Case("tiles", B=4, N=3, Lq=70, Lk=501, H=2, D=16).inputs(torch.float32, device)
    inputs.bias1 = torch.randn(*shape, 1, 1, 501, device=device)
    inputs.bias1[..., 130:400] = -1e9
    inputs.bias1[-1, -1] = -1e9
    check(inputs)


def test_threads_share_out_ragged_batches(device):
    """Few groups and many threads: the same bits as one thread's."""
    if device != "cpu":
        pytest.skip("threads are the CPU backend's")
    inputs = Case("ragged", B=4, N=5, Lq=130, Lk=300, H=2).inputs(torch.float32, device)
    ragged(inputs.bias1, -math.inf)
    inputs.do = torch.randn_like(inputs.q)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(num_threads)
            results.append(run(ours, inputs))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# N, H, D. With N = 1, Hopper computes dbias2 in the kernel for dk and dv; the last, in that for dq.
ROWS = {"rows": (3, 2, 32), "one-row": (1, 2, 32), "one-row-many-scores": (1, 32, 64)}


def hidden_nan_inputs(value, dtype, device, first=False, rows=ROWS["rows"]):
    """NaN in K and V of keys whose tiles hold no visible key, whatever the family's tiles are."""
    N, H, D = rows
    inputs = Case("nan", B=1, N=N, Lq=70, Lk=600, H=H, D=D).inputs(dtype, device)
    hidden, nan = (slice(270), slice(192)) if first else (slice(150, 448), slice(256, 384))
    inputs.bias1[..., hidden] = held(value, dtype)
    inputs.do = torch.randn_like(inputs.q)
    inputs.k[:, :, nan] = math.nan
    inputs.v[:, :, nan] = math.nan
    return inputs


def check_not_read(inputs, function=ours):
    """The bits are those of finite numbers in the place of NaN."""
    found = run(function, inputs)
    inputs.k, inputs.v = inputs.k.nan_to_num(1.0), inputs.v.nan_to_num(1.0)
    for x, expected in zip(found, run(function, inputs), strict=True):
        assert torch.equal(x, expected)


@each_dtype
@pytest.mark.parametrize("value", [-math.inf, -1e9], ids=["inf", "1e9"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "middle"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_hidden_tiles_are_not_read(rows, first, value, dtype, device):
    with determinism(True):
        check_not_read(hidden_nan_inputs(value, dtype, device, first, rows))


def sees_one_key(inputs):
    """The row n = 0, a key whose tile is hidden in the other rows n."""
    inputs.bias1[:, 0] = -math.inf
    inputs.bias1[:, 0, ..., 300] = 0.5


def sees_nothing(inputs):
    """Some queries of the row n = 0, by both biases; their dO is NaN."""
    inputs.bias1[:, 0] = 0.5
    inputs.bias1[:, 0, ..., :300] = -math.inf
    inputs.bias2[..., 20:25, 300:] = -math.inf
    inputs.do[:, 0, 20:25] = math.nan


@each_dtype
@pytest.mark.parametrize("value", [-math.inf, -1e9], ids=["inf", "1e9"])
@pytest.mark.parametrize("repaired", [sees_one_key, sees_nothing])
def test_repairs_do_not_read_hidden_tiles(repaired, value, dtype, device):
    """On a GPU, dbias2 of these queries is computed again, over all rows n."""
    inputs = hidden_nan_inputs(value, dtype, device, rows=(6, 2, 32))
    repaired(inputs)
    for tensor in (inputs.k, inputs.v):  # of up to three neighbouring rows n, which may share tiles
        tensor[:, :3] = torch.randn_like(tensor[:, :3])
    with determinism(True):
        check_not_read(inputs)


def test_reading_hidden_tiles_is_noticed(device):
    with pytest.raises(AssertionError):
        check_not_read(hidden_nan_inputs(-1e9, torch.float32, device), evoformer_attention)


def row_masked_inputs(case, dtype, device):
    """Rows that nobody reads, the first and the last among them, with NaN in all they hold."""
    inputs = case.inputs(dtype, device)
    mask = torch.rand(case.B, case.N, device=device) < 0.5
    mask[:, 0], mask[:, 1], mask[-1, -1] = False, True, False
    inputs.row_mask = mask
    inputs.do = torch.randn_like(inputs.q)
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.do):
        tensor[~mask] = math.nan
    return inputs


@each_dtype
@pytest.mark.parametrize("biases", ["none", "bias1", "bias2", "both"])
def test_rows_that_nobody_reads(biases, dtype, device):
    """Zeros, exactly, and zero gradients, though they hold NaN; the others keep the law."""
    case = Case(
        "rows",
        B=2,
        N=6,
        Lq=70,
        Lk=150,
        bias1=biases in ("bias1", "both"),
        bias2=biases in ("bias2", "both"),
    )
    inputs = row_masked_inputs(case, dtype, device)
    o, dq, dk, dv, dbias1, _ = check(inputs)
    for tensor in (o, dq, dk, dv, dbias1):
        assert tensor is None or (tensor[~inputs.row_mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rows", list(ROWS)[1:])
def test_lone_rows_that_nobody_reads(rows, dtype, device):
    """That of the first batch; beside it keys hidden at the end, whole tiles of them."""
    _, H, D = ROWS[rows]
    inputs = Case("lone", B=2, N=1, Lq=70, Lk=600, H=H, D=D).inputs(dtype, device)
    inputs.row_mask = torch.tensor([[False], [True]], device=device)
    inputs.bias1[1, ..., 230:] = -math.inf
    inputs.do = torch.randn_like(inputs.q)
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.do):
        tensor[0] = math.nan
    for result in check(inputs):
        assert (result[0] == 0).all() and result.isfinite().all()


def test_all_rows_unread_and_a_mask_that_hides_none(device):
    inputs = Case("rows", B=2, N=3).inputs(torch.float32, device)
    inputs.do = torch.randn_like(inputs.q)
    plain = run(ours, inputs)
    inputs.row_mask = torch.ones(2, 3, dtype=torch.bool, device=device)
    for x, expected in zip(run(ours, inputs), plain, strict=True):
        assert torch.equal(x, expected)
    inputs.row_mask = ~inputs.row_mask
    for x in run(ours, inputs):
        assert (x == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_row_mask_beside_key_masks_and_many_rows(dtype, device):
    """A pair mask with its padded rows left out: what a model does that pads."""
    inputs = Case("pair", B=2, N=75, Lq=75, H=2, D=16).inputs(dtype, device)
    inputs.bias1.zero_()
    inputs.row_mask = torch.ones(2, 75, dtype=torch.bool, device=device)
    for batch, length in enumerate((66, 37)):
        inputs.bias1[batch, ..., length:] = inputs.bias1[batch, length:] = held(-1e9, dtype)
        inputs.row_mask[batch, length:] = False
    check(inputs)


def test_lse_of_a_row_that_nobody_reads(device):
    inputs = row_masked_inputs(Case("lse", B=2, N=4), torch.float32, device)
    op = torch.ops.deepspeed4science.evoformer_attn
    _, lse = op(*inputs.tensors(), True, inputs.row_mask)
    assert (lse[~inputs.row_mask] == -math.inf).all()
    assert lse[inputs.row_mask].isfinite().all()


@pytest.mark.parametrize(
    "mask",
    [
        *(True, False, [True, False, True], [[False, True, True]], [[True], [False]]),
        [[True, False, True], [True, True, False]],
    ],
    ids=str,
)
def test_row_masks_broadcast(mask, device):
    inputs = Case("broadcast", B=2, N=3).inputs(torch.float32, device)
    inputs.row_mask = torch.tensor(mask, device=device)
    check(inputs)
    inputs.row_mask = inputs.row_mask.expand(2, 3)  # strides of 0
    check(inputs)


@pytest.mark.parametrize("lead", [(), (4,), (2, 3, 4), (2, 1, 3, 4)], ids=str)
def test_row_masks_of_any_rank(lead, device):
    q, k, v = (torch.randn(*lead, 9, 2, 8, device=device) for _ in range(3))
    full = torch.rand(lead, device=device) < 0.5
    masks = [full, full[(0,) * len(lead)]]
    if lead:
        masks.append(full[..., :1])
    if len(lead) > 2:
        masks.append(full[:1])
    for mask in masks:
        o = DS4Sci_EvoformerAttention(q, k, v, row_mask=mask)
        torch.testing.assert_close(o, evoformer_attention(q, k, v, row_mask=mask))
