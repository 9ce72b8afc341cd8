"""Where Hopper's backward of wide heads sums dq up, compiled for the host: it needs no GPU."""

import random
import subprocess

import pytest

from tests.system.host_programs import built

H200 = 132


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """plan(wide, B, N, Lq, Lk, H, blocks) -> accumulators, size of one, counters, adds_dbias2"""
    path = built(tmp_path_factory.mktemp("host"), "dq_global_plan")

    def run(*numbers):
        words = [str(path), *(str(int(number)) for number in numbers)]
        return [int(word) for word in subprocess.check_output(words, text=True).split()]

    return run


@pytest.mark.parametrize(
    ("wide", "shape", "expected"),
    [
        (True, (1, 64, 1024, 1024, 8), (23, 1024 * 128, 1026, True)),
        (True, (1, 64, 1024, 1022, 8), (54, 1024 * 128, 1026, False)),
        (True, (1, 104, 1024, 1024, 8), (54, 1024 * 128, 1666, False)),  # room for 19 of 22
        (False, (1, 256, 1024, 1024, 4), (54, 1024 * 64, 2050, False)),
        (True, (1, 16, 200, 200, 2), (0, 0, 0, False)),  # no room: two passes
    ],
    ids=["D128", "D128-rows-of-8-bytes", "D128-many-rows", "D64", "small"],
)
def test_plan_of(wide, shape, expected, plan):
    assert plan(wide, *shape, H200) == [int(x) for x in expected]


def test_slots_fit_where_they_are_and_suffice(plan):
    seed = random.randrange(2**31)
    pick = random.Random(seed)
    kinds = set()
    for _ in range(200):
        wide, B, N = pick.random() < 0.7, pick.choice((1, 2)), pick.randint(2, 300)
        H, Lq, Lk = pick.randint(1, 64), pick.randint(1, 2000), pick.randint(1, 2000)
        blocks = pick.choice((14, 114, H200))
        shape = (wide, B, N, Lq, Lk, H, blocks)
        accumulators, size, counters, adds = plan(*shape)
        pairs, elements, under_way = B * N * H, B * H * Lq * Lk, blocks / -(-Lk // 128)
        kinds.add((bool(accumulators), bool(adds)))
        if accumulators:
            assert size >= Lq * (128 if wide else 64), (seed, shape)
            assert accumulators >= min(pairs, (1.25 if adds else 1.5) * under_way), (seed, shape)
        if adds:  # lse and delta are there at the same time; all of it within dbias2's 16-bit copy
            assert 4 * (accumulators * size + counters + 2 * pairs * Lq) <= 2 * elements, (
                seed,
                shape,
            )
            assert wide and Lk % 4 == 0, (seed, shape)
        else:
            assert accumulators * size <= elements, (seed, shape)
    assert kinds == {(False, False), (True, False), (True, True)}, seed
