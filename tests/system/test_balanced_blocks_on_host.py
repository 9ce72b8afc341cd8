"""The number of persistent blocks where every so many-th tile is short, on the host."""

import random
import subprocess

import pytest

from tests.system.host_programs import built

SHORT = 0.75  # of the time of a whole tile


@pytest.fixture(scope="module")
def balanced_blocks(tmp_path_factory):
    path = built(tmp_path_factory.mktemp("host"), "balanced_blocks")

    def run(cases):
        numbers = [str(number) for case in cases for number in case]
        return [int(line) for line in subprocess.check_output([str(path), *numbers]).split()]

    return run


def longest(blocks, tiles, parts, parts_of_tile):
    """Time of the slowest block, in whole tiles; a row's last tile may be short."""
    of_row = -(-parts // parts_of_tile)
    short = SHORT if parts % parts_of_tile else 1.0
    return max(
        sum(short if tile % of_row == of_row - 1 else 1.0 for tile in range(block, tiles, blocks))
        for block in range(blocks)
    )


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # Forward of (1, N, N, 4, 32) at 320, 448 and 704: two rows n and two query tiles a block
        ((132, 1920, 5, 2), 131),
        ((132, 3584, 7, 2), 131),
        ((132, 8448, 11, 2), 131),
        ((132, 5760, 9, 2), 132),  # 576: blocks get every tile of a row already
        ((132, 3584, 8, 2), 132),  # no tile is short
        ((132, 1280, 5, 4), 131),
        ((132, 132, 3, 2), 132),  # a tile for each block
        ((114, 1920, 5, 2), 113),
        ((78, 1920, 5, 2), 77),
        ((16, 1920, 7, 2), 16),  # a sixteenth idle costs as much as it gains
        ((132, 10**6, 79, 2), 132),  # short tiles are too few
        ((1, 7, 5, 2), 1),
        ((0, 7, 5, 2), 0),
    ],
)
def test_known_cases(case, expected, balanced_blocks):
    assert balanced_blocks([case]) == [expected]


def test_no_block_takes_longer(balanced_blocks):
    random.seed()
    cases = [
        (blocks, random.randint(blocks, 20 * blocks), random.randint(1, 24), random.randint(1, 3))
        for blocks in random.choices((132, 131, 114, 78, 60, 16, 7), k=300)
    ]
    chosen = balanced_blocks(cases)
    gains = 0
    for case, blocks in zip(cases, chosen, strict=True):
        before, after = longest(*case), longest(blocks, *case[1:])
        # Tiles are whole numbers, so a block may have one short tile less than its share.
        assert after <= before + (1 - SHORT), (case, blocks)
        gains += after < before
    assert gains > 10
