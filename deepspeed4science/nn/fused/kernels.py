"""Triton kernels for a triangle layer's steps before and after attention. Each reads every pair
once; a pair is a row of a matrix here.

    norm_pair_bias            normed = norm(x) * weight + bias;  z = normed Wz^T
    gated_output              y = (o * sigmoid(gate)) Wo^T + bias + residual
    gated_output_backward     from dy: dO, the gate's gradient, parts of dWo
    column_sums               gradients of biases, for layers that have them
    norm_pair_bias_backward   from dnormed and dz: dx, parts of the parameters' gradients

All are bound by memory bandwidth. The tensor memory accelerator loads tiles of BLOCK pairs, several
tiles ahead. It reads zeros past the last pair; stores are masked.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    beyond = 1.0 + tl.exp(-x)
    return tl.rsqrt(beyond * beyond)  # two instructions, where a division takes eight


@triton.jit
def _wide(x):
    return x * tl.full([], 1, tl.int64)


@triton.jit
def _tile(t, rows, columns, R, BLOCK: tl.constexpr, ENDING: tl.constexpr):
    """First pair of tile t, number of pairs from there on (to the end of the row i for the ending
    node), and the tile's row and column in the matrix of O.

    For the ending node O is stored as [*, J, I, C], here a matrix [* J, I C], and a tile has pairs
    of one i only. rows is I, columns is J.
    """
    if ENDING:
        blocks = tl.cdiv(columns, BLOCK)
        row, j = t // blocks, t % blocks * BLOCK
        return row * columns + j, columns - j, row // rows * columns + j, row % rows
    return t * BLOCK, R - t * BLOCK, t * BLOCK, 0


@triton.jit
def _heads_offset(pair, h, rows, columns, H: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Offsets of heads h of the given pairs in pair biases [*, H, queries, keys]."""
    per_batch = _wide(rows) * columns
    b, p = pair // per_batch, pair % per_batch
    if TRANSPOSED:
        p = p % columns * rows + p // columns
    return (b * H * per_batch + p)[:, None] + h[None, :] * per_batch


@triton.jit
def norm_pair_bias(
    x_ptr,  # [R, C]
    norm_weight_ptr,  # [C]
    norm_bias_ptr,  # [C]
    weight_ptr,  # [H, C]
    normed_ptr,  # [R, C]
    z_ptr,  # [*, H, queries, keys]
    R,
    rows,
    columns,
    eps,
    C: tl.constexpr,
    H: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, h = tl.arange(0, C), tl.arange(0, 16)
    here = (pair < R)[:, None]
    at = _wide(pair)[:, None] * C + c[None, :]
    x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    x -= (tl.sum(x, 1) / C)[:, None]
    x *= tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
    x = x * tl.load(norm_weight_ptr + c)[None, :] + tl.load(norm_bias_ptr + c)[None, :]
    normed = x.to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + at, normed, mask=here)
    weight = tl.load(weight_ptr + h[None, :] * C + c[:, None], mask=(h < H)[None, :], other=0.0)
    z = tl.dot(normed, weight.to(normed.dtype)).to(z_ptr.dtype.element_ty)
    tl.store(
        z_ptr + _heads_offset(pair, h, rows, columns, H, TRANSPOSED),
        z,
        mask=here & (h < H)[None, :],
    )


@triton.jit
def gated_output(
    o,  # descriptor [R, C], of the ending node [* J, I C]
    gate,  # descriptor [R, C]
    residual,  # descriptor [R, N]
    weight_ptr,  # [N, C]
    bias_ptr,  # [N]
    y_ptr,  # [R, N]
    R,
    rows,
    columns,
    num_tiles,
    C: tl.constexpr,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ENDING: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    r, c, n = tl.arange(0, BLOCK)[:, None], tl.arange(0, C), tl.arange(0, N)
    weight = tl.load(weight_ptr + n[None, :] * C + c[:, None]).to(o.dtype)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n).to(tl.float32)[None, :]
    for t in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        first, count, o_row, o_column = _tile(t, rows, columns, R, BLOCK, ENDING)
        values = o.load([o_row, o_column * C])
        opened = _sigmoid(gate.load([first, 0]).to(tl.float32))
        y = tl.dot((values.to(tl.float32) * opened).to(values.dtype), weight)
        if HAS_BIAS:
            y += bias
        if HAS_RESIDUAL:
            y += residual.load([first, 0]).to(tl.float32)
        at = _wide(first) * N + (r * N + n[None, :])
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=r < count)


@triton.jit
def gated_output_backward(
    dy,  # descriptor [R, N]
    o,  # descriptor [R, C], of the ending node [* J, I C]
    gate,  # descriptor [R, C]
    weight_ptr,  # [N, C]
    do_ptr,  # as o
    dgate_ptr,  # [R, C], `stride` elements from row to row
    dweight_ptr,  # [programs, N, C], float32
    R,
    rows,
    columns,
    num_tiles,
    stride,
    C: tl.constexpr,
    N: tl.constexpr,
    ENDING: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    r, c, n = tl.arange(0, BLOCK)[:, None], tl.arange(0, C), tl.arange(0, N)
    weight = tl.load(weight_ptr + n[:, None] * C + c[None, :]).to(o.dtype)
    dweight = tl.zeros([N, C], dtype=tl.float32)
    for t in tl.range(pid, num_tiles, tl.num_programs(0), num_stages=STAGES):
        first, count, o_row, o_column = _tile(t, rows, columns, R, BLOCK, ENDING)
        here = r < count
        dy_tile = dy.load([first, 0]).to(weight.dtype)
        values = o.load([o_row, o_column * C]).to(tl.float32)
        opened = _sigmoid(gate.load([first, 0]).to(tl.float32))
        if ENDING:  # the rows past this tile's end belong to another tile
            dy_tile = tl.where(here, dy_tile, 0.0)
        dgated = tl.dot(dy_tile, weight)
        gated = values * opened
        dweight = tl.dot(tl.trans(dy_tile), gated.to(weight.dtype), dweight)
        o_first, step = _wide(o_row), 1
        if ENDING:
            o_first, step = o_first * rows + o_column, rows
        do = (dgated * opened).to(do_ptr.dtype.element_ty)
        tl.store(do_ptr + o_first * C + (r * (step * C) + c[None, :]), do, mask=here)
        dgate = (dgated * gated * (1.0 - opened)).to(dgate_ptr.dtype.element_ty)
        dgate_at = _wide(first) * stride + (r * stride + c[None, :])
        tl.store(dgate_ptr + dgate_at, dgate, mask=here)
    tl.store(dweight_ptr + pid * N * C + (n[:, None] * C + c[None, :]), dweight)


@triton.jit
def column_sums(
    x_ptr,  # [R, C], `stride` elements from row to row
    sums_ptr,  # [programs, C], float32
    R,
    num_tiles,
    stride,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, C)
    sums = tl.zeros([BLOCK, C], dtype=tl.float32)
    for t in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=3):
        at = _wide(t * BLOCK) * stride + (r * stride + c[None, :])
        sums += tl.load(x_ptr + at, mask=r < R - t * BLOCK, other=0.0).to(tl.float32)
    tl.store(sums_ptr + tl.program_id(0) * C + c, tl.sum(sums, 0))


@triton.jit
def norm_pair_bias_backward(
    dnormed,  # descriptor [R, C]
    x,  # descriptor [R, C]
    dresidual,  # descriptor [R, C]
    dz_ptr,  # [*, H, queries, keys], float32
    norm_weight_ptr,  # [C]
    norm_bias_ptr,  # [C]
    weight_ptr,  # [H, C]
    dx_ptr,  # [R, C]
    parts_ptr,  # [programs, 2 + H, C], float32: of the norm's weight and bias, and of weight
    R,
    rows,
    columns,
    num_tiles,
    eps,
    C: tl.constexpr,
    H: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    r, c, h = tl.arange(0, BLOCK), tl.arange(0, C), tl.arange(0, 16)
    weight = tl.load(weight_ptr + h[:, None] * C + c[None, :], mask=(h < H)[:, None], other=0.0)
    weight = weight.to(dnormed.dtype)
    norm_weight = tl.load(norm_weight_ptr + c)[None, :]
    norm_bias = tl.load(norm_bias_ptr + c)[None, :]
    dnorm_weight, dnorm_bias = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    dweight = tl.zeros([16, C], dtype=tl.float32)
    for t in tl.range(pid, num_tiles, tl.num_programs(0), num_stages=STAGES):
        first = t * BLOCK
        pair = first + r
        here = (pair < R)[:, None]
        offset = _heads_offset(pair, h, rows, columns, H, TRANSPOSED)
        dz = tl.load(dz_ptr + offset, mask=here & (h < H)[None, :], other=0.0).to(weight.dtype)
        normed = x.load([first, 0]).to(tl.float32)
        normed -= (tl.sum(normed, 1) / C)[:, None]
        scale = tl.rsqrt(tl.sum(normed * normed, 1) / C + eps)[:, None]
        normed *= scale
        scaled = (normed * norm_weight + norm_bias).to(weight.dtype)
        dweight = tl.dot(tl.trans(dz), scaled, dweight)
        of_normed = dnormed.load([first, 0]).to(tl.float32) + tl.dot(dz, weight)
        dnorm_weight += tl.sum(of_normed * normed, 0)
        dnorm_bias += tl.sum(of_normed, 0)
        of_normed *= norm_weight
        mean, along = tl.sum(of_normed, 1) / C, tl.sum(of_normed * normed, 1) / C
        dx = scale * (of_normed - mean[:, None] - normed * along[:, None])
        if HAS_RESIDUAL:
            dx += dresidual.load([first, 0]).to(tl.float32)
        at = _wide(first) * C + (r[:, None] * C + c[None, :])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=here)
    parts_ptr += pid * (2 + H) * C
    tl.store(parts_ptr + c, dnorm_weight)
    tl.store(parts_ptr + C + c, dnorm_bias)
    at = 2 * C + (h[:, None] * C + c[None, :])
    tl.store(parts_ptr + at, dweight, mask=(h < H)[:, None])
