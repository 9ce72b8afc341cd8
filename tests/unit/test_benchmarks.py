"""The benchmark measures what it says: shapes have sources, peers compute the same thing, files
read back.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks import (  # noqa: E402
    cli,
    masks,
    table,
)
from benchmarks.inputs import make_inputs  # noqa: E402
from benchmarks.peers import (  # noqa: E402
    PEER_GROUPS,
    Eager,
    Ours,
    OursDeterministic,
    Peer,
    Sdpa,
    Setting,
    all_peers,
    peer_names,
)
from benchmarks.run import Options, run_workload  # noqa: E402
from benchmarks.shapes import GROUPS, WORKLOADS, Workload, select  # noqa: E402
from benchmarks.timing import NUM_WARMUPS, measure  # noqa: E402

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
SMALL = Workload("small", 1, 3, 24, 2, 16, "a test")
COLUMN = Workload("column", 2, 3, 24, 2, 16, "a test", bias2=False)


class TwiceEager(Eager):
    """Wrong on purpose."""

    name = "twice"

    def forward(self, leaves):
        return 2 * super().forward(leaves)


class HalfGradients(Eager):
    """O is right."""

    name = "half-gradients"

    def forward(self, leaves):
        o = super().forward(leaves)
        return o.detach() + 0.5 * (o - o.detach())


class HeadsFirst(Eager):
    """Heads before queries in memory, and back."""

    name = "heads-first"

    def adapt(self, inputs):
        leaves = super().adapt(inputs)
        return {
            name: x.transpose(2, 3).contiguous() if name in ("q", "k", "v") else x
            for name, x in leaves.items()
        }

    def forward(self, leaves):
        q, k, v = (leaves[name].transpose(2, 3) for name in ("q", "k", "v"))
        return super().forward({**leaves, "q": q, "k": k, "v": v}).transpose(2, 3)

    def restore(self, o, workload):
        return o.transpose(2, 3)


class Broken(Eager):
    name = "broken"

    def forward(self, leaves):
        raise RuntimeError("no such kernel")


class OnceOnly(Eager):
    """As where the memory that the clock itself takes is then missing."""

    name = "once-only"

    def forward(self, leaves):
        if not torch.is_grad_enabled():
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                raise MemoryError("full")
        return super().forward(leaves)


class OnlyForward(Eager):
    name = "only-forward"

    def forward(self, leaves):
        o = super().forward(leaves)
        if o.requires_grad:
            o.register_hook(self._refuse)
        return o

    @staticmethod
    def _refuse(gradient):
        raise NotImplementedError("no backward of this shape")


def run(peers: list[Peer], workload: Workload = SMALL, **options):
    settings = Options(directions=("fwd", "bwd", "fwd+bwd"), budget_s=0.01, **options)
    return run_workload(workload, peers, dtype=torch.float32, device=CPU, options=settings)


def test_every_workload_has_an_id_a_source_and_is_selectable():
    assert len({w.id for w in WORKLOADS}) == len(WORKLOADS)
    for workload in WORKLOADS:
        assert workload.source
        assert select([workload.id]) == (workload,)
    for name in GROUPS:
        assert select([name])


def test_heads_in_a_source_are_those_of_the_workload():
    for workload in WORKLOADS:
        if told := re.search(r"(\d+) heads of (\d+)", workload.source):
            assert told.groups() == (str(workload.H), str(workload.D)), workload.id


def test_selection_keeps_order_and_drops_repeats():
    assert [w.id for w in select(["tri392", "odd"])][:3] == ["tri392", "tri389", "tri448"]
    with pytest.raises(ValueError, match="no workload or group is called 'tri7'"):
        select(["tri7"])


def test_peer_groups_name_peers_that_there_are():
    for name, members in PEER_GROUPS.items():
        assert set(members) <= set(all_peers())
        assert peer_names(name) == list(members)
    assert peer_names("sdpa,cpu,nobody") == ["sdpa", "ours", "ours-heads-first", "eager", "nobody"]


class _Noting(torch.autograd.Function):
    """Identity; notes whether deterministic algorithms are on, forward and backward."""

    @staticmethod
    def forward(ctx, x, noted):
        ctx.noted = noted
        noted.append(torch.are_deterministic_algorithms_enabled())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.noted.append(torch.are_deterministic_algorithms_enabled())
        return grad, None


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_ours_deterministic_is_it_in_every_call_and_nobody_else(direction):
    """Each call runs in its peer's mode, and the mode before comes back."""

    def noting(base):
        noted = []

        class NotingPeer(base):
            def forward(self, leaves):
                return _Noting.apply(super().forward(leaves), noted)

        return NotingPeer(), noted

    plain, plain_noted = noting(Ours)
    fixed, fixed_noted = noting(OursDeterministic)
    options = Options((direction,), budget_s=0.01, max_runs=2)
    rows, skipped = run_workload(
        SMALL, [plain, fixed], dtype=torch.float32, device=CPU, options=options
    )
    assert not skipped
    assert [row.peer for row in rows] == ["ours", "ours-deterministic"]
    assert plain_noted and not any(plain_noted)
    assert fixed_noted and all(fixed_noted)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_forward_alone_asks_for_no_gradients():
    """A peer that compiles itself would compile a second forward for them."""

    class Watching(Eager):
        name = "watching"

        def forward(self, leaves):
            assert not torch.is_grad_enabled() or not leaves["q"].requires_grad
            return super().forward(leaves)

    options = Options(directions=("fwd",), budget_s=1.0, max_runs=3)
    rows, skipped = run_workload(
        SMALL, [Watching()], dtype=torch.float32, device=CPU, options=options
    )
    assert not skipped
    assert [row.timing.num_runs for row in rows] == [3]


def test_each_round_begins_with_another_call():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    timings = measure(calls, CPU, budget_s=0.0, max_runs=4)
    assert "".join(called) == "abc" * NUM_WARMUPS + "abc" + "bca" + "cab" + "abc"
    assert list(timings) == ["a", "b", "c"]
    assert {timing.num_runs for timing in timings.values()} == {4}


def test_flop_count_of_the_record():
    """4 B N H L L D forward and 2.5 times that backward."""
    record = select(["cpu64x384"])[0]
    assert record.forward_flop == 4 * 64 * 384 * 384 * 4 * 32
    assert record.backward_flop == 2.5 * record.forward_flop


@pytest.mark.parametrize("workload", [SMALL, COLUMN], ids=lambda w: w.id)
def test_peers_compute_the_same_thing(workload, seed):
    """SDPA with the biases in its mask against the definition, masks and all."""
    rows, skipped = run([Eager(), Sdpa()], workload, with_errors=True, seed=seed)
    assert not skipped
    assert {row.peer for row in rows} == {"eager", "sdpa"}
    wanted = {"O", "dq", "dk", "dv"} | ({"dbias2"} if workload.bias2 else set())
    for row in rows:
        assert set(row.errors) == wanted
        assert max(row.errors.values()) < 3e-6


def test_errors_are_in_the_contracts_layout_whatever_the_peers_is(seed):
    """Rows n in several parts, a batch of two, and gradients asked for in another order."""
    for peer in (Sdpa(), HeadsFirst()):
        workload = Workload("two", 2, 5, 24, 2, 16, "a test")
        rows, skipped = run([peer], workload, with_errors=True, with_bias1_gradient=True, seed=seed)
        assert not skipped
        assert set(rows[0].errors) == {"O", "dq", "dk", "dv", "dbias1", "dbias2"}
        assert max(rows[0].errors.values()) < 3e-6


def test_a_wrong_peer_is_seen(seed):
    rows, _ = run([TwiceEager()], with_errors=True, seed=seed)
    assert rows[0].errors["O"] == pytest.approx(1.0, rel=1e-3)
    rows, _ = run([HalfGradients()], with_errors=True, seed=seed)
    assert rows[0].errors["O"] < 3e-6
    for name in ("dq", "dk", "dv", "dbias2"):
        assert rows[0].errors[name] == pytest.approx(0.5, rel=1e-3)


def test_a_peer_that_computes_less_has_no_errors(seed):
    class Less(Eager):
        name = "less"

        def computes(self, workload):
            return False

    rows, _ = run([Less(), Eager()], with_errors=True, seed=seed)
    assert {row.peer: bool(row.errors) for row in rows} == {"less": False, "eager": True}


def test_a_peer_that_fails_is_recorded_and_the_others_run():
    rows, skipped = run([Broken(), Eager()])
    assert [(s.peer, s.reason) for s in skipped] == [("broken", "RuntimeError: no such kernel")]
    assert {row.peer for row in rows} == {"eager"}


def test_a_peer_that_fails_while_it_is_timed_is_recorded_and_the_others_run():
    rows, skipped = run([OnceOnly(), Eager()], max_runs=1)
    assert [(s.peer, s.reason) for s in skipped] == [("once-only", "fwd: MemoryError: full")]
    assert [row.direction for row in rows if row.peer == "eager"] == ["fwd", "bwd", "fwd+bwd"]
    assert [row.direction for row in rows if row.peer == "once-only"] == ["bwd", "fwd+bwd"]


def test_a_peer_without_a_backward_keeps_its_forward():
    rows, skipped = run([OnlyForward()])
    assert [row.direction for row in rows] == ["fwd"]
    assert "no backward of this shape" in skipped[0].reason


def test_masks_never_hide_every_key():
    inputs = make_inputs(SMALL, dtype=torch.float16, device=CPU, seed=0)
    assert inputs.bias1 is not None
    assert inputs.bias1.isfinite().all()
    assert inputs.visible.any(-1).all()


def test_gpu_peers_say_why_they_cannot_run_here():
    setting = Setting(SMALL, torch.bfloat16, CPU, 2**40)
    for name, factory in all_peers().items():
        reason = factory().not_available(setting)
        anywhere = name.startswith("ours") or name in ("eager", "sdpa")
        assert (reason is None) == anywhere, name


def test_a_peer_that_stores_every_score_declines_when_memory_is_short():
    reason = Eager().not_available(Setting(select(["tri5120"])[0], torch.bfloat16, CPU, 2**30))
    assert reason is not None
    assert "GiB" in reason


def test_result_file_reads_back_as_table_and_plot(tmp_path, capsys, monkeypatch):
    """`run` writes a file that `show` and `plot` read, with the machine and the commit in it."""
    monkeypatch.setattr("benchmarks.alone_cli.select", lambda names: (SMALL,))
    argv = ["run", "--peers", "eager,sdpa,flex", "--dtype", "fp32", "--seconds", "0.01"]
    assert cli.main([*argv, "--json", str(tmp_path), "--what", "test", "--commit", "abc"]) == 0
    (path,) = tmp_path.glob("*-test.json")
    result = json.loads(path.read_text())
    assert result["environment"]["commit"] == "abc"
    assert result["environment"]["num_threads"] == torch.get_num_threads()
    assert len(result["results"]) == 4  # two peers, forward and forward + backward
    capsys.readouterr()
    assert cli.main(["show", str(path)]) == 0
    assert "runs on CUDA only" in capsys.readouterr().out
    assert cli.main(["plot", str(path)]) == 0
    assert path.with_suffix(".svg").read_text().startswith("<svg")
    assert table.group(result["results"])


@pytest.mark.parametrize("command", ["show", "plot"])
def test_result_files_of_other_kinds_are_refused(command, tmp_path, capsys):
    path = tmp_path / "masks.json"
    path.write_text(json.dumps({"schema": 1, "kind": "graph-replay", "results": []}))
    assert cli.main([command, str(path)]) == 2
    assert f"{path} is a result of kind 'graph-replay'" in capsys.readouterr().out
    for text in ('{"schema": 1}', "[]", '{"schema'):
        path.write_text(text)
        assert cli.main([command, str(path)]) == 2
        assert f"{path}: expected a result file, got" in capsys.readouterr().out
    assert cli.main([command, str(tmp_path / "missing.json")]) == 2
    assert "FileNotFoundError" in capsys.readouterr().out


def test_a_reader_may_leave_before_the_end(monkeypatch):
    """`python -m benchmarks list | head -1`"""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert cli.main(["list"]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["run --device cuda", "replay", "ceilings"])
def test_cuda_without_a_gpu_is_refused(command, capsys):
    assert cli.main(command.split()) == 2
    assert "no CUDA GPU" in capsys.readouterr().out


def test_blocks_without_their_package_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["blocks"]) == 2
    assert "pip install openfold3" in capsys.readouterr().out


def test_unknown_peer_is_refused(capsys):
    assert cli.main(["run", "--peers", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().out


PAIR = Workload("pair", 1, 20, 20, 2, 8, "a test")


def masked(name, dtype=torch.bfloat16):
    return make_inputs(PAIR.with_mask(masks.BY_ID[name]), dtype=dtype, device=CPU, seed=0)


def test_a_pair_mask_hides_the_outer_product_of_a_token_mask():
    for name, value in (("pair-1/2", -1e9), ("pair-1/2-inf", -torch.inf)):
        inputs = masked(name, torch.float32)
        token = torch.arange(20) < 10
        assert torch.equal(inputs.visible[0], token[:, None] & token)
        assert torch.equal(inputs.bias1[0, :, 0, 0] == value, ~inputs.visible[0])
        assert inputs.row_mask is None
    assert torch.equal(masked("pair-1/2-rows").row_mask[0], token)
    assert masked("pair-1/2", torch.float16).bias1.min() == -3e4


def test_a_ragged_batch_has_four_lengths():
    inputs = masked("ragged-rows")
    assert inputs.q.shape[0] == 4
    assert inputs.visible[:, 0].sum(-1).tolist() == [20, 16, 12, 8]
    assert inputs.row_mask.sum(-1).tolist() == [20, 16, 12, 8]


def test_masks_of_keys_and_of_layouts():
    assert masked("keys-14").visible.sum(-1).unique().tolist() == [17]
    assert masked("half-inf").visible.sum(-1).unique().tolist() == [10]
    assert masked("none").visible.all() and not masked("none").bias1.any()
    assert masked("permuted").bias2.stride()[-1] == 2
    assert masked("permuted").bias2.shape == masked("none").bias2.shape
    wide = masked("fp32-biases")
    assert wide.bias1.dtype == wide.bias2.dtype == torch.float32 != wide.q.dtype


def test_workloads_get_masks_by_name():
    (workload,) = select(["tri768/pair-1/9"])
    assert workload.id == "tri768/pair-1/9"
    assert (workload.shape, workload.mask.id) == ((1, 768, 768, 4, 32), "pair-1/9")
    assert {w.mask.id for w in select(["masks"])} == set(masks.BY_ID)
    with pytest.raises(ValueError, match="no mask is called 'pair'"):
        select(["tri768/pair"])
    with pytest.raises(ValueError, match="N = L"):
        select(["cpu64x384/ragged"])


def test_every_mask_runs_and_is_compared_with_none(tmp_path, capsys, monkeypatch):
    """One table, with a row_mask for those who take one, and the ratio for each score."""
    monkeypatch.setattr("benchmarks.alone_cli.select", lambda names: (PAIR,))
    argv = ["run", "--peers", "ours,eager", "--dtype", "fp32", "--direction", "fwd", "--runs", "1"]
    assert cli.main([*argv, "--masks", "all", "--check", "--json", str(tmp_path / "m.json")]) == 0
    text = capsys.readouterr().out
    assert "vs none" in text
    result = json.loads((tmp_path / "m.json").read_text())
    assert not result["skipped"]
    assert len(result["results"]) == len(masks.MASKS) * 2
    assert all(row["errors"]["O"] < 1e-5 for row in result["results"])
    (plain,) = (
        line
        for line in text.splitlines()
        if "pair/none" in line and "fwd " in line and "ours" in line
    )
    assert plain.endswith("1.000x")


def test_a_table_without_masks_is_as_it_was():
    path = next((ROOT / "benchmarks" / "results").glob("*cpu64x384.json"))
    text = table.as_text(json.loads(path.read_text()))
    assert "vs none" not in text and "cpu64x384     float32" in text


def test_layers_are_timed(tmp_path, capsys):
    arguments = "layers --lengths 5 --modes eager --seconds 0 --runs 1 --commit x --json"
    assert cli.main([*arguments.split(), str(tmp_path / "layers.json")]) == 0
    result = json.loads((tmp_path / "layers.json").read_text())
    assert [(row["layer"], row["length"]) for row in result["rows"]] == [
        ("starting", 5),
        ("ending", 5),
    ]
    assert "ending" in capsys.readouterr().out


def test_peers_that_need_a_gpu_or_a_package_say_so():
    """On a CPU every one of them has a reason, and none is imported."""
    setting = Setting(select(["tri256"])[0], torch.bfloat16, CPU, 2**40)
    on_cpu = {"ours", "ours-heads-first", "ours-deterministic", "eager", "sdpa"}
    for name, peer in all_peers().items():
        assert (peer().not_available(setting) is None) == (name in on_cpu)


def test_miniworld_computes_what_its_layers_can_say():
    """bias2, and keys that are hidden in every row n."""
    peer = all_peers()["miniworld-engine"]()
    mine = [mask.id for mask in masks.MASKS if peer.computes(PAIR.with_mask(mask))]
    assert mine == ["none", "keys-14", "keys-14-inf", "half", "half-inf", "permuted"]
    assert not peer.computes(PAIR)
    hidden = peer.adapt(masked("half"))["scaled"].isinf()
    assert torch.equal(hidden, ~masked("half").visible[:, :1, None].expand_as(hidden))
    assert not peer.adapt(masked("random"))["scaled"].isinf().any()
