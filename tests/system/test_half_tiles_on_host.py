"""Tiles of two rows n whose halves two blocks compute in the last round, on the host."""

import random
import subprocess

import pytest

from tests.system.host_programs import built


@pytest.fixture(scope="module")
def half_tiles(tmp_path_factory):
    path = built(tmp_path_factory.mktemp("host"), "half_tiles")

    def run(tiles, blocks):
        said = subprocess.check_output([str(path), str(tiles), str(blocks)], text=True)
        first_half, num_tiles = map(int, said.split())
        return first_half, num_tiles

    return run


def rounds(tiles, blocks, first_half, num_tiles):
    """Time of the slowest block, in whole tiles."""
    return max(
        sum(1.0 if tile < first_half else 0.5 for tile in range(block, num_tiles, blocks))
        for block in range(blocks)
    )


def test_every_row_of_every_tile_is_computed_once_and_no_block_has_more_to_do(half_tiles):
    seed = random.randrange(2**31)
    pick = random.Random(seed)
    halved = 0
    for _ in range(60):
        tiles, blocks = pick.randint(1, 600), pick.choice((1, 16, 78, 114, 131, 132))
        first_half, num_tiles = half_tiles(tiles, blocks)
        rows = [(tile, row) for tile in range(first_half) for row in (0, 1)]
        past = range(num_tiles - first_half)
        rows += [(first_half + number // 2, number % 2) for number in past]
        assert sorted(rows) == [(t, r) for t in range(tiles) for r in (0, 1)], (seed, tiles, blocks)
        before, after = (
            rounds(tiles, blocks, *numbers) for numbers in ((tiles, tiles), (first_half, num_tiles))
        )
        assert after <= before, (seed, tiles, blocks)
        halved += after < before
    assert halved > 5, seed


@pytest.mark.parametrize(
    ("tiles", "expected"),
    [
        (2304, (2244, 2364)),  # (1,384,384,4,32): 17 rounds and 60 tiles
        (1024, (1024, 1024)),  # 256: 100 tiles in the last round
        (20, (0, 40)),
        (132, (132, 132)),
    ],
)
def test_of_132_blocks(tiles, expected, half_tiles):
    assert half_tiles(tiles, 132) == expected
