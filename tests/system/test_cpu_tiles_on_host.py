"""Which keys the CPU kernels take for visible, and how they share out what is left."""

import math
import random
import struct
import subprocess
from pathlib import Path

import pytest

from op_builder import paths
from op_builder.toolchain import host_compiler

HOST = Path(__file__).resolve().parents[1] / "cpp" / "host"
NUM_KEYS = 96  # of a tile, as in cpu_tiles.cpp
FLOAT32, FLOAT16 = 0, 1
THRESHOLD = {FLOAT32: 1e8, FLOAT16: 1e4}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    host = host_compiler.find_host_compiler()
    if not host.ok:
        pytest.skip(f"{host.reason}; {host.remedy}")
    path = tmp_path_factory.mktemp("host") / "cpu_tiles"
    command = [
        host.path,
        "-std=c++17",
        "-fopenmp",
        f"-I{paths.csrc_root()}",
        HOST / "cpu_tiles.cpp",
    ]
    done = subprocess.run([*map(str, command), "-o", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    def run(*words, data=b""):
        command = [str(path), *map(str, words)]
        return subprocess.run(command, input=data, capture_output=True, check=True).stdout.decode()

    return run


def tiles(program, bias1, dtype=FLOAT32, row_mask=1):
    """[(first key, bias1 less its shift)]"""
    data = struct.pack(f"<{len(bias1)}{'f' if dtype == FLOAT32 else 'e'}", *bias1)
    rows = [
        line.split()
        for line in program("tiles", dtype, len(bias1), row_mask, data=data).splitlines()
    ]
    assert all(int(count) == len(values) for _, count, *values in rows)
    return [(int(key), [float(value) for value in values]) for key, _, *values in rows]


def single(x):
    """As float32 has it."""
    return (
        struct.unpack("<f", struct.pack("<f", x))[0]
        if math.isnan(x) or abs(x) < 3.4e38
        else math.copysign(math.inf, x)
    )


def is_visible(x, finite, dtype):
    """The rule of params.h, once more."""
    if math.isnan(x) or x == math.inf:
        return True
    if x == -math.inf:
        return False
    return x == max(finite) or not x <= single(max(finite) - THRESHOLD[dtype])


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=["fp32", "fp16"])
def test_tiles_are_all_visible_keys_and_little_else(dtype, program):
    seed = random.randrange(2**31)
    pick = random.Random(seed)
    numbers = [0.0, -1.5, 1e4, -1e4, -9999.0, -6e4, -math.inf, math.inf, math.nan]
    if dtype == FLOAT32:
        numbers += [-1e8, -9.9e7, -1e9, -1e9 - 64, -3e38, -3.3e38, 3e38]
    for _ in range(150):
        length = pick.choice((1, 15, 16, 17, 95, 96, 97, 300, 501))
        some = pick.sample(numbers, pick.randint(1, 3))
        bias1 = []
        while len(bias1) < length:
            bias1 += [single(pick.choice(some))] * pick.choice((1, 7, 60, 200))
        del bias1[length:]
        if dtype == FLOAT16:
            bias1 = list(struct.unpack(f"<{length}e", struct.pack(f"<{length}e", *bias1)))
        finite = [x for x in bias1 if math.isfinite(x)]
        shift = max(finite, default=0.0)
        visible = {k for k, x in enumerate(bias1) if is_visible(x, finite, dtype)}
        found = tiles(program, bias1, dtype)
        covered = [key + i for key, values in found for i in range(len(values))]
        where = f"seed {seed}, bias1 {bias1}"
        assert visible <= set(covered) and len(set(covered)) == len(covered), where
        assert len(found) <= -(-length // NUM_KEYS), where
        for key, values in found:
            assert key % 16 == 0 and len(values) <= NUM_KEYS, where
            assert visible & set(range(key, key + 16)), where
            assert visible & set(range(key + (len(values) - 1) // 16 * 16, key + len(values))), (
                where
            )
            for i, value in enumerate(values):
                expected = single(bias1[key + i] - shift)
                assert value == pytest.approx(expected, rel=1e-6, nan_ok=True), where


def test_the_largest_number_is_found_anywhere(program):
    for key in range(17):
        bias1 = [-1e9] * 40
        bias1[key] = 2.5
        ((first, values),) = tiles(program, bias1)
        assert (first, len(values), values[key % 16]) == (key // 16 * 16, 16, 0.0)


def test_a_row_that_nobody_reads_has_no_tiles(program):
    assert tiles(program, [0.0] * 100, row_mask=0) == []
    assert [(key, len(values)) for key, values in tiles(program, [0.0] * 100)] == [(0, 96), (96, 4)]
    assert tiles(program, [-math.inf] * 100) == []


@pytest.mark.parametrize(
    ("threads", "heads", "shares", "expected"),
    [
        (2, 4, (0.4, 1, 0.6, 0.8), (0, 2, 1, 1, 3, 2, 0)),  # alone, the longest first
        (16, 4, (1, 0.8, 0.6, 0.4), (1, 16, 1, 0, 1, 2, 3)),  # the longest would last
        (16, 4, (1, 1, 1, 1), (0, 16, 1, 0, 1, 2, 3)),  # one each, and all the same
        (3, 2, (1, 1), (1, 3, 1, 0, 1)),  # two groups for one of three threads
        (3, 2, (1, 0.45), (0, 3, 1, 0, 1)),  # which are half as long
        (1, 4, (0.4, 1), (0, 1, 0)),  # nobody to share with
        (10, 3, (1, 1, 1), (0, 9, 1, 0, 1, 2)),  # a tenth thread would have no group
        (2, 16, (1, 0.4), (0, 2, 0)),  # so many groups are even without a count
    ],
    ids=["two", "ragged-16", "even-16", "even-3", "ragged-3", "one", "nine-groups", "many-groups"],
)
def test_ragged_batches_are_shared_out(threads, heads, shares, expected, program):
    """Whether threads share groups, how many, whether rows were counted, the order of batches."""
    words = program("plan", threads, 16, 384, heads, *shares).split()
    assert tuple(int(word) for word in words) == expected
