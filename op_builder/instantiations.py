"""The list of kernels, as data: one row, one generated translation unit, one shared library.

Files, dispatch, prebuild and report follow from these rows. A row knows which C++ template it
instantiates; it does not know compilers, flags or folders (the builders do).
"""

from __future__ import annotations

from dataclasses import dataclass

# DS4S_ABI_VERSION of params.h: a library that answers another number is not ours to call. A test
# compares the two.
ABI_VERSION = 1

DIRECTIONS = ("fwd", "bwd")
DTYPES = ("fp32", "fp16", "bf16")
CPU_ISAS = ("amx", "avx512", "avx2", "portable")  # best first

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
// {name}: written by op_builder/instantiations.py.
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
    isa: str  # one of CPU_ISAS

    @property
    def name(self) -> str:
        return f"cpu_{self.direction}_{self.dtype}_{self.isa}"

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
