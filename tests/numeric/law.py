"""The error law, math.md (17): the error of every tensor against float64 may be little larger than
that of PyTorch eager in the same dtype.

    err(ours) <= 1.25 * err(eager) + 1 ulp of the output,   err = ||x - ref|| / ||ref||

An ulp is never less than the distance of subnormal numbers, 6e-8 in float16. Positions of NaN and
infinities are compared first and then left out.
"""

import contextlib
import math
from dataclasses import dataclass, field

import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.reference import evoformer_attention

NAMES = ("O", "dQ", "dK", "dV", "dbias1", "dbias2")


def relative_error(x, reference):
    x, reference = x.double(), reference.double()
    finite = reference.isfinite() & x.isfinite()
    norm = reference[finite].norm()
    difference = (x - reference)[finite].norm()
    return float(difference if norm == 0 else difference / norm)


def least_ulp(dtype, elements, norm):
    """The distance of subnormal numbers, in each of so many elements, as a relative error."""
    info = torch.finfo(dtype)
    return math.sqrt(elements) * info.smallest_normal * info.eps / norm if norm else 0.0


def same_non_finite(x, reference):
    x, reference = x.double(), reference.double()
    return bool(
        (
            (x.isnan() == reference.isnan())
            & ((x == torch.inf) == (reference == torch.inf))
            & ((x == -torch.inf) == (reference == -torch.inf))
        ).all()
    )


def violations(ours, eager, reference, ulps, names=NAMES):
    """The names of tensors that break the law, with their figures; empty where none does."""
    broken = []
    for name, x, e, ref, ulp in zip(names, ours, eager, reference, ulps, strict=True):
        if ref is None:
            if x is not None:
                broken.append(f"{name}: a gradient nobody asked for")
            continue
        if x is None or x.shape != ref.shape:
            broken.append(
                f"{name}: expected {list(ref.shape)}, got {None if x is None else list(x.shape)}"
            )
            continue
        if not same_non_finite(x, ref):
            broken.append(f"{name}: NaN or infinities in other places than the reference's")
            continue
        finite = ref[ref.isfinite()].double()
        least = least_ulp(x.dtype, finite.numel(), float(finite.norm()))
        error, allowed = relative_error(x, ref), 1.25 * relative_error(e, ref) + max(ulp, least)
        if not error <= allowed:
            broken.append(f"{name}: {error:.3g} > {allowed:.3g}")
    return broken


def row_violations(ours, eager, reference, names=NAMES):
    """The names of tensors in which a row has more than three times the error of eager's worst
    row, and two ulps. A mistake in one row of thousands hides in the norm of all.
    """
    broken = []
    for name, x, e, ref in zip(names, ours, eager, reference, strict=True):
        if ref is not None:
            error, place = worst_row(x, ref)
            allowed = 3 * worst_row(e, ref)[0] + 2 * torch.finfo(x.dtype).eps
            if not error <= allowed:
                broken.append(f"{name}, row {place}: {error:.3g} > {allowed:.3g}")
    return broken


def worst_row(x, reference):
    """The largest error of a row, divided by the sum of that row's norm and the root mean square
    of all rows' norms, and the row's index. What is not finite is left out.
    """
    x, reference = x.double(), reference.double()
    finite = x.isfinite() & reference.isfinite()
    norms = reference.where(finite, 0.0).norm(dim=-1)
    errors = (x - reference).where(finite, 0.0).norm(dim=-1)
    errors /= (norms + norms.square().mean().sqrt()).clamp(min=torch.finfo(torch.float64).tiny)
    place = torch.unravel_index(errors.argmax(), errors.shape)
    return float(errors.max()), [int(index) for index in place]


def is_rounding(reference):
    """Whether a float64 gradient is 0 but for rounding errors, as that of a bias that adds the same
    number to all scores of a query: relative errors are meaningless there.
    """
    return bool(reference.detach().double().norm() < 1e-9)


MANY = 256  # elements, of which the root mean square of rounding errors varies by 5 %


@dataclass
class _Total:
    """Sums of squares over the draws of one tensor, and of its elements."""

    dtype: torch.dtype
    of_ours: float = 0.0
    of_eager: float = 0.0
    of_reference: float = 0.0
    elements: int = 0

    def add(self, x, e, ref):
        self.of_ours += float((x.double() - ref).norm()) ** 2
        self.of_eager += float((e.double() - ref).norm()) ** 2
        self.of_reference += float(ref.norm()) ** 2
        self.elements += ref.numel()

    def excess(self, ulp):
        """The figures, where they break the law; of zeros the absolute ones."""
        norm = math.sqrt(self.of_reference)
        error, eager = (math.sqrt(one) / (norm or 1.0) for one in (self.of_ours, self.of_eager))
        ulp = torch.finfo(self.dtype).eps if ulp is None else ulp
        allowed = 1.25 * eager + max(ulp, least_ulp(self.dtype, self.elements, norm))
        return "" if error <= allowed else f"{error:.3g} > {allowed:.3g}, eager's {eager:.3g}"


def check_stacked(draw, ulp=None, draws=1):
    """Raise unless the law holds for the stacked results of several `draw()`, each
    {name: (ours, eager, reference)} of fresh inputs: of as many as give each tensor MANY elements,
    and of at least `draws`. The error of a dozen elements, or of elements that share one rounding,
    depends on chance (docs/math.md, "Where the law depends on chance"). Without `ulp`, that of each
    result's own dtype.
    """
    totals, least, drawn = {}, 0, 0
    while least < MANY or drawn < draws:
        drawn += 1
        for name, (x, e, ref) in draw().items():
            assert same_non_finite(x, ref), f"{name}: NaN or infinities elsewhere"
            totals.setdefault(name, _Total(x.dtype)).add(x, e, ref)
        least = min((total.elements for total in totals.values()), default=MANY)
    broken = [f"{name}: {wrong}" for name, total in totals.items() if (wrong := total.excess(ulp))]
    assert not broken, "; ".join(broken)


def ulps(results):
    """1 ulp of each output's own dtype: a bias may have another dtype than Q."""
    return [0.0 if x is None else torch.finfo(x.dtype).eps for x in results]


@dataclass
class Inputs:
    """Leaves of one call; `needs` says which of q, k, v, bias1, bias2 require a gradient."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias1: torch.Tensor | None = None
    bias2: torch.Tensor | None = None
    do: torch.Tensor | None = None
    needs: tuple[bool, ...] = field(default=(True,) * 5)
    row_mask: torch.Tensor | None = None
    scale: float | None = None

    def tensors(self):
        return (self.q, self.k, self.v, self.bias1, self.bias2)


def run(function, inputs, dtype=None):
    """(O, dQ, dK, dV, dbias1, dbias2) of `function(q, k, v, bias1, bias2)`, which also gets
    row_mask and scale where these are set; None where a gradient is not wanted.

    With `dtype` all tensors but masks are cast first. Without it they keep their strides and become
    leaves.
    """
    leaves = []
    for tensor, need in zip(inputs.tensors(), inputs.needs, strict=True):
        if tensor is not None:
            number = tensor.is_floating_point()
            tensor = tensor.detach().to(dtype) if dtype and number else tensor.detach()
            tensor = tensor.requires_grad_(need and number)
        leaves.append(tensor)
    options = {"row_mask": inputs.row_mask, "scale": inputs.scale}
    o = function(*leaves, **{name: x for name, x in options.items() if x is not None})
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    gradients = iter(())
    if wanted:
        do = inputs.do if inputs.do is not None else torch.randn_like(o)
        gradients = iter(torch.autograd.grad(o, wanted, do.to(o.dtype)))
    return (
        o.detach(),
        *(next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves),
    )


@contextlib.contextmanager
def determinism(wanted=True):
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def ours(q, k, v, bias1, bias2, row_mask=None, scale=None):
    return DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], row_mask=row_mask, scale=scale)


def plain(q, k, v, biases):
    """The reference with the op's signature, to stand in its place in layers."""
    return evoformer_attention(q, k, v, *biases)


def with_do(inputs):
    """inputs, with a random dO unless they have one."""
    if inputs.do is None:
        shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
        inputs.do = torch.randn(shape, device=inputs.q.device).to(inputs.q.dtype)
    return inputs


def equal_rows(inputs, N):
    """inputs of one row n, dO too, as N equal ones in the same memory. Equal terms of dbias2 are
    rounded alike, so no average hides how they are added.
    """
    with_do(inputs)
    for name in ("q", "k", "v", "bias1", "do"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            setattr(inputs, name, tensor.expand(-1, N, -1, -1, -1))
    return inputs


def run_in_dtypes(function, inputs):
    """`run`, whose results must have the dtypes of their inputs."""
    result = run(function, inputs)
    for x, tensor in zip(result, (inputs.q, *inputs.tensors()), strict=True):
        assert x is None or x.dtype == tensor.dtype, "a gradient in another dtype than its input"
    return result


def check(inputs, function=ours, eager=evoformer_attention, rows=False):
    """Raise unless `function` keeps the law on `inputs`, in comparison with `eager`; with `rows`
    also if one row of a result is far worse than all others.
    """
    inputs = with_do(inputs)
    result = run_in_dtypes(function, inputs)
    allowed = run(eager, inputs, inputs.q.dtype)
    reference = run(evoformer_attention, inputs, torch.float64)
    broken = violations(result, allowed, reference, ulps(result))
    if rows and not broken:
        broken = row_violations(result, allowed, reference)
    assert not broken, "; ".join(broken)
    return result


def check_calls(draw_inputs, draws, function=ours):
    """`check_stacked` for calls of fresh `draw_inputs()`: where few roundings decide about most of
    a result.
    """

    def draw():
        inputs = with_do(draw_inputs())
        results = (
            run_in_dtypes(function, inputs),
            run(evoformer_attention, inputs, inputs.q.dtype),
            run(evoformer_attention, inputs, torch.float64),
        )
        named = zip(NAMES, zip(*results, strict=True), strict=True)
        return {name: found for name, found in named if found[2] is not None}

    check_stacked(draw, draws=draws)


def check_often(draw_inputs, dtype):
    """`check` of `draw_inputs()`, in float32 of 16 draws together: for calls whose results break
    the law by chance once in a few hundred draws, but never 16 of them stacked.
    """
    if dtype == torch.float32:
        check_calls(draw_inputs, draws=16)
    else:
        check(draw_inputs())


def check_each_query(inputs, function=ours):
    """The law for dO of 1e-3 in one row and 1e3 in the next. Gradients that belong to one query, dq
    and dbias2, are divided by the size of its dO first: a norm over all rows would show only the
    large ones.
    """
    dtype, (*_, Lq, H, _), Dv = inputs.q.dtype, inputs.q.shape, inputs.v.shape[-1]
    size = 10 ** (6 * torch.rand(Lq, 1, dtype=torch.float64, device=inputs.q.device) - 3)
    if dtype == torch.float16:
        size = size / 10  # float16 ends at 65,504
    do = torch.randn(*inputs.q.shape[:2], Lq, H, Dv, device=inputs.q.device) * size[..., None]
    inputs.do = do.to(dtype)

    def of_one_size(result):
        o, dq, dk, dv, dbias1, dbias2 = result
        return o, dq.double() / size[..., None], dk, dv, dbias1, dbias2.double() / size

    allowed = run(evoformer_attention, inputs, dtype)
    reference = run(evoformer_attention, inputs, torch.float64)
    result = run(function, inputs)
    results = (of_one_size(each) for each in (result, allowed, reference))
    broken = violations(*results, ulps(result))
    assert not broken, "; ".join(broken)


def check_weights(inputs, function=ours):
    """The law and, for scores so large that their differences are rounded away, a further check:
    weights sum to 1, so sum_j dV_j = sum_i dO_i. Each weight and each result may be wrong by half
    an ulp, together by 1 ulp of the sum of absolute values. For 16-bit dtypes, beside whose
    rounding that of the sums is negligible.
    """
    _, _, _, dv, *_ = check(inputs, function)
    over_keys, do = dv.double().sum(2), inputs.do.double()
    error = ((over_keys - do.sum(2)).abs() / do.abs().sum(2)).max()
    allowed = torch.finfo(inputs.q.dtype).eps
    assert error <= allowed, f"sum of dV: {error:.3g} > {allowed:.3g}"
