"""A call like one that was made before is not described again, and what the caller may change
between two calls is noticed.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from deepspeed4science import (  # noqa: E402
    DS4Sci_EvoformerAttention,
    below_autograd,
    implementation,
    operators,
    replay,
)
from deepspeed4science.backends.cuda import allows_tf32  # noqa: E402
from deepspeed4science.call import BackwardCall, ForwardCall  # noqa: E402
from deepspeed4science.prepared import PreparedForward  # noqa: E402
from deepspeed4science.reference import evoformer_attention  # noqa: E402
from tests.numeric.cases import Case  # noqa: E402
from tests.numeric.law import check  # noqa: E402

B, N, L, H, D = 2, 3, 9, 2, 16


@pytest.fixture
def described(monkeypatch):
    """Calls that were described, that is looked at anew."""
    found, real = [], implementation.describe
    monkeypatch.setattr(implementation, "describe", lambda call: found.append(call) or real(call))
    return found


def inputs(**changes):
    """Arguments of a call, by name."""
    q, k, v = (torch.randn(B, N, L, H, D) for _ in range(3))
    biases = [torch.randn(B, N, 1, 1, L), torch.randn(B, 1, H, L, L)]
    return {"Q": q, "K": k, "V": v, "biases": biases} | changes


def expected(given):
    as_reference = dict(given)
    as_reference.pop("return_lse", None)
    row_mask, scale = as_reference.pop("row_mask", None), as_reference.pop("scale", None)
    q = as_reference["Q"] * (1.0 if scale is None else scale * D**0.5)
    biases = [None if one is None else one.float() for one in as_reference["biases"]]
    o = evoformer_attention(q.float(), given["K"].float(), given["V"].float(), *biases)
    return o if row_mask is None else o * row_mask[..., None, None, None]


def is_right(given):
    o = DS4Sci_EvoformerAttention(**given)
    o = o[0] if isinstance(o, tuple) else o
    return torch.allclose(o.float(), expected(given), atol=2e-2, rtol=2e-2)


def test_a_call_like_one_before_is_not_described_again(described):
    for _ in range(3):
        assert is_right(inputs())
    assert len(described) == 1


def test_neither_is_its_backward(described):
    case = Case("again", N=3, Lq=70)
    for _ in range(3):
        check(case.inputs(torch.float32, "cpu"))
    assert len(described) == 2


def apart(tensor):
    """The same numbers at other strides."""
    return tensor.transpose(1, 3).contiguous().transpose(1, 3)


CHANGES = {
    "strides of q": lambda x: {"Q": apart(x["Q"])},
    "strides of v": lambda x: {"V": apart(x["V"])},
    "keys apart": lambda x: {"K": x["K"].repeat_interleave(2, -1)[..., ::2]},
    "dtype": lambda x: {name: x[name].bfloat16() for name in ("Q", "K", "V")},
    "dtype of bias1": lambda x: {"biases": [x["biases"][0].half(), x["biases"][1]]},
    "no bias1": lambda x: {"biases": [None, x["biases"][1]]},
    "no bias2": lambda x: {"biases": x["biases"][:1]},
    "bias2 of all heads": lambda x: {"biases": [x["biases"][0], x["biases"][1][:, :, :1]]},
    "bias2 transposed": lambda x: {"biases": [x["biases"][0], x["biases"][1].mT]},
    "rows": lambda x: {"row_mask": torch.tensor([[True, False, True]] * B)},
    "scale": lambda x: {"scale": 0.7},
    "lse": lambda x: {"return_lse": True},
    "length": lambda x: {"Q": x["Q"][:, :, :5], "biases": [x["biases"][0]]},
    "keys": lambda x: {"K": x["K"][:, :, :8], "V": x["V"][:, :, :8], "biases": []},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_call_of_another_kind_is(change, described):
    given = inputs()
    assert is_right(given)
    for _ in range(2):
        assert is_right(given | change(given))
    assert len(described) == 2
    assert is_right(given)
    assert len(described) == 2


def test_comparing_less_is_noticed(monkeypatch):
    """The tests above see it when strides and dtypes are not compared."""
    monkeypatch.setattr(replay, "TensorGuards", lambda *_, **__: SimpleNamespace(check=any_tensors))
    given = inputs()
    assert is_right(given)
    assert not is_right(given | CHANGES["strides of v"](given))


def any_tensors(*_):
    return True


RUNS = {
    "forward": (ForwardCall, functools.partial(below_autograd.forward, differentiable=True)),
    "replayed": (ForwardCall, operators.replayed),
    "backward": (BackwardCall, below_autograd.backward),
}


def options_of(call):
    """The fields that are no tensors, each with a value and another one."""
    kinds = call.__annotations__.items()
    names = [name for name, kind in kinds if kind not in (torch.Tensor, torch.Tensor | None)]
    values = {"with_lse": False, "wanted": (True,) * 5} | call._field_defaults
    others = {"wanted": (False,) * 5, "scale": 0.5}
    return {name: (values[name], others.get(name, not values[name])) for name in names}


@pytest.mark.parametrize(
    ("run", "option"),
    [(run, option) for run, (call, _) in RUNS.items() for option in options_of(call)],
)
def test_every_option_is_part_of_the_kind(run, option, monkeypatch):
    """Otherwise a call would be computed with the option of the first of its kind."""
    kinds = []

    def computes(_, q, tensors, *others):
        kinds.append(others)
        return lambda call: (None,) * 5

    monkeypatch.setattr(replay.Replay, "find", computes)
    monkeypatch.setattr(replay.Replay, "known", computes)
    call, function = RUNS[run]
    options = options_of(call)
    given = {name: values[0] for name, values in options.items()}
    tensors = {name: torch.ones(1) for name in call._fields if name not in options}
    for value in options[option]:
        function(call(**tensors, **given | {option: value}))
    assert kinds[0] != kinds[1]


def test_threads_are_looked_at(described):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            assert is_right(inputs())
    finally:
        torch.set_num_threads(before)
    assert len(described) == 2


def test_what_chooses_a_kernel_of_a_gpu_is_looked_at(monkeypatch):
    q = SimpleNamespace(is_cuda=True)
    found = [replay._settings(q)]
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm75")
    found.append(replay._settings(q))
    torch.use_deterministic_algorithms(True)
    try:
        found.append(replay._settings(q))
    finally:
        torch.use_deterministic_algorithms(False)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found.append(replay._settings(q))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert len(set(found)) == len(found)


@pytest.fixture
def matmul():
    """PyTorch's newer settings of products on a GPU; all settings are undone."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    torch.set_float32_matmul_precision("highest")
    settings.fp32_precision = before


@pytest.mark.parametrize(
    ("older", "newer", "allowed"),
    [
        (None, {"fp32_precision": "tf32"}, True),
        ("high", {"fp32_precision": "ieee"}, False),
        ("high", {"allow_tf32": False}, False),
        ("medium", {"allow_tf32": True}, True),
        ("high", {}, True),
    ],
)
def test_any_of_pytorchs_settings_of_tf32_is_looked_at(older, newer, allowed, matmul):
    """After most of these, `torch.get_float32_matmul_precision` raises."""
    q = SimpleNamespace(is_cuda=True)
    default = replay._settings(q)
    if older:
        torch.set_float32_matmul_precision(older)
    for name, value in newer.items():
        setattr(matmul, name, value)
    assert allows_tf32() == allowed
    assert (replay._settings(q) != default) == allowed


def test_tensors_off_16_bytes_are_no_kind(described):
    given = inputs()
    assert is_right(given)
    odd = torch.randn(B * N * L * H * D + 1)[1:].view(B, N, L, H, D)
    for _ in range(2):
        assert is_right(given | {"K": odd})
    assert len(described) == 3


class Names(TorchDispatchMode):
    """The operators that PyTorch is asked for."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_see_the_operator_after_it_was_replayed():
    given = inputs()
    for _ in range(2):
        assert is_right(given)
    with Names() as names:
        DS4Sci_EvoformerAttention(**given)
    assert "deepspeed4science.evoformer_attn.default" in names.seen
    with FlopCounterMode(display=False) as counter:
        DS4Sci_EvoformerAttention(**given)
    assert counter.get_total_flops() > 0
    with torch.profiler.profile() as profiler:
        DS4Sci_EvoformerAttention(**given)
    assert any("evoformer_attn" in event.name for event in profiler.events())
    assert is_right(given)


def selectively(block, policy):
    """`block` under selective checkpointing."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(checkpoint, block, use_reentrant=False, context_fn=contexts)


def test_selective_checkpointing_sees_the_operator_after_it_was_replayed(monkeypatch):
    """What is to be saved is saved, and not computed twice."""
    runs, real = [], PreparedForward.__call__
    monkeypatch.setattr(
        PreparedForward, "__call__", lambda self, call: runs.append(self) or real(self, call)
    )
    given = inputs()
    given["Q"].requires_grad_()
    block = functools.partial(DS4Sci_EvoformerAttention, **given)
    block().sum().backward()
    expected, given["Q"].grad = given["Q"].grad, None
    runs.clear()
    saved = [torch.ops.deepspeed4science.evoformer_attn.default]
    selectively(block, saved)().sum().backward()
    assert len(runs) == 1
    torch.testing.assert_close(given["Q"].grad, expected, rtol=0, atol=0)


def test_a_block_after_one_that_is_selectively_checkpointed():
    """Of the same kind: its call is kept between the first block's forward and recomputation."""
    q, k, v = (torch.randn(B, N, L, H, D, requires_grad=True) for _ in range(3))

    def block(x):
        return DS4Sci_EvoformerAttention(x, k, v, [])

    saves = selectively(block, lambda *_, **__: CheckpointPolicy.PREFER_SAVE)
    found = torch.autograd.grad(block(saves(q)).sum(), (q, k, v))
    below_autograd.forget()
    expected = torch.autograd.grad(block(block(q)).sum(), (q, k, v))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_fake_tensors_of_a_call_that_was_replayed():
    given = inputs()
    for _ in range(2):
        assert is_right(given)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(DS4Sci_EvoformerAttention(**given), FakeTensor)


class Subclass(torch.Tensor):
    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_so_do_tensors_of_other_classes():
    given = inputs()
    assert is_right(given)
    DS4Sci_EvoformerAttention(**given | {"Q": given["Q"].as_subclass(Subclass)})
    assert any("evoformer_attn" in name for name in Subclass.seen)


def test_a_view_of_the_negative(described):
    given = inputs()
    assert is_right(given)
    assert is_right(given | {"Q": torch._neg_view(given["Q"])})


def test_inference_mode_and_parameters(described):
    given = inputs()
    with torch.inference_mode():
        for _ in range(2):
            assert is_right(given)
            assert is_right({name: of_inference(one) for name, one in given.items()})
    leaf = torch.nn.Parameter(given["Q"])
    for _ in range(2):
        assert DS4Sci_EvoformerAttention(**given | {"Q": leaf}).requires_grad
        with torch.no_grad():
            assert is_right(given | {"Q": leaf})


def of_inference(value):
    return [one.clone() for one in value] if isinstance(value, list) else value.clone()


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_is_heard_by_calls_of_a_known_kind(grad, described):
    given = inputs()
    if grad:
        given["Q"].requires_grad_()
    assert DS4Sci_EvoformerAttention(**given).dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            for _ in range(2):
                assert DS4Sci_EvoformerAttention(**given).dtype == dtype
    assert DS4Sci_EvoformerAttention(**given).dtype == torch.float32
    assert len(described) == 3


def test_a_tensor_given_twice_is_no_kind():
    """It would be prepared each time, and take the place of others."""
    q = torch.randn(B, N, L, H, D)
    for _ in range(3):
        assert is_right({"Q": q, "K": q, "V": q, "biases": [None, None]})
    assert not below_autograd.other_forwards._groups


def test_the_number_of_kinds_is_bounded(monkeypatch):
    monkeypatch.setattr(replay, "_MOST_GROUPS", 4)
    monkeypatch.setattr(replay, "_MOST_OF_A_GROUP", 3)
    for length in range(2, 9):
        for gap in range(5):
            tensors = (torch.randn(1, 1, length, 1, 8 + gap)[..., :8] for _ in range(3))
            DS4Sci_EvoformerAttention(*tensors)
    groups = below_autograd.other_forwards._groups
    assert len(groups) <= 4
    assert max(map(len, groups.values())) == 3


def test_threads_at_once(monkeypatch):
    """Each its own kinds, and all those of the others; the memory overflows meanwhile."""
    monkeypatch.setattr(replay, "_MOST_GROUPS", 4)
    wrong = []

    def work(seed):
        for i in range(60):
            length = 2 + (seed + i) % 7
            q, k, v = (torch.randn(1, 2, length, 1, 8) for _ in range(3))
            if not torch.allclose(
                DS4Sci_EvoformerAttention(q, k, v), evoformer_attention(q, k, v), atol=1e-4
            ):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_pytorch_without_what_replaying_needs():
    """Whatever of it a later release renames: every call goes through the operator."""
    code = """
import torch
del torch._C._dispatch_tls_local_include_set, torch._C._dynamo.eval_frame._FrameAction
import deepspeed4science as ds
from deepspeed4science import replay
assert not replay.IS_POSSIBLE
q = torch.randn(1, 2, 40, 2, 16, requires_grad=True)
for _ in range(2):
    ds.DS4Sci_EvoformerAttention(q, q, q, []).sum().backward()
print(q.grad.isfinite().all().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr
