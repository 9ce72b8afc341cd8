"""Where Hopper's backward of wide heads sums dq up, compiled for the host: it needs no GPU."""

import itertools
import random
import subprocess

import pytest

from tests.system.host_programs import built

H200 = 132


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """plan(kind, B, N, Lq, Lk, H, blocks[, stride of dq]) -> accumulators, size of one in words of
    4 bytes, counters, adds_dbias2, sections of the queries, bytes for the range of dq, log2 of
    twice the scale, ends of the pieces of that range
    """
    path = built(tmp_path_factory.mktemp("host"), "dq_global_plan")

    def run(*numbers):
        words = [str(path), *(str(int(number)) for number in numbers)]
        return [int(word) for word in subprocess.check_output(words, text=True).split()]

    return run


NARROW, WIDE, PAIRED = range(3)  # D = 64; D = 128; D = 64 in pairs of rows n
FLOAT = 10  # more: float16 operands, whose sums are float32


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        (WIDE, (1, 64, 1024, 1024, 8), (46, 1024 * 64, 1031, True, 1)),
        (WIDE, (1, 64, 1024, 1022, 8), (54, 1024 * 64, 1031, False, 1)),
        (WIDE, (1, 160, 1024, 1024, 8), (54, 1024 * 64, 2567, False, 1)),  # room for 21 of 22
        (NARROW, (1, 256, 1024, 1024, 4), (54, 1024 * 32, 2055, False, 1)),
        (WIDE, (1, 16, 200, 200, 2), (0, 0, 0, False, 1)),  # no room: two passes
        (PAIRED, (1, 48, 768, 768, 16), (70, 768 * 32, 1543, True, 1)),
        (PAIRED, (1, 256, 1024, 1024, 4), (113, 256 * 32, 8199, True, 4)),
        (PAIRED, (1, 400, 1024, 1024, 4), (0, 0, 0, False, 1)),  # room for 40 of 43
        (FLOAT + WIDE, (1, 64, 1024, 1024, 8), (23, 1024 * 128, 1031, True, 1)),
        (FLOAT + WIDE, (1, 104, 1024, 1024, 8), (54, 1024 * 128, 1671, False, 1)),
        (FLOAT + NARROW, (1, 256, 1024, 1024, 4), (54, 1024 * 64, 2055, False, 1)),
    ],
    ids=[
        "D128",
        "D128-rows-of-8-bytes",
        "D128-many-rows",
        "D64",
        "small",
        "pairs",
        "sections",
        "pairs-of-many-rows",
        "D128-float16",
        "D128-many-rows-float16",
        "D64-float16",
    ],
)
def test_plan_of(kind, shape, expected, plan):
    assert plan(kind, *shape, H200)[:5] == [int(x) for x in expected]


@pytest.mark.parametrize(
    ("kind", "fits", "too_many"),
    [
        # Blocks of keys, of which a block may have a queue of 32
        (NARROW, (1, 64, 256, 4096, 4, 1), (1, 64, 256, 4097, 4, 1)),
        # Of sections, a couple of (b, n, h) in a wave of clusters
        (PAIRED, (1, 256, 1024, 1024, 4, 16), (1, 256, 1024, 1024, 4, 15)),
        # Delta lies in dq, whose stride is an int there
        (PAIRED, (1, 48, 768, 768, 16, H200, 2**31 - 1), (1, 48, 768, 768, 16, H200, 2**31)),
    ],
    ids=["blocks-of-keys", "wave", "stride"],
)
def test_limits(kind, fits, too_many, plan):
    assert plan(kind, *fits)[0] > 0
    assert plan(kind, *too_many)[0] == 0


def test_accumulators_fit_where_they_are_and_suffice(plan):
    seed = random.randrange(2**31)
    pick = random.Random(seed)
    seen = set()
    for _ in range(300):
        kind = pick.choice((NARROW, WIDE, WIDE, PAIRED))
        B, N = pick.choice((1, 2)), pick.randint(2, 300)
        H, Lq, Lk = pick.randint(1, 64), pick.randint(1, 2000), pick.randint(1, 2000)
        blocks = pick.choice((14, 114, H200))
        sums = pick.choice((0, FLOAT))
        shape = (sums + kind, B, N, Lq, Lk, H, blocks)
        accumulators, size, counters, adds, sections, in_range, bound, *ends = plan(*shape)
        rows = N + N % 2 if kind == PAIRED else N
        pairs, elements, under_way = B * rows * H, B * H * Lq * Lk, blocks / -(-Lk // 128)
        seen.add((bool(accumulators), bool(adds), sections > 1))
        if accumulators:
            words = Lq * (128 if kind == WIDE else 64) // (1 if sums else 2)
            assert size * sections >= words, (seed, shape)
            least = 2.5 if sections > 1 else 1.25 if adds else 1.5
            assert accumulators >= min(pairs * sections, least * under_way), (seed, shape)
            assert counters == 2 * pairs * sections + 7, (seed, shape)
            # Of a head: maxima of pieces, an exponent, each block's largest sum, and one number.
            of_head = (3 * -(-Lq // (16 if kind == WIDE else 32)), 1, -(-Lk // 128), 1)
            pieces = [4 * B * N * H * end for end in itertools.accumulate(of_head)]
            assert [*ends, in_range] == [*pieces[:-1], 0 if sums else pieces[-1]], (seed, shape)
            assert bound == -1, (seed, shape)
            assert kind != PAIRED or accumulators >= 2, (seed, shape)
        if sections > 1:  # a couple of (b, n, h) in a wave of clusters
            assert kind == PAIRED and under_way >= 2, (seed, shape)
        if adds:  # lse, and delta unless it is in dq; all of it within dbias2's 16-bit copy
            saved = 1 if sections > 1 else 2
            words = accumulators * size + counters + saved * pairs * Lq
            assert 4 * words + in_range <= 2 * elements, (seed, shape)
            assert kind == PAIRED or (kind == WIDE and Lk % 4 == 0), (seed, shape)
        else:
            assert accumulators * size <= elements, (seed, shape)
    no, stored, added = (False, False, False), (True, False, False), (True, True, False)
    assert seen == {no, stored, added, (True, True, True)}, seed
