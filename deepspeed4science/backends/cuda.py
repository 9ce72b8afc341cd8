"""The common part of the GPU backends; it never calls back into one of them."""

from __future__ import annotations

import functools

import torch

from deepspeed4science.backends.kernels import Kernels
from deepspeed4science.params import Options
from deepspeed4science.problem import DTYPE_NAMES, Problem
from op_builder import EvoformerAttnBuilder, env
from op_builder.cache.loaded_kernel import LoadedKernel
from op_builder.errors import BuildError
from op_builder.ops.instantiations import CudaKernel, Family

_BIAS_NAMES = {
    (False, False): "none",
    (True, False): "bias1",
    (False, True): "bias2",
    (True, True): "both",
}


class CudaBackend:
    """The kernels of one family, on the tensor's device and the current stream. Subclasses add
    `obstacles`, `spec` and `prepare`.
    """

    pads_dbias2 = False

    def __init__(self, family: Family) -> None:
        self.name = family.name.capitalize()
        self.family = family
        self._builder = EvoformerAttnBuilder()
        self.kernels = Kernels(self._builder)
        self._specs: dict[tuple[object, ...], CudaKernel] = {}

    def device_obstacle(self, device: torch.device) -> str:
        if device.type != "cuda":
            return f"tensors are on {device}, not on a CUDA device"
        if torch.version.hip:  # whose devices are called "cuda", too
            return "this PyTorch is built for AMD's GPUs (ROCm); these kernels are for NVIDIA's"
        try:
            serving = serving_families(device, env.text("DS4S_CUDA_FAMILY"))
        except BuildError as error:
            return str(error)
        if self.family.name in serving:
            return ""
        major, minor = capability(device)
        return f"compute capability {major}.{minor} is served by {serving[0]}"

    def head_dim_obstacles(self, problem: Problem, direction: str) -> list[str]:
        """The obstacle that a head dimension is above the family's largest one."""
        dtype = DTYPE_NAMES[problem.dtype]
        largest = self.family.largest_head_dim(direction, dtype)
        if max(problem.D, problem.Dv) <= largest:
            return []
        sizes = f"D = {problem.D}, Dv = {problem.Dv}"
        narrower = largest < self.family.largest_head_dim("fwd", dtype)
        whose = f" of the backward in {dtype}" if narrower else ""
        return [f"{sizes}: the largest head dimension{whose} is {largest}"]

    def row(self, problem: Problem, direction: str, dtype: str, *, aligned: bool) -> CudaKernel:
        """The kernel of this family that computes a call in `dtype`."""
        bias = _BIAS_NAMES[problem.bias1_dtype is not None, problem.bias2_dtype is not None]
        key = (direction, dtype, problem.D, problem.Dv, bias, aligned, problem.device)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = self._builder.kernel(
                family=self.family.name,
                direction=direction,
                dtype=dtype,
                head_dim=max(problem.D, problem.Dv),
                bias=bias,
                aligned=aligned,
                device=capability(problem.device),
            )
        return spec

    def rounds_dbias2(self, problem: Problem) -> bool:
        return False

    def options(self) -> Options:
        return Options(0, int(torch.are_deterministic_algorithms_enabled()))

    def workspace_bytes(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        with torch.cuda.device(device):
            size = kernel.workspace_bytes(packed)
            if size >= 0:
                self.kernels.tell_plan(kernel, packed)
            return size

    def launch(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        index = device.index
        if torch._C._cuda_getDevice() == index:  # 3 us less than the context manager
            return kernel.run(packed, torch._C._cuda_getCurrentRawStream(index))
        with torch.cuda.device(index):
            return kernel.run(packed, torch._C._cuda_getCurrentRawStream(index))


def allows_tf32() -> bool:
    """Whether PyTorch's own float32 products on a GPU may be computed in TF32.

    `torch.get_float32_matmul_precision` raises where a program has used this newer setting or two
    of the older ones.
    """
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


@functools.cache
def serving_families(device: torch.device, forced: str | None) -> tuple[str, ...]:
    """The families that serve a device, as the builder says. That takes milliseconds and is kept
    for each value of `forced`.

    Raises BuildError.
    """
    return EvoformerAttnBuilder().families(capability(device))


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
