"""What Hopper's backward would run (sm90/backward/plan.h), compiled for the host: no GPU needed."""

import random
import re
import subprocess
from types import SimpleNamespace as Namespace

import pytest
import torch

from deepspeed4science.backends.sm90 import Sm90Backend
from op_builder.ops.instantiations import FAMILIES
from tests.system.host_programs import built

DEFAULTS = {"B": 1, "H": 4, "D": 32, "dq": 1, "dk": 1, "dv": 1, "bias2": 1, "dbias2": 1}
OFFSETS = (
    *("delta", "counters", "dq_range", "accumulators", "key_mask", "row_lists", "bias1"),
    *(
        "dbias1_parts",
        "bias2",
        "padded_dbias2",
        "part_exponents",
        "dbias2_parts",
        "postprocess_flag",
        "delta_progress",
    ),
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """plan(N=..., Lq=..., ...) -> {name: value or offset}"""
    path = built(tmp_path_factory.mktemp("host"), "sm90_backward_plan")

    def run(**call):
        words = [f"{name}={int(value)}" for name, value in (DEFAULTS | call).items()]
        text = subprocess.check_output([str(path), *words], text=True)
        return dict(re.split("[=@]", word) for word in text.split())

    return run


LONE_ROW = {"N": 1, "Lq": 768, "Lk": 768, "H": 16}


def square(L, **more):
    return {"N": L, "Lq": L, "Lk": L, **more}


# What one call runs; names that a plan leaves out are None.
@pytest.mark.parametrize(
    ("call", "dkdv", "dq", "dbias2"),
    [
        # Two rows n together, where dbias2's rows begin at multiples of 16 bytes
        (square(128), "narrow_paired", None, "added_with_dkdv"),
        (square(192), "narrow_paired", None, "added_with_dkdv"),
        (square(384), "narrow_paired", None, "added_with_dkdv"),
        (square(512, bias1=1), "narrow_paired", None, "added_with_dkdv"),
        ({"N": 65, "Lq": 200, "Lk": 384}, "narrow_paired", None, "added_with_dkdv"),
        ({"N": 3, "Lq": 384, "Lk": 384, "H": 44}, "fused", None, "paired_dbias2"),
        ({"N": 4, "Lq": 384, "Lk": 384, "H": 33}, "narrow_paired", None, "added_with_dkdv"),
        (square(384, deterministic=1), "fused", None, "paired_dbias2"),
        (square(384, clusters=0), "fused", None, "single_dbias2"),
        (square(516), "long_paired", None, "added_with_dkdv"),
        (square(768), "long_paired", None, "added_with_dkdv"),
        (square(768, clusters=0), "long_fused", None, "single_dbias2"),
        ({"N": 256, "Lq": 516, "Lk": 576}, "long_paired", None, "added_with_dkdv"),
        (square(389, dbias2=0, rounded_dbias2=1), "narrow_paired", None, "added_with_dkdv"),
        (square(767, dbias2=0, rounded_dbias2=1), "long_paired", None, "added_with_dkdv"),
        # dbias2 in float32, whose rows begin anywhere
        (square(389), "narrow_fused", None, "single_dbias2"),
        ({"N": 384, "Lq": 384, "Lk": 386}, "narrow_fused", None, "square_dbias2"),
        # Two tiles of keys a round, where these are less than one and a half times as many rounds
        (square(65), "narrow_fused", None, "square_dbias2"),
        (square(129), "fused", None, "single_dbias2"),
        (square(193), "narrow_fused", None, "square_dbias2"),
        (square(257), "fused", None, "single_dbias2"),
        (square(385), "narrow_fused", None, "single_dbias2"),
        (square(511), "narrow_fused", None, "square_dbias2"),
        ({"N": 256, "Lq": 512, "Lk": 574}, "fused", None, "paired_dbias2"),
        ({"N": 256, "Lq": 512, "Lk": 202}, "narrow_fused", None, "square_dbias2"),
        ({"N": 256, "Lq": 513, "Lk": 202}, "long_fused", None, "square_dbias2"),
        (square(256, D=48), "fused", None, "paired_dbias2"),
        (square(256, no_fused=1), "keys", "queries", "square_dbias2"),
        (square(766), "long_fused", None, "paired_dbias2"),
        # The queries in parts
        (square(772), "parts_paired", None, "added_with_dkdv"),
        (square(4096), "parts_paired", None, "added_with_dkdv"),
        (square(1023, dbias2=0, rounded_dbias2=1, H=1), "parts_paired", None, "added_with_dkdv"),
        # or divided among the blocks of a cluster
        (square(1534), "split_fused", None, "paired_dbias2"),
        (square(1600, deterministic=1), "triple_fused", None, "paired_dbias2"),
        (square(2303), "triple_fused", None, "paired_dbias2"),
        (square(2305), "quad_fused", None, "paired_dbias2"),
        (square(3072, deterministic=1), "quad_fused", None, "paired_dbias2"),
        (square(3073), "keys", "queries", "paired_dbias2"),
        (square(2048, clusters=0), "keys", "queries", "single_dbias2"),
        ({"N": 8, "Lq": 2048, "Lk": 2048, "H": 2}, "keys", "queries", "paired_dbias2"),
        ({**LONE_ROW, "dbias2": 0}, "cluster_fused", None, None),
        (
            {**LONE_ROW, "dbias2": 0, "rounded_dbias2": 1, "row_mask": 1, "bias1": 1},
            *("cluster_fused", None, "rounded_with_dkdv"),
        ),
        ({**LONE_ROW, "Lq": 769, "dbias2": 0}, "few_keys", "few_queries", None),
        ({**LONE_ROW, "Lk": 128, "dbias2": 0}, "keys", "few_queries", None),
        ({**LONE_ROW, "Lk": 1024, "dbias2": 0}, "cluster_fused", None, None),
        ({**LONE_ROW, "Lk": 1025, "dbias2": 0}, "few_keys", "few_queries", None),
        ({**LONE_ROW, "dbias2": 0, "clusters": 0}, "few_keys", "few_queries", None),
        (square(1536, clusters=0), "keys", "queries", "single_dbias2"),
        (square(384, no_fused=1), "keys", "queries", "paired_dbias2"),
        (square(384, dq=0), "keys", None, "paired_dbias2"),
        (square(384, dk=0, dv=0), None, "queries", "paired_dbias2"),
        (square(384, dbias2=0), "fused", None, None),
        (square(384, dq=0, dk=0, dv=0), None, None, "paired_dbias2"),
        (square(384, bias2=0, dbias2=0), "fused", None, None),
        (square(1536, bias1=1, dbias1=1, deterministic=1), "keys", "queries", "paired_dbias2"),
        (square(1536, bias1=1, deterministic=1), "split_fused", None, "paired_dbias2"),
        ({"N": 1, "Lq": 768, "Lk": 768, "H": 16}, "few_keys", "few_queries", "stored_with_dq"),
        (
            {"N": 1, "Lq": 768, "Lk": 768, "H": 16, "row_mask": 1},
            *("few_keys", "few_queries", "stored_with_dq"),
        ),
        ({"N": 1, "Lq": 768, "Lk": 768, "dq": 0}, "keys", None, "paired_dbias2"),
        (
            {"N": 48, "Lq": 384, "Lk": 384, "H": 16, "D": 48},
            *("fused", None, "single_dbias2"),
        ),
        (
            {"N": 48, "Lq": 768, "Lk": 768, "H": 16, "D": 48},
            *("dq_global_paired", None, "added_with_dkdv"),
        ),
        (
            {"N": 48, "Lq": 768, "Lk": 766, "H": 16, "D": 48},
            *("dq_global", None, "paired_dbias2"),
        ),
        (
            {"N": 64, "Lq": 768, "Lk": 768, "H": 8, "D": 64},
            *("dq_global_paired", None, "added_with_dkdv"),
        ),
        (
            {"N": 48, "Lq": 768, "Lk": 768, "H": 16, "D": 48, "deterministic": 1},
            *("split_fused", None, "paired_dbias2"),
        ),
        (  # accumulators of whole (b, n, h) would raise peak memory, those of sections do not
            {"N": 256, "Lq": 1024, "Lk": 1024, "D": 64},
            *("dq_global_paired", None, "added_with_dkdv"),
        ),
        (  # those, too
            {"N": 400, "Lq": 1024, "Lk": 1024, "D": 64},
            *("dq_global", None, "paired_dbias2"),
        ),
        (
            {"N": 64, "Lq": 1024, "Lk": 1024, "H": 8, "D": 128},
            *("dq_global", None, "added_with_dkdv"),
        ),
        (
            {"N": 64, "Lq": 1024, "Lk": 1022, "H": 8, "D": 128},
            *("dq_global", None, "paired_dbias2"),
        ),
        (
            {"N": 64, "Lq": 1024, "Lk": 1024, "H": 8, "D": 128, "deterministic": 1},
            *("keys", "queries", "paired_dbias2"),
        ),
    ],
)
def test_kernels_of(call, dkdv, dq, dbias2, plan):
    found = plan(**call)
    assert [found.get(name) for name in ("dkdv", "dq", "dbias2")] == [dkdv, dq, dbias2], found


def test_where_visible_keys_are_found(plan):
    """Beside delta, but in front of it where that kernel lists the rows n that see them."""
    one_row = {"N": 1, "Lq": 768, "Lk": 768, "H": 16}
    assert plan(**one_row, bias1=1)["visible_keys"] == "found_in_preprocess"
    assert plan(**one_row, row_mask=1)["visible_keys"] == "found_in_preprocess"
    assert "visible_keys" not in plan(**one_row)
    assert "visible_keys" not in plan(**square(1022, bias1=1))
    assert plan(**square(384, bias1=1))["visible_keys"] == "found_in_preprocess"
    assert plan(**square(384, bias1=1, dbias2=0))["visible_keys"] == "found_in_preprocess"


def test_blocks_that_begin_beside_find_visible_keys(plan):
    """As many as are resident at once, and none where that kernel does not run: the kernel in front
    may then be the caller's, for whose end all blocks wait.
    """
    assert plan(**square(1022, bias1=1))["early_preprocess_blocks"] == str(7 * 132)
    assert plan(**square(1022, row_mask=1, blocks=114))["early_preprocess_blocks"] == str(7 * 114)
    assert "early_preprocess_blocks" not in plan(**square(1022))
    assert "early_preprocess_blocks" not in plan(**square(384, bias1=1, dbias2=0))


def test_where_delta_is_computed_with_dq(plan):
    """Up to 512 queries, or 768 in pairs of rows n."""
    for one in (
        *(square(256), square(512), square(768), square(512, deterministic=1)),
        *(square(384, dbias2=0), square(384, deterministic=1)),
    ):
        assert plan(**one)["computes_delta"] == "with_dq", one
    for other in (
        square(772),
        square(513, deterministic=1),
        square(384, no_fused=1),
        square(384, dq=0),
        {**LONE_ROW, "dbias2": 0},
        {"N": 48, "Lq": 384, "Lk": 384, "H": 16, "D": 48},
    ):
        found = plan(**other)
        assert "computes_delta" not in found and "delta_progress" not in found, other


def test_memory_of_delta(plan):
    """For kernel_dbias2, which waits for all of it; or for two (b, n, h) of each block; or none."""

    def size(**call):
        found = plan(**call)
        if "delta" not in found:
            return 0
        begin = int(found["delta"])
        ends = (int(found[name]) for name in (*OFFSETS, "workspace_bytes") if name in found)
        return min(end for end in ends if end > begin) - begin

    whole = 4 * 384 * 4 * 384
    for waits in (square(384, deterministic=1), square(384, clusters=0)):
        assert size(**waits) == whole and "delta_progress" in plan(**waits), waits
    for alone in (square(384), square(384, dbias2=0), square(384, deterministic=1, dbias2=0)):
        assert size(**alone) == 0 and "delta_progress" not in plan(**alone), alone
    assert plan(**square(384, dq=0))["dkdv"] == "keys" and size(**square(384, dq=0)) == whole
    assert size(**square(768)) == 4 * 768 * 2 * 132
    assert size(**square(768, clusters=57)) == 4 * 768 * 2 * 114
    few = {"N": 47, "Lq": 640, "Lk": 640, "H": 4}  # 192 (b, n, h) in pairs: not two for each block
    assert plan(**few)["dkdv"] == "long_paired" and size(**few) == 4 * 640 * 192


def test_parts_of_the_queries(plan):
    """As few as fit into shared memory."""
    assert "query_parts" not in plan(**square(768))
    for Lq, parts in ((772, "2"), (1536, "2"), (1540, "3"), (10_000, "14")):
        found = plan(N=100, Lq=Lq, Lk=512)
        assert found["query_parts"] == parts and "part_exponents" in found
        found = plan(N=100, Lq=Lq, Lk=512, deterministic=1)
        assert "query_parts" not in found and "part_exponents" not in found


def test_order_of_tiles(plan):
    """Heads are outside in large clusters, and in parts whose bias2 and its sums fill the L2 cache:
    24 MiB, at 6 bytes a score.
    """
    for large in (square(2305), {**LONE_ROW, "dbias2": 0}, {"N": 64, "Lq": 1028, "Lk": 1024}):
        assert plan(**large)["heads"] == "outside", large
    for other in (square(1534), square(768, H=12), {"N": 64, "Lq": 1024, "Lk": 1024}):
        assert "heads" not in plan(**other), other


def test_when_dbias2_has_its_turn(plan):
    """After a kernel that computes its delta, or that adds dq up in its memory; else it begins."""
    wide = {"N": 64, "Lq": 1024, "Lk": 1022, "H": 8, "D": 128}
    for last in (square(384, deterministic=1), square(2305), wide):
        assert plan(**last)["dbias2_runs"] == "last", last
    for first in (square(766), square(1534), square(384, dq=0)):
        found = plan(**first)
        assert found["dbias2"].endswith("_dbias2") and "dbias2_runs" not in found, first


def test_slices(plan):
    """The device chooses them where it knows more than the host: what masks leave visible."""
    assert plan(**square(384, dq=0))["slices"] == "8"
    assert plan(**square(766))["slices"] == "2"
    assert plan(**square(1534))["slices"] == "16"
    assert plan(**square(384, bias1=1, dq=0))["most_slices"] == "16"
    assert plan(**square(40, bias1=1))["most_slices"] == "5"
    assert plan(**square(384, bias1=1, deterministic=1))["slices"] == "11"
    wide = plan(N=400, Lq=1024, Lk=1024, D=64, bias1=1)
    assert (wide["dkdv"], wide["most_slices"]) == ("dq_global", "16")


def test_where_clusters_divide_rows_of_equal_tiles(plan):
    """Not of many tiles, nor in a fixed order, nor of square tiles, nor in clusters of four."""
    assert plan(**square(384, dq=0))["equal_tiles"] == "partitioned"
    assert plan(**square(766, bias1=1))["equal_tiles"] == "partitioned"
    for other in (
        square(1534, bias1=1),
        square(384, deterministic=1),
        square(256, bias1=1, dq=0),
        square(2046, bias1=1),
    ):
        assert "equal_tiles" not in plan(**other), other


def test_pieces_of_the_workspace_are_apart(plan):
    """Offsets on 256 bytes; each piece ends before the next one, the last one within the whole."""
    seed = random.randrange(2**31)
    pick = random.Random(seed)
    seen = set()
    for step in range(200):
        call = {"B": pick.choice((1, 2)), "N": pick.randint(1, 100), "H": pick.randint(1, 16)}
        call |= {"Lq": pick.randint(1, 1700), "Lk": pick.randint(1, 1700)}
        call["D"] = pick.choice((8, 32, 48, 64, 128))
        names = ("bias1", "bias1_gap", "row_mask", "odd_bias2", "deterministic", "dbias1", "dbias2")
        for name in (*names, "dq"):
            call[name] = pick.random() < 0.5
        call["rounded_dbias2"] = not call["dbias2"]
        call["dbias1"] &= call["bias1"]
        if step == 0:
            call = {"B": 1, "N": 64, "Lq": 1024, "Lk": 1024, "H": 8, "D": 128}
        if step == 1:
            call = {"B": 1, "H": 4, "D": 32, **square(384)}
        if step == 2:
            call = {"B": 1, "H": 4, "D": 32, "dbias2": 0, "rounded_dbias2": 1, **square(389)}
        if step == 3:
            call = {"B": 1, "H": 4, "D": 32, **square(1028)}
        if step == 4:
            call = {"B": 1, "N": 1, "Lq": 70, "Lk": 70, "H": 1, "D": 128}
        if step == 5:  # 63 rows n and their number fill 256 bytes
            call = {"B": 1, "H": 4, "D": 32, "N": 63, "Lq": 70, "Lk": 70, "bias1": 1}
        found = plan(**call)
        rows, size = call["B"] * call["N"] * call["H"], int(found["workspace_bytes"])
        matrix_rows = call["B"] * call["H"] * call["Lq"]
        matrix = matrix_rows * call["Lk"]
        in_turn = found.get("dkdv") == "long_paired"
        deltas = min(rows + call["N"] % 2 * call["B"] * call["H"], 264) if in_turn else rows
        sections = int(found.get("dq_sections", 1))
        in_section = -(-call["Lq"] // sections) * -(-call["D"] // 64) * 64
        words = -(-call["Lk"] // 512)
        has_bias1 = call.get("bias1", 0)
        maxima = 3 * -(-call["Lq"] // (32 if call["D"] <= 64 else 16))
        least = {
            "delta": 4 * deltas * call["Lq"],
            "counters": 8 * rows * sections + 12 + 4 * int(found.get("later_delta", 0)),
            "dq_range": 4 * rows * (maxima + -(-call["Lk"] // 128) + 2),
            "accumulators": 2 * int(found.get("dq_accumulators", 0)) * in_section,
            "key_mask": (12 + 4 * words + 4 * has_bias1) * call["B"] * call["N"] + 4,
            "row_lists": 4 * call["B"] * -(-call["Lk"] // 192) * (call["N"] + 1) + 4,
            "dbias1_parts": 4 * rows * call["Lk"],
            "bias1": 2 * call["B"] * call["N"] * call["Lk"],
            "bias2": 2 * (matrix + matrix_rows * (-call["Lk"] % 8)),
            "padded_dbias2": 4 * (matrix + matrix_rows * (-call["Lk"] % 4)),
            "delta_progress": 4,
            "part_exponents": 132 * -(-call["Lk"] // 64) * 4 * 2,
            "dbias2_parts": 4 * matrix * int(found.get("slices", 1)),
        }
        pieces = sorted((int(found[name]), name) for name in OFFSETS if name in found)
        ends = [offset for offset, _ in pieces[1:]] + [size]
        for (offset, name), end in zip(pieces, ends, strict=True):
            assert offset % 256 == 0, (seed, call, found)
            assert end - offset >= least.get(name, 1), (seed, call, found, name)
        is_masked = call.get("bias1", 0) or call.get("row_mask", 0)
        in_parts = int(found.get("slices", 1)) > 1
        is_paired = found.get("dkdv", "").endswith("_paired")
        is_in_shared = "computes_delta" in found and "delta_progress" not in found and not in_turn
        needed = {
            "delta": "dq_sections" not in found and not is_in_shared,
            "padded_dbias2": is_paired and not call.get("dbias2", 1),
            "key_mask": is_masked,
            "bias1": has_bias1 and call.get("bias1_gap", 0),
            "dbias1_parts": call.get("dbias1", 0) and call.get("deterministic", 0),
            "dbias2_parts": in_parts and call.get("deterministic", 0),
        }
        for name, wanted in needed.items():
            assert (name in found) == bool(wanted), (seed, call, found, name)
        seen |= {name for _, name in pieces}
    assert seen == set(OFFSETS), seed


def test_rounded_dbias2_of_one_row(plan):
    """The backend, which allocates what is written, says of all calls what the plan does."""
    seed = random.randrange(2**31)
    pick = random.Random(seed)
    backend = Sm90Backend(FAMILIES["sm90"])
    answers = set()
    for number in range(150):
        p = Namespace(B=1, N=1, D=pick.choice((24, 32, 48)), H=pick.randint(1, 16))
        p.Lq, p.Lk, p.Dv = pick.randint(700, 800), pick.choice((8, 7)) * pick.randint(20, 220), p.D
        if number == 0:  # the rarer answer
            p = Namespace(B=1, N=1, D=32, H=16, Lq=768, Lk=768, Dv=32)
        found = plan(**(vars(p) | {"dbias2": 0, "rounded_dbias2": 1}))
        expected = found.get("dbias2") == "rounded_with_dkdv"
        answers.add(expected)
        p.dtype = torch.bfloat16
        assert backend.rounds_dbias2(p) == expected, (seed, p, found)
    assert answers == {True, False}, seed


def test_delta_is_in_dq_where_accumulators_need_its_memory(plan):
    whole, sections = (plan(N=n, Lq=1024, Lk=1024, D=64) for n in (64, 256))
    assert whole["dkdv"] == sections["dkdv"] == "dq_global_paired"
    assert "delta" in whole and "dq_sections" not in whole
    assert "delta" not in sections and sections["dq_sections"] == "4"
    most, more = (plan(N=n, Lq=1024, Lk=1024, D=64)["dkdv"] for n in (382, 383))
    assert (most, more) == ("dq_global_paired", "dq_global")  # docs/kernels/sm90.md


def test_delta_beside_the_kernel_that_needs_it(plan):
    """Of all (b, n, h) but those of three waves of 132 tiles, where O and dO of them have 32 MiB or
    more, tiles are taken from a counter, and dq's sums are float16.
    """
    wide = {"N": 64, "Lq": 1024, "Lk": 1024, "H": 8, "D": 128}
    assert plan(**wide)["later_delta"] == str(64 * 8 - 50)
    assert plan(**wide | {"N": 42, "H": 3, "Lk": 2048})["later_delta"] == str(42 * 3 - 25)
    for others in (
        {"N": 14},
        {"D": 64},
        {"float16": 1},
        {"deterministic": 1},
        {"N": 160},  # no room for accumulators but in the memory of dbias2
        {"dk": 0},
        {"Lk": 4100, "H": 1},
    ):
        assert "later_delta" not in plan(**wide | others), others


def test_what_adds_dbias2_needs_16_bytes_and_all_gradients(plan):
    assert plan(**square(384))["dkdv"].endswith("_paired")
    assert not plan(**square(384), odd_dbias2=1)["dkdv"].endswith("_paired")
    wide = {"N": 64, "Lq": 1024, "Lk": 1024, "D": 64}
    for name in ("dk", "dv"):
        assert not plan(**wide, **{name: 0})["dkdv"].startswith("dq_global")


def test_float16_operands_have_no_range_of_dq(plan):
    """Their dq is added up in float32, whose accumulators are twice as large."""
    call = {"N": 64, "H": 8, "Lq": 1024, "Lk": 1024, "D": 128}
    of_half, of_float = plan(**call), plan(**call, float16=1)
    assert of_half["dkdv"] == of_float["dkdv"] == "dq_global"
    assert "dq_range" in of_half and "dq_range" not in of_float
    assert int(of_float["dq_accumulators"]) * 2 <= int(of_half["dq_accumulators"]) + 2


def test_padded_rows_of_dbias2(plan):
    """Kernels for pairs of rows n take them; those that run otherwise refuse them."""
    seed = random.randrange(2**31)
    pick = random.Random(seed)
    answers = set()
    for number in range(300):
        call = {
            "N": pick.randint(1, 800),
            "H": pick.randint(1, 60),
            "D": pick.choice((8, 32, 64, 128)),
        }
        call |= {"Lq": pick.randint(20, 1600), "Lk": pick.randint(20, 1600)}
        call["deterministic"] = int(pick.random() < 0.2)
        if number == 0:
            call = {"N": 1369, "H": 4, "D": 32, "Lq": 1369, "Lk": 1369}
        padded = -(-call["Lk"] // 4) * 4
        found = plan(**call, dbias2_stride=padded)
        in_pairs = found["dkdv"].endswith("_paired")
        assert ("refused" in found) == (padded != call["Lk"] and not in_pairs), (seed, call, found)
        if number == 0:
            assert found["dkdv"] == "parts_paired"
        if padded != call["Lk"]:
            answers.add(in_pairs)
            assert not plan(**call)["dkdv"].endswith("_paired"), (seed, call)
    assert answers == {True, False}, seed
