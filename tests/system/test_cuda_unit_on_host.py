"""The exports of a CUDA unit around its kernel, compiled for the host with a kernel of stubs."""

import ctypes
import subprocess

import pytest

from op_builder import paths
from op_builder.ops.instantiations import CudaKernel
from op_builder.toolchain import host_compiler

# CUDA keeps the last error of a thread until somebody asks for it. The first launch of this kernel
# fails; the second works, and is checked by cudaGetLastError, as `kernel<<<...>>>` is.
LAUNCH = """\
#include "params.h"
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
inline cudaError_t last_error = cudaSuccess;
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
namespace cutlass { struct bfloat16_t; }
namespace ds4s {
struct PlanText {
  PlanText(char*, int64_t) {}
  int64_t length() const { return 0; }
};
}
namespace ds4s::sm90 {
inline bool has_memory = false;
template <typename, int, bool, bool>
struct Sm90Forward {
  static int64_t workspace_bytes(const FwdParams&) { return 0; }
  static void print_plan(const FwdParams&, PlanText&) {}
  static int run(const FwdParams&, cudaStream_t) {
    if (has_memory) return cudaGetLastError();
    has_memory = true;
    return last_error = cudaErrorMemoryAllocation;
  }
};
}
"""


def test_a_call_does_not_return_the_error_of_the_one_before(tmp_path):
    """A program may go on after an error: free memory and call again."""
    host = host_compiler.find_host_compiler()
    if not host.ok:
        pytest.skip(f"{host.reason}; {host.remedy}")
    unit, launch, library = (tmp_path / name for name in ("unit.cpp", "launch.h", "unit.so"))
    source = CudaKernel("sm90", "fwd", "bf16", 32, "both", True, "9.0a").source()
    unit.write_text(source.replace("sm90/forward/launch.h", launch.name))
    launch.write_text(LAUNCH)
    command = [host.path, "-std=c++17", "-shared", "-fPIC", f"-I{paths.csrc_root()}", unit]
    done = subprocess.run([*command, "-o", library], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = ctypes.CDLL(str(library)).ds4s_run
    assert [run(None, None), run(None, None)] == [2, 0]
