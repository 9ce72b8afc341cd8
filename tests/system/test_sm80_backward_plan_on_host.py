"""Which kernels the older families' backward runs, and where in the workspace their pieces lie,
compiled for the host: it needs no GPU.
"""

import itertools
import random
import subprocess

import pytest

from tests.system.host_programs import built

TURING = {"fused": 0, "stages": 1, "multiprocessors": 40, "block_bytes": 65536}


def side_by_side(D):
    return 8 if D <= 32 else 16


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """plan(**numbers) -> {name: value or (rows, columns) or text}, {piece: offset}"""
    path = built(tmp_path_factory.mktemp("host"), "sm80_backward_plan", "-Wall", "-Werror")

    def run(**numbers):
        words = [str(path), *(f"{name}={int(number)}" for name, number in numbers.items())]
        said = subprocess.check_output(words, text=True).split()
        values = dict(word.split("=") for word in said if "=" in word)
        offsets = dict(word.split("@") for word in said if "@" in word)
        return values, {name: int(offset) for name, offset in offsets.items()}

    return run


def shape(B, N, L, H, D=32, Lk=None):
    return {"B": B, "N": N, "Lq": L, "Lk": Lk or L, "H": H, "D": D}


@pytest.mark.parametrize(
    ("call", "kernels", "pieces"),
    [
        # 95 accumulators of 96 KiB are as much as delta of the separate kernels.
        (
            shape(1, 768, 768, 4),
            {"fused": "768x768", "accumulators": "95", "in_dkdv": "0"},
            ["key_mask", "progress", "own_accumulators"],
        ),
        # Delta's room is 47 of 48 KiB. Eight rows n of dk and of dv hold 16 each.
        (
            shape(1, 384, 384, 4),
            {"fused": "384x384", "accumulators": "140", "in_dkdv": "93", "hosts": "3x360"},
            ["key_mask", "progress", "own_accumulators"],
        ),
        # No mask: as many as are under way when nothing is hidden.
        (
            shape(1, 768, 768, 4) | {"bias1": 0},
            {"fused": "768x768", "accumulators": "52", "in_dkdv": "0"},
            ["progress", "own_accumulators"],
        ),
        # dk is a view with gaps: all are in the workspace. Rows of dbias2 are not whole tiles.
        (
            shape(1, 384, 392, 4) | {"gap": 8},
            {"fused": "448x512", "accumulators": "74", "in_dkdv": "0"},
            ["key_mask", "progress", "own_accumulators", "padded_dbias2"],
        ),
        # delta's memory holds all that are wanted, though too few for eight rows n.
        (
            shape(1, 64, 512, 9, Lk=1024) | {"multiprocessors": 14},
            {"fused": "512x1024", "accumulators": "15", "in_dkdv": "0"},
            ["key_mask", "progress", "own_accumulators"],
        ),
        # An eighth of so few rows n is less than a group of them: all are in the workspace.
        (
            shape(1, 56, 512, 4),
            {"fused": "512x512", "accumulators": "74", "in_dkdv": "0"},
            ["key_mask", "progress", "own_accumulators"],
        ),
        # delta's memory is too small for a group's accumulators: the workspace is larger.
        (
            shape(1, 128, 256, 8),
            {"fused": "256x256", "accumulators": "268", "in_dkdv": "128", "hosts": "2x112"},
            ["key_mask", "progress", "own_accumulators"],
        ),
        # The wider kernel reads the transpose of bias2, and adds to dbias2 from the start. delta's
        # memory is too small for a group's accumulators here, too.
        (
            shape(1, 256, 1024, 4, 64),
            {"fused": "1024x1024", "accumulators": "98", "in_dkdv": "33", "hosts": "1x240"},
            ["key_mask", "progress", "own_accumulators", "bias2_t"],
        ),
        (
            shape(1, 768, 768, 4) | {"deterministic": 1, "dbias1": 1},
            {"dkdv_stages": "2", "dbias2_stages": "2", "slices": "7", "dq_stages": "2"}
            | {"bias2_t": "in_dbias2"},
            ["key_mask", "delta", "dbias1_parts", "dbias2_parts"],
        ),
        (
            shape(1, 384, 384, 4) | TURING | {"bias1_step": 4},
            {"dkdv_stages": "1", "dbias2_stages": "1", "slices": "1", "dq_stages": "1"}
            | {"bias2_t": "in_dbias2"},
            ["key_mask", "delta", "bias1"],
        ),
        # Only dq: no transpose. 389 keys are not whole pieces of 16 bytes: a copy of bias2.
        (
            shape(1, 16, 389, 4) | {"dk": 0, "dv": 0, "dbias2": 0},
            {"dq_stages": "2"},
            ["key_mask", "delta", "bias2"],
        ),
        (
            shape(1, 64, 256, 4, 128),
            {"dk_stages": "2", "dv_stages": "2", "dbias2_stages": "2", "slices": "4"}
            | {"dq_stages": "2", "bias2_t": "in_dbias2"},
            ["key_mask", "softmax", "delta"],
        ),
    ],
    ids=[
        "768",
        "384",
        "no-mask",
        "gaps",
        "all-fit",
        "few-rows",
        "short-rows",
        "D64",
        "deterministic",
        "turing",
        "only-dq",
        "float",
    ],
)
def test_plan_of(call, kernels, pieces, plan):
    values, offsets = plan(**call)
    values.pop("workspace_bytes")
    assert values == kernels
    assert list(offsets) == [*pieces, "postprocess_flag"]


def test_accumulators_lie_only_in_gradients_without_gaps(plan):
    call = shape(2, 192, 384, 4)
    assert plan(**call)[0]["in_dkdv"] == "93"
    for gap in ("dv_gap", "batch_gap"):
        assert plan(**call, **{gap: 8})[0]["in_dkdv"] == "0"


def test_no_kernel_asks_for_more_shared_memory_than_there_is(plan):
    ada = {"multiprocessors": 142, "block_bytes": 99 << 10, "multiprocessor_bytes": 100 << 10}
    values, _ = plan(**shape(1, 384, 384, 4), **ada)
    assert "fused" not in values
    assert (values["dkdv_stages"], values["dbias2_stages"]) == ("2", "2")
    values, _ = plan(**shape(1, 256, 1024, 4, 64), **ada)
    assert (values["dkdv_stages"], values["dbias2_stages"]) == ("2", "1")
    two_blocks = 2 * (96392 + 1024)  # with what the system keeps of each
    for num_bytes in (two_blocks, two_blocks - 1):
        values, _ = plan(**shape(1, 384, 384, 4), multiprocessor_bytes=num_bytes)
        assert ("fused" in values) == (num_bytes == two_blocks)


def test_the_transpose_of_bias2_lies_in_dbias2_only_where_it_fits(plan):
    """Its rows are whole 16-byte pieces: of 5 floats 8, which are more than dbias2 has. In 16 bits
    it consists of tiles of 32 x 32, and four more.
    """
    for D, Lq, Lk, fits in (
        (128, 4, 64, True),
        (128, 5, 64, False),
        (32, 64, 64, True),
        (32, 64, 32, False),
        (32, 33, 33, False),
    ):
        values, offsets = plan(**shape(1, 3, Lq, 1, D, Lk=Lk), deterministic=1)
        assert ("bias2_t" in values, "bias2_t" in offsets) == (fits, not fits), (D, Lq, Lk)


@pytest.mark.parametrize(
    ("Lq", "Lk", "tiles"), [(64, 64, 4), (65, 64, 8), (64, 65, 6), (32, 1, 2)], ids=str
)
def test_the_transpose_consists_of_whole_tiles(Lq, Lk, tiles, plan):
    """For the fused kernel 64 queries wide; four more tiles are read past the end."""
    no_dbias2 = {"dbias2": 0, "bias1": 0, "deterministic": 1}
    _, offsets = plan(**shape(1, 2, Lq, 3, Lk=Lk), **no_dbias2)
    size = offsets["postprocess_flag"] - offsets["bias2_t"]
    assert size == (3 * tiles + 4) * 32 * 32 * 2


def test_long_calls_have_offsets_of_64_bits(plan):
    """The fused kernel computes some with 32."""
    for D in (32, 64):
        for longer in ({"Lq": 2**24}, {"Lk": 2**24}):
            call = shape(1, 2, 128, 1, D)
            assert "fused" in plan(**call | {name: L - 1 for name, L in longer.items()})[0]
            assert "fused" not in plan(**call | longer)[0]
    assert "fused" in plan(**shape(1, 2, 64, 2**25))[0]
    assert "fused" not in plan(**shape(1, 2, 1, 2**26))[0]  # 2^31 from a query of dq to the next


def test_bias2_with_odd_or_distant_rows_is_copied(plan):
    """Kernels that read it as it is load 16 bytes at a time and compute with strides of 32 bits."""
    call = shape(1, 2, 16, 1)
    for row, is_copied in ((16, False), (20, True), (2**29 - 8, False), (2**29, True)):
        assert ("bias2" in plan(**call, bias2_row=row)[1]) == is_copied, row
    assert "bias2" in plan(**shape(1, 2, 16, 1, Lk=12), bias2_row=16)[1]  # a row's last 8 bytes
    of_keys = {"dq": 0, "dbias2": 0, "bias2_row": 18}  # only float's statistics read bias2 itself
    for D in (32, 128):
        assert ("bias2" in plan(**shape(1, 2, 16, 1, D), **of_keys)[1]) == (D == 128), D


def test_dbias1_alone_reads_the_transpose_of_bias2(plan):
    call = shape(1, 2, 16, 1) | {"dq": 0, "dk": 0, "dv": 0, "dbias2": 0}
    for dbias1 in (0, 1):
        assert ("bias2_t" in plan(**call, dbias1=dbias1)[1]) == bool(dbias1)


def test_tiles_of_all_batches_and_heads_count_for_slices(plan):
    of_one, of_four, of_batches = (
        plan(**shape(B, 384, 384, H), deterministic=1)[0]["slices"]
        for B, H in ((1, 1), (1, 4), (4, 1))
    )
    assert of_one != of_four == of_batches


def test_keys_that_are_only_a_part_of_all_may_be_one(plan):
    """Gradients of a row n that sees one key are 0 in all; there is no list of such rows n."""
    call = shape(1, 64, 128, 4)
    whole, part = (plan(**call, partial_keys=partial)[1] for partial in (0, 1))
    assert whole["progress"] - part["progress"] == 4 * 64


def test_bias2_is_copied_once_for_all_heads_and_batches(plan):
    call = shape(3, 2, 389, 4) | {"dk": 0, "dv": 0, "dbias2": 0, "bias1": 0}
    for one, matrices in ((0, 12), (1, 1)):
        _, offsets = plan(**call, one_bias2=one)
        size = offsets["postprocess_flag"] - offsets["bias2"]
        assert size == -(-2 * 389 * 392 * matrices // 256) * 256


def test_pieces_do_not_overlap_and_accumulators_suffice(plan):
    seed = random.randrange(2**31)
    pick = random.Random(seed)
    hosted, seen = 0, set()
    for _ in range(900):
        B, N, H = pick.choice((1, 1, 2, 5)), pick.randint(1, 700), pick.randint(1, 9)
        Lq, Lk = (pick.choice((1, *[8] * 9)) * pick.randint(1, 120) for _ in range(2))
        call = shape(B, N, Lq, H, pick.choice((*[32] * 6, 64, 64, 64, 128)), Lk)
        call["bias1_step"] = pick.choice((1, 1, 2))
        for name in ("bias1", "dbias1", "deterministic", "row_mask"):
            call[name] = pick.random() < 0.5
        call["dq"], call["dbias2"] = pick.random() < 0.8, pick.random() < 0.8
        call["multiprocessors"] = pick.choice((14, 114, 132))
        values, offsets = plan(**call)
        where = (seed, call)
        end = int(values["workspace_bytes"])
        edges = [*offsets.values(), end]
        sizes = dict(zip(offsets, (b - a for a, b in itertools.pairwise(edges)), strict=True))
        assert all(size > 0 and size % 256 == 0 for size in sizes.values()), where
        assert edges[0] == 0, where
        pairs, matrix = B * N * H, B * H * Lq * Lk
        padded, key_blocks = -(-Lq // 64) * 64, -(-Lk // 128)
        is_float = call["D"] == 128
        element = 4 if is_float else 2
        least = {
            "key_mask": (12 + 4 * -(-Lk // 512) + 4 * call["bias1"]) * B * N + 4,
            "softmax": 8 * pairs * Lq,
            "delta": (8 if is_float else 4) * pairs * Lq,
            "bias1": element * B * N * Lk,
            "progress": 4 * (pairs + 1),
            "padded_dbias2": 4 * B * H * padded * key_blocks * 128,
            "dbias1_parts": 4 * pairs * Lk,
            "bias2": element * (matrix + B * H * Lq * (-Lk % (16 // element))),
            "bias2_t": element * (matrix + B * H * Lk * (-Lq % (16 // element))),
            "dbias2_parts": 4 * matrix * int(values.get("slices", 1)),
        }
        for name, size in sizes.items():
            assert size >= least.get(name, 1), (where, name)
        needed = {
            "key_mask": call["bias1"] or call["row_mask"],
            "bias1": call["bias1"] and call["bias1_step"] > 1,
            "dbias1_parts": call["dbias1"] and call["deterministic"],
            "dbias2_parts": int(values.get("slices", 1)) > 1 and call["deterministic"],
        }
        for name, wanted in needed.items():
            assert (name in sizes) == wanted, (where, name)
        seen |= set(sizes)
        if "fused" not in values:
            continue
        assert call["dq"] and not call["deterministic"], where
        size = padded * call["D"] * 4
        accumulators, in_dkdv = int(values["accumulators"]), int(values["in_dkdv"])
        under_way = -(-2 * call["multiprocessors"] // key_blocks)
        rows = side_by_side(call["D"])
        assert accumulators >= min(pairs, under_way + rows), where
        assert accumulators <= pairs, where
        own = accumulators - in_dkdv
        assert 0 <= sizes["own_accumulators"] - own * size < 256, where
        if in_dkdv:  # in an eighth of the rows n or less; a group of them has the workspace's
            hosted += 1
            groups, first_row = map(int, values["hosts"].split("x"))
            assert 8 * (B * N - first_row) <= B * N, where
            assert groups == -(-B * N // rows) - first_row // rows <= 4, where
            room = 2 * (B * N - first_row) * Lk * H * call["D"] * 2
            assert in_dkdv * size <= room, where
            if 4 * (pairs * Lq - pairs - 1) // size >= rows * H:  # no more memory than delta's
                assert own >= rows * H, where
                assert sizes["progress"] + sizes["own_accumulators"] <= 4 * pairs * Lq + 512, where
            else:  # nor more than without accumulators in dk and dv
                assert own == under_way + {32: 8, 64: 32}[call["D"]], where
    assert hosted > 5 and len(seen) == 12, seed  # hosted: about 24
