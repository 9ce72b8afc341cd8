"""The demo's checks: right results pass, and every well-known wrong implementation fails."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from deepspeed4science.demo.alignment import load_ubiquitin  # noqa: E402
from deepspeed4science.demo.checks import check, relative_error  # noqa: E402
from deepspeed4science.demo.embedding import attention_cases, embed  # noqa: E402
from deepspeed4science.demo.measure import Timing, peak_extra_bytes, time_interleaved  # noqa: E402
from deepspeed4science.demo.picture import query_attention  # noqa: E402
from deepspeed4science.reference import evoformer_attention  # noqa: E402

CPU = torch.device("cpu")


def eager(q, k, v, biases):
    return evoformer_attention(q, k, v, *biases)


def scaled_wrongly(q, k, v, biases):
    return eager(1.5 * q, k, v, biases)


def without_bias2(q, k, v, biases):
    return eager(q, k, v, [biases[0], biases[1] * 0])


def with_bias2_transposed(q, k, v, biases):
    return eager(q, k, v, [biases[0], biases[1].transpose(-1, -2)])


class _HalveGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


def with_dbias2_halved(q, k, v, biases):
    return eager(q, k, v, [biases[0], _HalveGradient.apply(biases[1])])


def with_dbias1_halved(q, k, v, biases):
    return eager(q, k, v, [_HalveGradient.apply(biases[0]), biases[1]])


@pytest.fixture(scope="module")
def cases():
    return list(attention_cases(embed(load_ubiquitin()), dtype=torch.float32, device=CPU))


def test_four_attentions_with_the_documented_shapes(cases):
    assert [case.name for case in cases] == [
        "MSA row",
        "MSA column",
        "Triangle, starting node",
        "Triangle, ending node",
    ]
    for case in cases:
        batch, rows, length, heads, _ = case.q.shape
        assert case.bias1.shape == (batch, rows, 1, 1, length)
        if case.name != "MSA column":
            assert case.bias2.shape == (batch, 1, heads, length, length)


def test_embedding_is_the_same_every_time():
    """Fixed weights: two people see the same picture."""
    one, two = (embed(load_ubiquitin()) for _ in range(2))
    assert torch.equal(one.msa, two.msa)
    assert torch.equal(one.pair, two.pair)


def test_gaps_are_masked(cases):
    masked = cases[0].bias1 < -1e8
    letters = [r.columns for r in load_ubiquitin().records]
    assert masked.sum().item() == sum(row.count("-") for row in letters)


def test_the_definition_keeps_the_law(cases):
    assert all(verdict.ok for verdict in check(eager, eager, cases[0]))


@pytest.mark.parametrize(
    ("wrong", "tensors"),
    [
        (scaled_wrongly, {"O", "dQ", "dK", "dV", "dbias1", "dbias2"}),
        (without_bias2, {"O", "dQ", "dK", "dV", "dbias1", "dbias2"}),
        (with_bias2_transposed, {"O", "dQ", "dK", "dV", "dbias1", "dbias2"}),
        (with_dbias2_halved, {"dbias2"}),
        (with_dbias1_halved, {"dbias1"}),
    ],
)
def test_wrong_implementations_break_the_law(cases, wrong, tensors):
    """Published suites of this op pass with dbias halved; this one must not."""
    verdicts = check(wrong, eager, cases[0])
    assert {verdict.tensor for verdict in verdicts if not verdict.ok} == tensors


def test_nan_where_the_reference_has_none_is_infinitely_wrong():
    ref = torch.ones(4)
    assert relative_error(torch.tensor([1.0, 1.0, float("nan"), 1.0]), ref) == float("inf")
    assert relative_error(torch.tensor([1.0, 1.0, float("inf"), 1.0]), ref) == float("inf")
    assert relative_error(ref, ref) == 0.0


def test_attention_read_through_the_op_is_the_softmax(cases):
    """O = P V with the identity for V gives P."""
    case = cases[0]
    attention = query_attention(eager, case)
    scores = torch.einsum("qhd,khd->hqk", case.q[0, 0], case.k[0, 0]) / case.q.shape[-1] ** 0.5
    expected = (scores + case.bias1[0, 0] + case.bias2[0, 0]).softmax(-1).mean(0)
    torch.testing.assert_close(attention, expected.detach(), atol=1e-6, rtol=1e-5)


def test_memory_of_a_call_is_seen():
    """64 MiB that a call allocates, touches and frees again show in its peak."""
    size = 64 * 2**20
    peak = peak_extra_bytes(lambda: torch.ones(size, dtype=torch.uint8), CPU)
    if peak is None:
        pytest.skip("this system does not let a process reset its peak of resident memory")
    assert 0.9 * size < peak < 1.5 * size


@pytest.mark.parametrize("counted", ["requested", "allocated"])
def test_memory_of_a_call_on_a_gpu(monkeypatch, counted):
    """What was asked for, or, of an allocator that does not count that, its blocks."""
    stats = {}

    def use(**bytes_used):
        for when, size in bytes_used.items():
            stats[f"requested_bytes.all.{when}"] = 0
            stats[f"allocated_bytes.all.{when}"] = 3 * size  # blocks are larger than asked for
            stats[f"{counted}_bytes.all.{when}"] = size

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    use(current=1_000, peak=50_000)
    peak = peak_extra_bytes(lambda: use(current=1_000, peak=8_000), torch.device("cuda"))
    assert peak == 7_000


def test_timing_orders_its_samples():
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing.p20_ms, timing.median_ms, timing.p80_ms) == (2.0, 3.0, 4.0)
    calls = {"a": lambda: None, "b": lambda: None}
    assert set(time_interleaved(calls, CPU, num_runs=3, num_warmups=1)) == {"a", "b"}


def test_picture_is_a_png_in_two_sizes(tmp_path, cases):
    image = pytest.importorskip("PIL.Image", reason="Pillow is an optional extra")
    from deepspeed4science.demo.picture import LARGE, UBIQUITIN_STRUCTURE, draw_attention

    path = tmp_path / "new folder" / "map.png"
    query = load_ubiquitin().query.columns
    attention = torch.rand(len(query), len(query))
    paths = draw_attention(
        attention, query, path, title="t", subtitle="s", structure=UBIQUITIN_STRUCTURE
    )
    assert paths == (path, tmp_path / "new folder" / "map_large.png")
    small, large = (image.open(p) for p in paths)
    assert small.format == large.format == "PNG"
    assert large.size == tuple(LARGE * side for side in small.size)


def test_the_table_has_a_row_for_each_attention_and_device(cases, capsys, monkeypatch):
    """What breaks the law is said in its row and named at the end."""
    from deepspeed4science.demo import cli

    monkeypatch.setattr(cli, "op", lambda q, k, v, biases: scaled_wrongly(q, k, v, [*biases]))
    verdicts = cli._show_table({CPU: cases[:1], torch.device("meta"): cases[:1]}, "float32")
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[0] for row in rows if "1, 32, 76" in row] == [
        "MSA row, cpu",
        "MSA row, meta",
    ]
    assert sum("BROKEN" in row for row in rows) == 2
    assert cli._conclude(verdicts) == 1
    assert "MSA row, cpu: not O, dQ" in capsys.readouterr().out


def test_gpu_figures_stand_beside_the_cpus_where_there_is_one(capsys, monkeypatch):
    from deepspeed4science.demo import cli

    monkeypatch.setattr(cli, "_best_device", lambda: "cuda")
    assert [d.type for d in cli._devices("auto", beside=True)] == ["cpu", "cuda"]
    assert [d.type for d in cli._devices("auto", beside=False)] == ["cuda"]
    assert [d.type for d in cli._devices("cpu", beside=False)] == ["cpu"]
    monkeypatch.setattr(cli, "_best_device", lambda: "cpu")
    assert [d.type for d in cli._devices("auto", beside=True)] == ["cpu"]
    assert "no GPU" in capsys.readouterr().out


def test_a_gpu_that_pytorch_has_no_kernels_for_is_not_used(capsys, monkeypatch):
    """One older than PyTorch's build, which still counts as available; or one that is full."""
    from deepspeed4science.demo import cli

    def fail(*size, **options):
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", fail)
    assert cli._best_device() == "cpu"
    told = "The GPU is not used: CUDA error: no kernel image is available\n"
    assert capsys.readouterr().out == told
