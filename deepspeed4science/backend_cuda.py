"""What the CUDA backends do alike, on the tensor's device and the current stream; the Sm70, Sm75
and Sm80 templates need no more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import struct
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepspeed4science import params
from deepspeed4science.backend import DTYPE_NAMES, Backend, Gradients
from deepspeed4science.problem import Problem
from op_builder import EvoformerAttnBuilder, env
from op_builder.cache.loaded_kernel import LoadedKernel
from op_builder.errors import BuildError
from op_builder.ops.instantiations import HEAD_DIM_TIERS, CudaKernel, has_row, serving_dtype

logger = logging.getLogger(__name__)

_POINTER = struct.Struct("=Q")
_WORKSPACE_AT = {
    params.FWD_LAYOUT.size: 8 * params.FWD_POINTERS.index("workspace"),
    params.BWD_LAYOUT.size: 8 * params.BWD_POINTERS.index("workspace"),
}


class CudaBackend(Backend):
    """One template family; takes calls on devices that it is chosen for
    (EvoformerAttnBuilder.families).
    """

    def __init__(self, family: str) -> None:
        self.name = family.capitalize()
        self._family = family
        self._builder = EvoformerAttnBuilder()
        self._kernels: dict[CudaKernel, LoadedKernel] = {}
        self._specs: dict[tuple[object, ...], CudaKernel] = {}
        self._prefetched: set[CudaKernel] = set()
        self._families: dict[tuple[torch.device, str | None], tuple[str, ...]] = {}

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        if problem.device.type != "cuda":
            return [f"tensors are on {problem.device}, not on a CUDA device"]
        try:
            chosen = self._families_on(problem.device)
        except BuildError as error:
            return [str(error)]
        major, minor = _capability(problem.device)
        reasons = []
        if self._family not in chosen:
            served = f"compute capability {major}.{minor} is served by {chosen[0]}"
            reasons.append(served)
        dtype = self._kernel_dtype(problem)
        if not has_row(self._family, "fwd", DTYPE_NAMES[dtype]):
            reasons.append("float32: wgmma multiplies 16-bit numbers")
        if max(problem.D, problem.Dv) > HEAD_DIM_TIERS[-1]:
            largest = f"D = {problem.D}, Dv = {problem.Dv}"
            reasons.append(f"{largest}: the largest head dimension is {HEAD_DIM_TIERS[-1]}")
        elif (
            (major, minor) == (7, 5) and dtype == torch.float32 and max(problem.D, problem.Dv) > 96
        ):
            reasons.append(
                "float32 (through which bfloat16 goes, too) with a head dimension above 96 needs "
                "more than the 64 KiB of shared memory of compute capability 7.5; use float16"
            )
        return reasons

    def _kernel_dtype(self, problem: Problem) -> torch.dtype:
        """What the kernels of this family compute a call in."""
        serving = serving_dtype(self._family, DTYPE_NAMES[problem.dtype])
        return problem.dtype if serving == DTYPE_NAMES[problem.dtype] else torch.float32

    def forward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: Tensor | None,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = self._kernel_dtype(problem)
        if dtype == problem.dtype:
            return super().forward(problem, q, k, v, *others, with_lse=with_lse)
        _tell_of_float32()
        wide = replace(problem, dtype=dtype)
        q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
        o, lse = super().forward(wide, q, k, v, *others, with_lse=with_lse)
        return o.to(problem.dtype), lse

    def backward(
        self,
        problem: Problem,
        do_: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *others: Tensor | None,
        wanted: Sequence[bool],
    ) -> Gradients:
        dtype = self._kernel_dtype(problem)
        if dtype == problem.dtype:
            return super().backward(problem, do_, q, k, v, o, lse, *others, wanted=wanted)
        wide = replace(problem, dtype=dtype)
        do_, q, k, v, o = (tensor.to(dtype) for tensor in (do_, q, k, v, o))
        gradients = super().backward(wide, do_, q, k, v, o, lse, *others, wanted=wanted)
        dq, dk, dv = (None if x is None else x.to(problem.dtype) for x in gradients[:3])
        return dq, dk, dv, *gradients[3:]

    def _families_on(self, device: torch.device) -> tuple[str, ...]:
        """The builder's answer, which takes milliseconds, asked once."""
        key = (device, env.text("DS4S_CUDA_FAMILY"))
        known = self._families.get(key)
        if known is None:
            known = self._families[key] = self._builder.families(_capability(device))
        return known

    def _prefetch_backward(self, problem: Problem, inputs: Sequence[Tensor]) -> None:
        spec = self._spec("bwd", problem, inputs)
        if spec not in self._prefetched:
            self._prefetched.add(spec)
            self._builder.prefetch([spec])

    def _kernel(
        self, direction: str, problem: Problem, tensors: Sequence[Tensor | None]
    ) -> LoadedKernel:
        spec = self._spec(direction, problem, tensors)
        kernel = self._kernels.get(spec)
        if kernel is None:
            kernel = self._kernels[spec] = self._builder.load(kernels=[spec]).kernel(spec)
        return kernel

    def _spec(
        self, direction: str, problem: Problem, tensors: Sequence[Tensor | None]
    ) -> CudaKernel:
        family, aligned = self._row(direction, problem, tensors)
        dtype = DTYPE_NAMES[problem.dtype]
        if dtype == "fp32" and family == "sm80" and _allows_tf32():
            dtype = "tf32"
        bias = _BIAS_NAMES[problem.bias1 is not None, problem.bias2 is not None]
        key = (family, direction, dtype, problem.D, problem.Dv, bias, aligned, problem.device)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = self._builder.kernel(
                family=family,
                direction=direction,
                dtype=dtype,
                head_dim=max(problem.D, problem.Dv),
                bias=bias,
                aligned=aligned,
                device=_capability(problem.device),
            )
        return spec

    def _row(
        self, direction: str, problem: Problem, tensors: Sequence[Tensor | None]
    ) -> tuple[str, bool]:
        """family and aligned of the kernel that suits these tensors."""
        return self._family, all(tensor is None or _is_aligned(tensor) for tensor in tensors)

    def _options(self, problem: Problem) -> tuple[int, int]:
        return 0, int(torch.are_deterministic_algorithms_enabled())

    def _prepare_bias(self, bias: Tensor | None, problem: Problem) -> Tensor | None:
        """Kernels read biases in the dtype of Q; what is finite stays finite (-1e9 in float16)."""
        if bias is None or bias.dtype == problem.dtype:
            return bias
        limits = torch.finfo(problem.dtype)
        if torch.finfo(bias.dtype).max <= limits.max:
            return bias.to(problem.dtype)
        bias = bias.float()  # bfloat16 has no number between float16's largest and 65,536
        within = bias.clamp(limits.min, limits.max)
        return torch.where(bias.isfinite(), within, bias).to(problem.dtype)

    def _run(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        with torch.cuda.device(device):
            num_bytes = kernel.workspace_bytes(packed)
            workspace = None  # stays alive until the launch; the allocator keeps it for the stream
            if num_bytes > 0:
                workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                at = _WORKSPACE_AT[len(packed)]
                packed = packed[:at] + _POINTER.pack(workspace.data_ptr()) + packed[at + 8 :]
            return kernel.run(packed, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _tell_of_float32() -> None:
    """Once in a process."""
    with contextlib.suppress(Exception):  # what can be shown decides over no call
        logger.warning(
            "bfloat16 is computed in float32 on this GPU: tensor cores of compute capability 7.0 "
            "and 7.5 do not multiply it. Results are right; float16 is faster."
        )


_BIAS_NAMES = {
    (False, False): "none",
    (True, False): "bias1",
    (False, True): "bias2",
    (True, True): "both",
}


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _allows_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _is_aligned(tensor: Tensor) -> bool:
    """Every row starts at 16 bytes and its channels are whole 16-byte pieces."""
    per_piece = 16 // tensor.element_size()
    return (
        tensor.data_ptr() % 16 == 0
        and tensor.shape[-1] % per_piece == 0
        and all(stride % per_piece == 0 for stride in tensor.stride()[:-1])
    )
