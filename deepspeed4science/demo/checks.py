"""Compare the op with float64 and with PyTorch eager, tensor by tensor: the error law of the
contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deepspeed4science.demo.embedding import AttentionCase

# An implementation: (q, k, v, [bias1, bias2]) -> o, as DS4Sci_EvoformerAttention is called.
Attention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None]], torch.Tensor
]

LAW_FACTOR = 1.25


@dataclass(frozen=True)
class Verdict:
    """Errors ||x - ref|| / ||ref|| of one tensor from the op and from eager, and the op's limit."""

    tensor: str  # "O", "dQ", ...
    ours: float
    eager: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.ours <= self.allowed


def relative_error(x: torch.Tensor, ref: torch.Tensor) -> float:
    """||x - ref|| / ||ref|| in float64; infinite when NaN or infinity stand at different places."""
    x, ref = x.detach().double(), ref.detach().double()
    finite = ref.isfinite()
    same_places = torch.equal(x.isfinite(), finite) and torch.equal(x.isnan(), ref.isnan())
    if not same_places or not torch.equal(x[ref.isinf()], ref[ref.isinf()]):
        return float("inf")
    x, ref = x[finite], ref[finite]
    size, difference = float(ref.norm()), float((x - ref).norm())
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def forward_backward(
    op: Attention,
    case: AttentionCase,
    grad_output: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """O and the gradient of every input, by name; `dtype` upcasts the inputs first."""
    inputs = {
        name: tensor.detach().to(dtype or tensor.dtype).requires_grad_()
        for name, tensor in case.inputs.items()
    }
    o = op(inputs["q"], inputs["k"], inputs["v"], [inputs.get("bias1"), inputs.get("bias2")])
    gradients = torch.autograd.grad(o, list(inputs.values()), grad_output.to(o.dtype))
    names = {"q": "dQ", "k": "dK", "v": "dV"}
    results = {"O": o.detach()}
    for name, gradient in zip(inputs, gradients, strict=True):
        results[names.get(name, "d" + name)] = gradient
    return results


def check(
    ours: Attention, eager: Attention, case: AttentionCase, *, seed: int = 0
) -> list[Verdict]:
    """Test `ours` against the error law on this case, with a random gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    grad_output = torch.randn(case.q.shape, generator=generator).to(case.q)
    reference = forward_backward(eager, case, grad_output, dtype=torch.float64)
    mine = forward_backward(ours, case, grad_output)
    theirs = forward_backward(eager, case, grad_output)
    verdicts = []
    for name, expected in reference.items():
        eager_error = relative_error(theirs[name], expected)
        one_ulp = torch.finfo(case.q.dtype).eps
        allowed = LAW_FACTOR * eager_error + one_ulp
        verdicts.append(Verdict(name, relative_error(mine[name], expected), eager_error, allowed))
    return verdicts
