"""OpenFold 3's PairFormer block, forward and backward, in training mode under bfloat16 autocast:
with each choice of kernels that the package has, with this op in their place, and with the layers
of `deepspeed4science.nn` in place of the package's. Needs the package (`pip install openfold3`).
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import measure
from deepspeed4science import drop_in, nn

# The model's configuration (projects/of3_all_atom/config/model_config.py, pairformer).
SINGLE, PAIR, HEADS, HEAD_DIM = 384, 128, 4, 32
SINGLE_HEADS, SINGLE_HEAD_DIM = 16, 24
CONFIG = {
    "c_s": SINGLE,
    "c_z": PAIR,
    "c_hidden_pair_bias": SINGLE_HEAD_DIM,
    "no_heads_pair_bias": SINGLE_HEADS,
    "c_hidden_mul": 128,
    "c_hidden_pair_att": HEAD_DIM,
    "no_heads_pair": HEADS,
    "transition_type": "swiglu",
    "transition_n": 4,
    "pair_dropout": 0.25,
    "fuse_projection_weights": False,
    "inf": 1e9,
}
_ATTENTION = "openfold3.core.model.primitives.attention"
_DEEPSPEED, _TRITON = "use_deepspeed_evo_attention", "use_triton_triangle_kernels"
_CUEQ = "use_cueq_triangle_kernels"


@dataclass(frozen=True)
class Path:
    """One choice of kernels for the block."""

    name: str
    flag: str = ""  # argument of the block's forward that chooses the kernels
    needs: str = ""  # the package that has the kernels
    switched: bool = False  # this op computes attention
    layers: str = ""  # "eager" or "compiled": attention layers are those of deepspeed4science.nn


PATHS = (
    Path("plain PyTorch"),
    Path("DeepSpeed", _DEEPSPEED, "deepspeed"),
    Path("its Triton kernels", _TRITON, "triton"),
    Path("cuEquivariance", _CUEQ, "cuequivariance_torch"),
    Path("this op", _DEEPSPEED, switched=True),
    Path("this op, cuEquivariance's multiplication", _CUEQ, "cuequivariance_torch", switched=True),
    Path("our layers", layers="eager"),
    Path("our layers compiled", layers="compiled"),
    Path(
        "our layers compiled, cuEquivariance's multiplication",
        _CUEQ,
        "cuequivariance_torch",
        layers="compiled",
    ),
)


@dataclass(frozen=True)
class BlockRow:
    """Milliseconds of forward and backward together."""

    path: str
    crop: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    num_runs: int
    difference: (
        float  # relative: the pairs' gradient without the residual's, against the first path
    )

    def __str__(self) -> str:
        spread = f"p20 {self.p20_ms:.2f}, p80 {self.p80_ms:.2f}"
        return (
            f"{self.crop:6d} {self.path:<52} {self.median_ms:8.2f} ms ({spread}; differs by "
            f"{self.difference:.4f})"
        )


def missing(path: Path, device: torch.device) -> str:
    """The reason why a path cannot be measured here; empty if it can."""
    if path.needs and importlib.util.find_spec(path.needs) is None:
        return f"{path.needs} is not installed"
    if path.needs and device.type != "cuda":
        return "its kernels need a GPU"
    return ""


def measure_block(
    crop: int,
    paths: Sequence[Path],
    *,
    device: torch.device,
    budget_s: float,
    max_runs: int,
) -> list[BlockRow]:
    """Measures every path in one run."""
    torch._dynamo.reset()  # otherwise layers would be compiled for dynamic sizes from here on
    block = pairformer_block(device)
    s = torch.randn(1, crop, SINGLE, device=device, requires_grad=True)
    z = torch.randn(1, crop, crop, PAIR, device=device, requires_grad=True)
    gradients = torch.randn_like(s), torch.randn_like(z)
    steps = {
        path.name: _step(path, with_layers(block, path.layers), (s, z), gradients) for path in paths
    }
    first, differences = None, {}
    for name, step in steps.items():
        torch.manual_seed(0)  # the same dropout for every path
        dz = step()[1].double() - gradients[1]  # the pairs' gradient without the residual's part
        first = dz if first is None else first
        differences[name] = float((dz - first).norm() / first.norm())
    del first, dz
    timings = measure(steps, device, budget_s=budget_s, max_runs=max_runs)
    rows = []
    for name, timing in timings.items():
        spread = (timing.median_ms, timing.p20_ms, timing.p80_ms, timing.num_runs)
        rows.append(BlockRow(name, crop, *spread, differences[name]))
    return rows


def pairformer_block(device: torch.device) -> torch.nn.Module:
    module = importlib.import_module("openfold3.core.model.latent.pairformer")
    block: torch.nn.Module = module.PairFormerBlock(**CONFIG)
    for parameter in block.parameters():  # with parameters of 0, a branch would add nothing
        torch.nn.init.normal_(parameter, std=0.05)
    return block.to(device)


class _Transposed(torch.nn.Module):
    """An ending node's layer for a block that passes it transposed pairs."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        o: Tensor = self.layer(x.transpose(-2, -3), mask.transpose(-1, -2))
        return o.transpose(-2, -3)


class _Called(torch.nn.Module):
    """A layer that gets only those of the block's options that it knows."""

    def __init__(self, layer: Callable[..., Any], *names: str) -> None:
        super().__init__()
        self.layer, self._names = layer, names

    def forward(self, *inputs: Tensor, **options: Any) -> Any:
        return self.layer(*inputs, **{name: options[name] for name in self._names})


def with_layers(block: torch.nn.Module, mode: str) -> torch.nn.Module:
    """The block, or a copy of it with our layers and its parameters."""
    if not mode:
        return block
    block = copy.deepcopy(block)
    stack: Any = block.pair_stack
    sizes = (PAIR, HEAD_DIM, HEADS)
    starting = nn.TriangleAttentionStartingNode(*sizes, bias=False)
    ending = nn.TriangleAttentionEndingNode(*sizes, bias=False, transpose_bias=True)
    single = nn.AttentionPairBias(SINGLE, PAIR, SINGLE_HEAD_DIM, SINGLE_HEADS)
    starting.load_state_dict(stack.tri_att_start.state_dict())
    ending.load_state_dict(stack.tri_att_end.state_dict())
    single.load_state_dict(block.attn_pair_bias.state_dict())  # type: ignore[union-attr]
    device = next(block.parameters()).device

    def called(layer: torch.nn.Module, *names: str) -> torch.nn.Module:
        layer = layer.to(device)
        compiled = torch.compile(layer, fullgraph=True) if mode == "compiled" else layer
        return _Called(compiled, *names)

    stack.tri_att_start = called(starting, "mask")
    stack.tri_att_end = called(_Transposed(ending), "mask")
    block.attn_pair_bias = called(single, "a", "z", "mask")
    return block


def _step(
    path: Path,
    block: torch.nn.Module,
    inputs: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
) -> Callable[[], Sequence[Tensor]]:
    s, z = inputs
    tokens, pairs = torch.ones_like(s[..., 0]), torch.ones_like(z[..., 0])
    flags = {path.flag: True} if path.flag else {}
    wanted = [s, z, *block.parameters()]
    module = importlib.import_module(_ATTENTION)
    attributes = _of_the_switch(module) if path.switched else {}

    def step() -> Sequence[Tensor]:
        with _changed(module, attributes), torch.autocast(s.device.type, torch.bfloat16):
            results = block(s, z, tokens, pairs, **flags)
        return torch.autograd.grad(results, wanted, gradients)

    return step


def _of_the_switch(module: Any) -> dict[str, Any]:
    """The attributes of a module that `drop_in.switch` changes. They are set for each call, since
    calls with and without the switch alternate.
    """
    before = dict(vars(module))
    with drop_in.switch("openfold3"):
        return {name: value for name, value in vars(module).items() if before[name] is not value}


@contextmanager
def _changed(module: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in attributes}
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(before)
