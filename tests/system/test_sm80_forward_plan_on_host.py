"""What a forward of the Sm80 family runs with (sm80/forward/plan.h), on the host: no GPU needed."""

import subprocess

import pytest

from tests.system.host_programs import built


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """plan(N=3, Lq=70, ...) -> {name: value}"""
    path = built(tmp_path_factory.mktemp("host"), "sm80_forward_plan")

    def run(**call):
        words = [f"{name}={value}" for name, value in call.items()]
        text = subprocess.check_output([str(path), *words], text=True)
        return dict(word.replace("@", "=").split("=") for word in text.split())

    return run


def test_neighbouring_rows_share_bias2(plan):
    """Blocks of 16 n side by side: N is filled up to a multiple."""
    many, few = plan(N=70, Lq=100, Lk=64), plan(N=63, Lq=100, Lk=64)
    assert (many["rows_side_by_side"], many["blocks"]) == ("16", str(2 * 4 * 80))
    assert (few["rows_side_by_side"], few["blocks"]) == ("1", str(2 * 4 * 63))
    assert plan(N=70, Lq=100, Lk=64, bias2=0)["rows_side_by_side"] == "1"
    batches = plan(B=2, N=35, Lq=100, Lk=64)
    assert batches["rows_side_by_side"] == "16" and batches["blocks"] == many["blocks"]


def test_bias1_of_one_key_has_no_gaps(plan):
    assert "bias1" in plan(N=3, Lq=70, Lk=2, gap=2)
    assert "bias1" not in plan(N=3, Lq=70, Lk=1, gap=2)


def test_what_needs_no_copy(plan):
    assert plan(N=3, Lq=70, Lk=64, bias1=0) == {
        "blocks": "24",
        "tile": "64x32",
        "rows_side_by_side": "1",
        "workspace_bytes": "0",
    }


@pytest.mark.parametrize("call", [{"row": 90}, {"Lk": 90}, {"odd": 1}], ids=str)
def test_bias2_is_copied_where_rows_are_off_16_bytes(call, plan):
    """Rows of 96 elements, one slice of each head."""
    of = plan(**{"N": 3, "Lq": 70, "Lk": 88, "bias1": 0} | call)
    assert of["bias2"] == "0"
    assert int(of["workspace_bytes"]) == -(-4 * 70 * 96 * 2 // 256) * 256


def test_of_a_bias2_that_repeats_one_slice_is_copied(plan):
    of = plan(N=3, Lq=70, Lk=90, bias1=0, repeats=1)
    assert int(of["workspace_bytes"]) == -(-70 * 96 * 2 // 256) * 256


TILED = {"N": 320, "Lq": 320, "Lk": 320, "D": 32, "bias1": 0, "tiles": 1}


def test_bias2_is_copied_into_tiles_where_that_pays(plan):
    """Where the call is long, and the copy a fiftieth of Q, K, V and O at most: N >= 12.5 Lk / D
    here. Whole tiles of 32 x 32, and one more, which kernels read past the end.
    """
    of = plan(**TILED)
    assert of["bias2_copy"] == "tiles" and of["bias2"] == "0"
    assert int(of["workspace_bytes"]) == (4 * 10 * 10 + 1) * 32 * 32 * 2
    for call in ({"tiles": 0}, {"bias2": 0}, {"N": 81}, {"N": 200, "D": 16}):
        assert plan(**TILED | call)["workspace_bytes"] == "0", call
    least = TILED | {"Lq": 128, "Lk": 128}
    assert "bias2_copy" in plan(**least | {"N": 512})
    assert "bias2_copy" not in plan(**least | {"N": 511})


def test_a_copy_that_is_needed_consists_of_tiles(plan):
    """Whatever the length of the call; past the ends are zeros."""
    for call in ({"Lk": 90}, {"odd": 1}, {"row": 90}):
        of = plan(**{"N": 3, "Lq": 70, "Lk": 88, "bias1": 0, "tiles": 1} | call)
        assert of["bias2_copy"] == "tiles"
        assert int(of["workspace_bytes"]) == (4 * 3 * 3 + 1) * 32 * 32 * 2
    assert plan(N=3, Lq=70, Lk=88, bias1=0, tiles=1)["workspace_bytes"] == "0"


def test_rows_too_far_apart_for_32_bits_are_copied(plan):
    """Offsets within 32 rows are counted in 16-byte vectors."""
    call = {"N": 3, "Lq": 70, "Lk": 88, "bias1": 0, "tiles": 1}
    assert "bias2" not in plan(**call, row=2**30 - 8)
    assert "bias2" in plan(**call, row=2**30)


def test_pieces_lie_one_behind_another(plan):
    """What is hidden, bias1 in rows of neighbours, bias2; each on 256 bytes."""
    of = plan(B=2, N=3, Lq=70, Lk=90, gap=2, row_mask=1)
    mask, bias1, bias2 = (int(of[name]) for name in ("key_mask", "bias1", "bias2"))
    assert mask == 0 < bias1 < bias2 < int(of["workspace_bytes"])
    assert bias1 % 256 == bias2 % 256 == 0
    assert bias2 - bias1 == -(-2 * 3 * 90 * 2 // 256) * 256
