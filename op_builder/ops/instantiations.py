"""The list of kernels, as data: one row, one generated translation unit, one shared library.

Files, dispatch, prebuild and report follow from these rows. A row knows which C++ template it
instantiates; it does not know compilers, flags or folders (the builders do).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..toolchain.cpu_isa import CPU_ISAS

DIRECTIONS = ("fwd", "bwd")
DTYPES = ("fp32", "fp16", "bf16")

# Seconds that compiling takes on one core (nvcc 13.0, gcc 12), for who waits for the first time.
_USUAL_SECONDS = {
    "cpu": {"fwd": 2.0, "bwd": 3.0},
    "sm80": {"fwd": 6.0, "bwd": 9.0},  # and the older ones
    "sm90": {"fwd": 8.0, "bwd": 12.0},
}

_PARAMS = {"fwd": "FwdParams", "bwd": "BwdParams"}
_CPU_HEADER = {"fwd": "cpu/forward.h", "bwd": "cpu/backward.h"}
_CPU_FUNCTION = {"fwd": "ds4s::cpu::forward", "bwd": "ds4s::cpu::backward"}
_CPU_SCALAR = {"fp32": "float", "fp16": "ds4s::cpu::half_t", "bf16": "ds4s::cpu::bfloat16_t"}
_CPU_ISA = {
    "amx": "ds4s::cpu::Amx",
    "avx512": "ds4s::cpu::Avx512",
    "avx2": "ds4s::cpu::Avx2",
    "portable": "ds4s::cpu::Portable",
}

# The five exports of params.h. CPU kernels allocate what they need themselves, so their workspace
# is always 0 bytes.
_CPU_UNIT = """\
// {name}: written by op_builder/ops/instantiations.py.
#include <cstring>

#include "{header}"
#include "params.h"

DS4S_EXPORT int ds4s_abi_version() {{ return DS4S_ABI_VERSION; }}
DS4S_EXPORT const char* ds4s_name() {{ return "{name}"; }}
DS4S_EXPORT int64_t ds4s_workspace_bytes(const ds4s::{params}*) {{ return 0; }}
DS4S_EXPORT int ds4s_run(const ds4s::{params}* params, void*) {{
  return {function}<{scalar}, {isa}>(*params);
}}
DS4S_EXPORT const char* ds4s_status_string(int status) {{ return std::strerror(status); }}
"""


@dataclass(frozen=True)
class CpuKernel:
    """One CPU kernel: `isa` is what the processor and its compiler offer for `dtype`."""

    direction: str  # one of DIRECTIONS
    dtype: str  # one of DTYPES
    isa: str  # one of cpu_isa.CPU_ISAS

    @property
    def name(self) -> str:
        return f"cpu_{self.direction}_{self.dtype}_{self.isa}"

    @property
    def usual_seconds(self) -> float:
        return _USUAL_SECONDS["cpu"][self.direction]

    def source(self) -> str:
        """The whole translation unit; its includes are relative to `paths.csrc_root()`."""
        return _CPU_UNIT.format(
            name=self.name,
            header=_CPU_HEADER[self.direction],
            params=_PARAMS[self.direction],
            function=_CPU_FUNCTION[self.direction],
            scalar=_CPU_SCALAR[self.dtype],
            isa=_CPU_ISA[self.isa],
        )


# AMX multiplies bfloat16 tiles only (its float16 form is on too few processors to be worth a unit
# of its own).
CPU_KERNELS: tuple[CpuKernel, ...] = tuple(
    CpuKernel(direction, dtype, isa)
    for direction in DIRECTIONS
    for dtype in DTYPES
    for isa in CPU_ISAS
    if isa != "amx" or dtype == "bf16"
)


CUDA_DTYPES = ("fp32", "tf32", "fp16", "bf16")
# What each family has kernels for, oldest family first; "tf32" is float32 on TF32 tensor cores.
CUDA_ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "sm70": {"fwd": ("fp32", "fp16"), "bwd": ("fp32", "fp16")},
    "sm75": {"fwd": ("fp32", "fp16"), "bwd": ("fp32", "fp16")},
    "sm80": {"fwd": CUDA_DTYPES, "bwd": CUDA_DTYPES},
    "sm90": {"fwd": ("fp16", "bf16"), "bwd": ("fp16", "bf16")},
}
CUDA_FAMILIES = tuple(CUDA_ROWS)
CUDA_BIASES = ("none", "bias1", "bias2", "both")
HEAD_DIM_TIERS = (16, 32, 48, 64, 96, 128)  # a kernel serves every D and Dv up to its tier

_CUDA_SCALAR = {
    "fp32": "float",
    "tf32": "float",
    "fp16": "cutlass::half_t",
    "bf16": "cutlass::bfloat16_t",
}
_CUDA_HEADER = {"fwd": "forward/launch.h", "bwd": "backward/launch.h"}
_SM90_LAUNCH = {"fwd": "ds4s::sm90::Forward", "bwd": "ds4s::sm90::Backward"}

_CUDA_UNIT = """\
// {name}: written by op_builder/ops/instantiations.py.
#include "{header}"

DS4S_EXPORT int ds4s_abi_version() {{ return DS4S_ABI_VERSION; }}
DS4S_EXPORT const char* ds4s_name() {{ return "{name}"; }}
DS4S_EXPORT int64_t ds4s_workspace_bytes(const ds4s::{params}* params) {{
  return {workspace_bytes}(*params);
}}
DS4S_EXPORT int ds4s_run(const ds4s::{params}* params, void* stream) {{
  return {run}(*params, static_cast<cudaStream_t>(stream));
}}
DS4S_EXPORT const char* ds4s_status_string(int status) {{
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}}
"""


@dataclass(frozen=True)
class CudaKernel:
    """One kernel of a template family, compiled for one architecture."""

    family: str  # one of CUDA_FAMILIES: whose instructions it uses
    direction: str  # one of DIRECTIONS
    dtype: str  # one of CUDA_DTYPES; "tf32": float32 tensors on TF32 tensor cores
    head_dim: int  # one of HEAD_DIM_TIERS
    bias: str  # one of CUDA_BIASES; a backward reads bias1 at run time: "none" or "bias2"
    aligned: (
        bool  # every row of q, k, v, o begins at 16 bytes and is whole 16-byte pieces; sm90: True
    )
    arch: str  # what nvcc compiles for, "9.0": at least the family's own; sm90: "9.0a"

    @property
    def name(self) -> str:
        name = f"{self.family}_{self.direction}_{self.dtype}_d{self.head_dim}_{self.bias}"
        if self.family == "sm90":  # TMA reads nothing else
            return name
        return name + ("_aligned" if self.aligned else "_unaligned")

    @property
    def usual_seconds(self) -> float:
        return _USUAL_SECONDS["sm90" if self.family == "sm90" else "sm80"][self.direction]

    def source(self) -> str:
        """The whole translation unit; its includes are relative to `paths.csrc_root()`."""
        workspace_bytes, run = self._functions()
        folder = "sm90/" if self.family == "sm90" else "sm80/"  # which serves 7.0 and 7.5 too
        return _CUDA_UNIT.format(
            name=self.name,
            header=folder + _CUDA_HEADER[self.direction],
            params=_PARAMS[self.direction],
            workspace_bytes=workspace_bytes,
            run=run,
        )

    def _functions(self) -> tuple[str, str]:
        """The C++ functions behind ds4s_workspace_bytes and ds4s_run."""
        scalar = _CUDA_SCALAR[self.dtype]
        family = f"cutlass::arch::Sm{self.family[2:]}"
        aligned = f"/*kIsAligned=*/{_cpp(self.aligned)}"
        bias1 = f"/*kBias1=*/{_cpp(self.bias in ('bias1', 'both'))}"
        bias2 = f"/*kBias2=*/{_cpp(self.bias in ('bias2', 'both'))}"
        tf32 = f"/*kTf32=*/{_cpp(self.dtype == 'tf32')}"
        tier = self.head_dim
        if self.family == "sm90":
            biases = f"{bias1}, {bias2}" if self.direction == "fwd" else bias2
            launch = f"{_SM90_LAUNCH[self.direction]}<{scalar}, {tier}, {biases}>"
            return f"{launch}::workspace_bytes", f"{launch}::run"
        if self.direction == "fwd":
            launch = (
                f"ds4s::Forward<{scalar}, {family}, {aligned}, {tier}, {tier}, "
                f"{bias1}, {bias2}, {tf32}>"
            )
            return f"{launch}::workspace_bytes", f"{launch}::run"
        arguments = f"<{scalar}, {family}, {tier}, {aligned}, {tf32}, {bias2}>"
        return (
            f"ds4s::backward_workspace_bytes{arguments}",
            f"ds4s::launch_backward{arguments}",
        )


def has_row(family: str, direction: str, dtype: str) -> bool:
    """Whether `family` has kernels of this direction for this dtype (one of CUDA_DTYPES)."""
    return dtype in CUDA_ROWS[family][direction]


def serving_dtype(family: str, dtype: str) -> str:
    """That of the kernels which serve `dtype` in `family`: bfloat16 goes through float32 where no
    instruction multiplies it.
    """
    return "fp32" if dtype == "bf16" and not has_row(family, "fwd", dtype) else dtype


def _cpp(value: bool) -> str:
    return "true" if value else "false"


def head_dim_tier(head_dim: int) -> int:
    """The smallest tier that serves `head_dim`; raises ValueError past the largest."""
    for tier in HEAD_DIM_TIERS:
        if head_dim <= tier:
            return tier
    raise ValueError(f"head dimension {head_dim} is above the largest tier, {HEAD_DIM_TIERS[-1]}")
