"""The list of kernels, as data: one row, one generated translation unit, one shared library.

Files, dispatch, prebuild and report follow from these rows. A row names the C++ template that it
instantiates; compilers, flags and folders are the builders' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..toolchain.cpu_isa import CPU_ISAS
from .unit_texts import CPU_UNIT, CUDA_PLAN, CUDA_UNIT

DIRECTIONS = ("fwd", "bwd")
DTYPES = ("fp32", "fp16", "bf16")

# Seconds to compile on one core (gcc 12; below, nvcc 13.0), for the display of a first compilation.
_CPU_SECONDS = {"fwd": 2.0, "bwd": 3.0}

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


@dataclass(frozen=True)
class CpuKernel:
    """One CPU kernel; `isa` is the best one of processor and compiler for `dtype`."""

    direction: str  # one of DIRECTIONS
    dtype: str  # one of DTYPES
    isa: str  # one of cpu_isa.CPU_ISAS

    @property
    def name(self) -> str:
        return f"cpu_{self.direction}_{self.dtype}_{self.isa}"

    @property
    def usual_seconds(self) -> float:
        return _CPU_SECONDS[self.direction]

    def source(self) -> str:
        """The whole translation unit; its includes are relative to `paths.csrc_root()`."""
        return CPU_UNIT.format(
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


CUDA_DTYPES = ("fp32", "tf32", "fp16", "bf16")  # "tf32": float32 on TF32 tensor cores
CUDA_BIASES = ("none", "bias1", "bias2", "both")
HEAD_DIM_TIERS = (16, 32, 48, 64, 96, 128)  # a kernel serves every D and Dv up to its tier
# Beyond these, for kernels that compute their outputs' columns in parts: Family.wide.
WIDE_TIER = 256


@dataclass(frozen=True)
class Family:
    """Templates for the instructions of one generation of GPUs: the devices that they serve, and
    the functions that a unit calls.
    """

    name: str
    first: tuple[int, int]  # the compute capabilities that it serves, both included
    last: tuple[int, int]
    # By direction: for each dtype of calls the dtype of the kernels that serve it.
    dtypes: Mapping[str, Mapping[str, str]]
    backend: str  # module of deepspeed4science/backends
    folder: str  # has forward/launch.h and backward/launch.h
    # By direction: the functions behind ds4s_workspace_bytes and ds4s_run.
    functions: Mapping[str, tuple[str, str]]
    usual_seconds: Mapping[str, float]
    # By direction: the dtypes that have kernels of WIDE_TIER.
    wide: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # By direction, where there is a plan: the function behind ds4s_plan, (params, PlanText&).
    plans: Mapping[str, str] = field(default_factory=dict)
    target: str = ""  # the only target with its instructions; empty: all from `first` on
    first_cuda: str = ""  # whose nvcc compiles for `target`
    leaves: str = ""  # calls that it leaves to the next family of its devices, in words
    aligned_only: bool = False  # has no kernels for rows that are not whole 16-byte pieces

    def serves(self, device: tuple[int, int]) -> bool:
        return self.first <= device <= self.last

    def runs_on(self, device: tuple[int, int]) -> bool:
        """Whether its code runs on a device, so that it can be forced there."""
        return self.serves(device) or (not self.target and self.first <= device)

    def dtype_for(self, direction: str, dtype: str) -> str | None:
        """The dtype of the kernels that serve `dtype`; None where there are none."""
        return self.dtypes.get(direction, {}).get(dtype)

    def largest_head_dim(self, direction: str, dtype: str) -> int:
        """The largest D and Dv of the kernels that serve `dtype`."""
        has_wide = self.dtype_for(direction, dtype) in self.wide.get(direction, ())
        return WIDE_TIER if has_wide else HEAD_DIM_TIERS[-1]


def _both(*dtypes: str, **served: str) -> dict[str, dict[str, str]]:
    """For both directions: dtypes with kernels of their own, and some served by another's."""
    return {direction: {one: one for one in dtypes} | served for direction in DIRECTIONS}


_SM80_FORWARD = (
    "ds4s::Sm80Forward<{scalar}, {arch}, {aligned}, {tier}, {tier}, {bias1}, {bias2}, {tf32}>"
)
_SM80_BACKWARD = (
    "ds4s::RoundedDbias<ds4s::Sm80Backward<{scalar}, {arch}, {aligned}, {tier}, {bias2}, {tf32}>>"
)
_SM90_FORWARD = "ds4s::sm90::Sm90Forward<{scalar}, {tier}, {bias1}, {bias2}>"
_SM90_BACKWARD = "ds4s::RoundedDbias<ds4s::sm90::Sm90Backward<{scalar}, {tier}, {bias2}>>"

_SM80_TEMPLATES: dict[str, Any] = {
    "backend": "sm80",
    "folder": "sm80",
    "functions": {
        "fwd": (f"{_SM80_FORWARD}::workspace_bytes", f"{_SM80_FORWARD}::run"),
        "bwd": (f"{_SM80_BACKWARD}::workspace_bytes", f"{_SM80_BACKWARD}::run"),
    },
    "plans": {
        "fwd": f"{_SM80_FORWARD}::print_plan",
        "bwd": f"{_SM80_BACKWARD}::print_plan",
    },
    "usual_seconds": {"fwd": 6.0, "bwd": 9.0},
    "wide": {"fwd": CUDA_DTYPES},
}
_NEWEST = (99, 9)

# Oldest first. A call goes to the newest that serves its device and takes it.
FAMILIES: dict[str, Family] = {
    one.name: one
    for one in (
        # No instruction multiplies bfloat16 before 8.0.
        Family("sm70", (7, 0), (7, 4), _both("fp32", "fp16", bf16="fp32"), **_SM80_TEMPLATES),
        Family("sm75", (7, 5), (7, 9), _both("fp32", "fp16", bf16="fp32"), **_SM80_TEMPLATES),
        # mma.sync is legal in all later ones, too.
        Family(
            "sm80",
            (8, 0),
            _NEWEST,
            _both(*CUDA_DTYPES),
            **_SM80_TEMPLATES | {"wide": {"fwd": CUDA_DTYPES, "bwd": ("fp16", "bf16")}},
        ),
        # wgmma and TMA exist only in code for exactly this target.
        Family(
            "sm90",
            (9, 0),
            (9, 0),
            _both("fp16", "bf16"),
            backend="sm90",
            folder="sm90",
            functions={
                "fwd": (f"{_SM90_FORWARD}::workspace_bytes", f"{_SM90_FORWARD}::run"),
                "bwd": (f"{_SM90_BACKWARD}::workspace_bytes", f"{_SM90_BACKWARD}::run"),
            },
            plans={
                "fwd": f"{_SM90_FORWARD}::print_plan",
                "bwd": f"{_SM90_BACKWARD}::print_plan",
            },
            usual_seconds={"fwd": 8.0, "bwd": 12.0},
            target="9.0a",
            first_cuda="12.1",
            leaves="float32 and what TMA cannot read",
            aligned_only=True,
        ),
    )
}
CUDA_FAMILIES = tuple(FAMILIES)
OLDEST = next(iter(FAMILIES.values())).first  # compute capability that is served

# The largest head dimensions for which a device's shared memory suffices, where they are below its
# families': compute capability 7.5 has 64 KiB.
_NARROW: dict[tuple[tuple[int, int], str], int] = {((7, 5), "fp32"): 96}


def serving(device: tuple[int, int]) -> tuple[Family, ...]:
    """The families for a compute capability, best first; none below OLDEST."""
    return tuple(one for one in reversed(FAMILIES.values()) if one.serves(device))


def device_head_dim(device: tuple[int, int], dtype: str) -> int:
    """The largest head dimension whose kernels of a dtype fit on a device."""
    return _NARROW.get((device, dtype), WIDE_TIER)


_CUDA_SCALAR = {
    "fp32": "float",
    "tf32": "float",
    "fp16": "cutlass::half_t",
    "bf16": "cutlass::bfloat16_t",
}
_CUDA_HEADERS = {
    "fwd": ("{folder}/forward/launch.h",),
    "bwd": ("common/rounded_dbias.h", "{folder}/backward/launch.h"),
}


@dataclass(frozen=True)
class CudaKernel:
    """One kernel of a template family, compiled for one architecture."""

    family: str  # one of CUDA_FAMILIES
    direction: str  # one of DIRECTIONS
    dtype: str  # one of CUDA_DTYPES; "tf32": float32 tensors on TF32 tensor cores
    head_dim: int  # one of HEAD_DIM_TIERS, or WIDE_TIER
    bias: str  # one of CUDA_BIASES; a backward reads bias1 at run time: "none" or "bias2"
    aligned: bool  # every row of q, k, v, o begins at 16 bytes and is whole 16-byte pieces
    arch: str  # what nvcc compiles for: the family's target, or "8.6", at least its first

    @property
    def name(self) -> str:
        name = f"{self.family}_{self.direction}_{self.dtype}_d{self.head_dim}_{self.bias}"
        if FAMILIES[self.family].aligned_only:
            return name
        return name + ("_aligned" if self.aligned else "_unaligned")

    @property
    def first(self) -> tuple[int, int]:
        return FAMILIES[self.family].first

    @property
    def usual_seconds(self) -> float:
        return FAMILIES[self.family].usual_seconds[self.direction]

    def source(self) -> str:
        """The whole translation unit; its includes are relative to `paths.csrc_root()`."""
        family = FAMILIES[self.family]
        arguments = {
            "scalar": _CUDA_SCALAR[self.dtype],
            "arch": f"cutlass::arch::Sm{self.family[2:]}",
            "aligned": f"/*kAligned=*/{_cpp(self.aligned)}",
            "tier": self.head_dim,
            "bias1": f"/*kHasBias1=*/{_cpp(self.bias in ('bias1', 'both'))}",
            "bias2": f"/*kHasBias2=*/{_cpp(self.bias in ('bias2', 'both'))}",
            "tf32": f"/*kTf32=*/{_cpp(self.dtype == 'tf32')}",
        }
        workspace_bytes, run = family.functions[self.direction]
        plan = family.plans.get(self.direction)
        headers = _CUDA_HEADERS[self.direction]
        return (CUDA_UNIT + (CUDA_PLAN if plan else "")).format(
            name=self.name,
            includes="\n".join(f'#include "{one}"' for one in headers).format(folder=family.folder),
            params=_PARAMS[self.direction],
            plan=plan and plan.format(**arguments),
            workspace_bytes=workspace_bytes.format(**arguments),
            run=run.format(**arguments),
        )


def has_row(family: str, direction: str, dtype: str) -> bool:
    """Whether `family` has kernels of this direction for this dtype (one of CUDA_DTYPES)."""
    return FAMILIES[family].dtype_for(direction, dtype) == dtype


def _cpp(value: bool) -> str:
    return "true" if value else "false"


def head_dim_tier(head_dim: int) -> int:
    """The smallest tier that serves `head_dim`; raises ValueError past the largest."""
    for tier in (*HEAD_DIM_TIERS, WIDE_TIER):
        if head_dim <= tier:
            return tier
    raise ValueError(f"head dimension {head_dim} is above the largest tier, {WIDE_TIER}")
