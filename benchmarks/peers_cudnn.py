"""cuDNN's attention with both biases, through its graph API (PyPI: nvidia-cudnn-frontend). Read at
frontend 1.20 with cuDNN 9.19.

bias2 is the graph's bias, whose gradient cuDNN sums over the rows n; bias1 is added by a score
modifier. The graphs of a shape are built once, before anything is timed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from benchmarks.inputs import Inputs
from benchmarks.peers import Leaves, Peer, Setting, _from_heads_first, _qkv, _to_heads_first
from benchmarks.peers_cuda import HALF, _missing, _not_on_gpu
from benchmarks.shapes import Workload


class CudnnBiased(Peer):
    name = "cudnn-biased"

    def not_available(self, setting: Setting) -> str | None:
        if setting.dtype not in HALF:
            return "float16 and bfloat16 only"
        if setting.workload.B != 1:
            return "one bias2 for all of the batch: B = 1"
        return _not_on_gpu(setting) or _missing("cudnn")

    def adapt(self, inputs: Inputs) -> Leaves:
        leaves: Leaves = {name: _to_heads_first(getattr(inputs, name)) for name in ("q", "k", "v")}
        # [N, 1, 1, L] and [1, H, L, L], as cuDNN broadcasts them to [N, H, L, L].
        leaves["bias1"] = None if inputs.bias1 is None else inputs.bias1.flatten(0, 1).contiguous()
        leaves["bias2"] = None if inputs.bias2 is None else inputs.bias2.squeeze(1).contiguous()
        return leaves

    def forward(self, leaves: Leaves) -> torch.Tensor:
        q, k, v = _qkv(leaves)
        bias1, bias2 = leaves["bias1"], leaves["bias2"]
        if torch.is_grad_enabled() and q.requires_grad:
            return _Attention.apply(q, k, v, bias1, bias2)  # type: ignore[no-any-return]
        return _forward(q, k, v, bias1, bias2, with_stats=False)[0]

    def restore(self, o: torch.Tensor, workload: Workload) -> torch.Tensor:
        return _from_heads_first(o, workload)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias1: torch.Tensor | None,
        bias2: torch.Tensor | None,
    ) -> torch.Tensor:
        o, stats = _forward(q, k, v, bias1, bias2, with_stats=True)
        ctx.save_for_backward(q, k, v, bias1, bias2, o, stats)
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, bias1, bias2, o, stats = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        dbias2 = None if bias2 is None else torch.empty_like(bias2)
        graph = _graph("backward", q.shape, q.dtype, bias1 is not None, bias2 is not None)
        given = {"q": q, "k": k, "v": v, "bias1": bias1, "bias2": bias2, "o": o, "stats": stats}
        made = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        graph.run({**given, "do": do.contiguous(), **made, "dbias2": dbias2})
        return (*gradients, None, dbias2)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias1: torch.Tensor | None,
    bias2: torch.Tensor | None,
    *,
    with_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    o = torch.empty_like(q)
    stats = q.new_empty((*q.shape[:3], 1), dtype=torch.float32) if with_stats else None
    kind = "forward" if with_stats else "inference"
    graph = _graph(kind, q.shape, q.dtype, bias1 is not None, bias2 is not None)
    given = {"q": q, "k": k, "v": v, "bias1": bias1, "bias2": bias2}
    graph.run({**given, "o": o, "stats": stats})
    return o, stats


class _Graph:
    """A built graph and its tensors by name; those that it does not have are passed over."""

    def __init__(self, graph: Any, handle: Any, tensors: dict[str, Any]) -> None:
        self._graph, self._handle, self._tensors = graph, handle, tensors
        graph.build(_heuristics())
        self._workspace_bytes = graph.get_workspace_size()

    def run(self, given: dict[str, torch.Tensor | None]) -> None:
        import cudnn

        stream = torch.cuda.current_stream().cuda_stream
        cudnn.set_stream(handle=self._handle, stream=stream)
        workspace = torch.empty(self._workspace_bytes, device="cuda", dtype=torch.uint8)
        bound = {self._tensors[name]: x for name, x in given.items() if x is not None}
        self._graph.execute(bound, workspace, handle=self._handle)


def _heuristics() -> list[Any]:
    import cudnn

    return [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]


@cache
def _graph(
    kind: str, shape: torch.Size, dtype: torch.dtype, with_bias1: bool, with_bias2: bool
) -> _Graph:
    """`kind` is inference, forward (with the softmax statistics) or backward."""
    import cudnn

    rows, heads, length, dim = shape
    io = cudnn.data_type.BFLOAT16 if dtype == torch.bfloat16 else cudnn.data_type.HALF
    real = cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        handle=handle, io_data_type=io, intermediate_data_type=real, compute_data_type=real
    )
    tensors: dict[str, Any] = {}

    def declare(name: str, size: tuple[int, ...], data_type: Any = io) -> Any:
        strides = torch.empty(size, device="meta").stride()
        tensors[name] = graph.tensor(
            name=name, dim=list(size), stride=list(strides), data_type=data_type
        )
        return tensors[name]

    def add_bias1(part: Any, scores: Any) -> Any:
        return part.add(a=scores, b=tensors["bias1"], compute_data_type=real, name="add_bias1")

    arguments = {name: declare(name, tuple(shape)) for name in ("q", "k", "v")}
    arguments["attn_scale"] = dim**-0.5
    if with_bias1:
        declare("bias1", (rows, 1, 1, length))
        arguments["score_mod"] = add_bias1
    if with_bias2:
        arguments["bias"] = declare("bias2", (1, heads, length, length))
    if kind == "backward":
        arguments["o"], arguments["dO"] = declare("o", tuple(shape)), declare("do", tuple(shape))
        arguments["stats"] = declare("stats", (rows, heads, length, 1), real)
        if with_bias2:
            arguments["dBias"] = declare("dbias2", (1, heads, length, length))
        results = graph.sdpa_backward(name="attention", **arguments)
        outputs = dict(zip(("dq", "dk", "dv"), results, strict=True))
    else:
        o, stats = graph.sdpa(name="attention", generate_stats=kind == "forward", **arguments)
        outputs = {"o": o}
        if kind == "forward":
            stats.set_output(True).set_data_type(real)
            tensors["stats"] = stats
    for name, output in outputs.items():
        strides = torch.empty(shape, device="meta").stride()
        output.set_output(True).set_dim(list(shape)).set_stride(list(strides))
        tensors[name] = output
    return _Graph(graph, handle, tensors)


PEERS: tuple[type[Peer], ...] = (CudnnBiased,)
