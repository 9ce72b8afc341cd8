"""The error of every peer against the same maths in float64: of O and of the gradients, in this
op's layout, whatever the peer's layout is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.inputs import Inputs
from benchmarks.peers import Leaves, Peer
from benchmarks.shapes import Workload
from deepspeed4science.demo.checks import relative_error
from deepspeed4science.reference import evoformer_attention

REFERENCE_BYTES = 2 * 2**30  # the float64 scores of the rows that are computed together
Tensors = dict[str, torch.Tensor]


def reference(inputs: Inputs, trained: Sequence[str]) -> Tensors:
    """ "O" and the gradients "dq", "dbias2" and so on of the trained tensors, in float64; some rows
    n at a time, which do not depend on each other.
    """
    batch, rows, length, heads, _ = inputs.q.shape
    step = max(1, REFERENCE_BYTES // (8 * heads * length * length))
    parts: dict[str, list[torch.Tensor]] = {}
    sums: Tensors = {}
    for b in range(batch):
        for start in range(0, rows, step):
            part = _part(inputs, b, slice(start, start + step), trained)
            for name, tensor in part.items():
                if name == "dbias2":
                    key = f"{name}{b}"
                    sums[key] = sums[key] + tensor if key in sums else tensor
                else:
                    parts.setdefault(name, []).append(tensor)
    result = {
        name: torch.cat(pieces).reshape(batch, rows, *pieces[0].shape[1:])
        for name, pieces in parts.items()
    }
    if sums:
        result["dbias2"] = torch.stack([sums[f"dbias2{b}"] for b in range(batch)])
    return result


def _part(inputs: Inputs, b: int, rows: slice, trained: Sequence[str]) -> Tensors:
    wide: Tensors = {}
    for name in ("q", "k", "v", "bias1", "bias2"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            tensor = tensor[b] if name == "bias2" else tensor[b, rows]
            wide[name] = tensor.detach().double().requires_grad_(name in trained)
    q, k, v = (wide[name] for name in ("q", "k", "v"))
    o = evoformer_attention(q, k, v, wide.get("bias1"), wide.get("bias2"))
    if not trained:
        return {"O": o}
    gradients = torch.autograd.grad(
        o, [wide[name] for name in trained], _read_gradient(inputs)[b, rows].double()
    )
    return {"O": o.detach(), **{f"d{n}": g for n, g in zip(trained, gradients, strict=True)}}


def read_rows(inputs: Inputs) -> torch.Tensor:
    """[B, N]: the rows n whose result is compared. The others are padding: peers without a row_mask
    compute them, and there a large finite mask on all keys leaves the scores no digits.
    """
    return inputs.visible.any(dim=-1) if inputs.row_mask is None else inputs.row_mask


def _read_gradient(inputs: Inputs) -> torch.Tensor:
    """The gradient of O, 0 in rows n that are not compared."""
    return inputs.grad_output * read_rows(inputs)[:, :, None, None, None]


def errors_of(
    peer: Peer,
    leaves: Leaves,
    trained: Tensors,
    *,
    inputs: Inputs,
    workload: Workload,
    wanted: Tensors,
) -> dict[str, float]:
    """Relative errors of O and of the gradients of the `trained` leaves (none: of O alone)."""
    read = read_rows(inputs)
    with peer.mode(), torch.set_grad_enabled(bool(trained)):
        o = peer.forward(leaves)
        found = {"O": relative_error(peer.restore(o, workload)[read], wanted["O"][read])}
        if trained:
            own = o.detach().requires_grad_()
            (do,) = torch.autograd.grad(peer.restore(own, workload), own, _read_gradient(inputs))
            gradients = torch.autograd.grad(o, list(trained.values()), do)
            by_name = dict(zip(trained, gradients, strict=True))
            for name, gradient in _in_contract_layout(peer, inputs, by_name).items():
                found[f"d{name}"] = relative_error(gradient, wanted[f"d{name}"])
    return found


def _in_contract_layout(peer: Peer, inputs: Inputs, gradients: Tensors) -> Tensors:
    """Gradients of the peer's own tensors as those of the inputs: `adapt` is differentiable."""
    fresh = {name: getattr(inputs, name).detach().requires_grad_() for name in gradients}
    adapted = peer.adapt(replace(inputs, **fresh))
    outputs = [x for x in (adapted[name] for name in gradients) if x is not None]  # none is
    pulled = torch.autograd.grad(outputs, list(fresh.values()), list(gradients.values()))
    return dict(zip(gradients, pulled, strict=True))
