"""The headers with DeepSpeed's names compile, also to true code for Volta, and their published
examples. Needs nvcc and no GPU; the examples also run where there is one.
"""

import ctypes
import re
from pathlib import Path

import pytest

from tests.system.machine_code import compiled, disassembler, wheel_folders

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = tuple(
    REPOSITORY / "tests" / "cpp" / "device" / f"{name}.cu"
    for name in ("forward_examples", "forward_tiles", "epilogue_grad_bias")
)


SM70 = """\
#include "kernel_forward.h"
#include "kernel_backward.h"
template <int kHeadDim>
using Kernel = AttentionKernel<cutlass::half_t, cutlass::arch::Sm70, true, 64, 32, true, true,
                               BroadcastA, BroadcastB, kHeadDim>;
template __global__ void attention_forward<Kernel<32>>(Kernel<32>::Params);
template __global__ void attention_forward<Kernel<64>>(Kernel<64>::Params);
using Backward = AttentionBackwardKernel<cutlass::half_t, cutlass::arch::Sm70, true, 32, true>;
template __global__ void ds4s::backward_dq_dkdv<Backward::Owned<Backward::Gradients::kDq>>(
    const __grid_constant__ Backward::Params, const __grid_constant__ ds4s::TileOrder, int);
template __global__ void ds4s::backward_dbias2<Backward::Dbias2>(
    const __grid_constant__ Backward::Params, int);
"""


class Nvrtc:
    """The runtime compiler of CUDA 12, the last that makes machine code for Volta."""

    WHEELS = "nvidia-cuda-nvrtc-cu12, nvidia-cuda-runtime-cu12 and nvidia-cuda-cccl-cu12 12.9"

    def __init__(self):
        libraries = [
            library
            for folder in wheel_folders("cuda_nvrtc")
            for library in folder.glob("lib/libnvrtc.so.12")
        ]
        packages = ("cuda_runtime", "cuda_cccl")
        self.includes = [folder / "include" for p in packages for folder in wheel_folders(p)]
        if not libraries or len(self.includes) < len(packages):
            pytest.skip(f"the wheels {self.WHEELS} are not installed")
        self.library = ctypes.CDLL(str(libraries[0]))

    def text(self, program, name):
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{name}")(program, buffer)
        return buffer.raw

    def compile(self, source, options):
        """(status, log, machine code)"""
        program = ctypes.c_void_p()
        self.library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"unit.cu", 0, None, None
        )
        words = [str(word).encode() for word in options]
        words += [f"-I{folder}".encode() for folder in self.includes]
        status = self.library.nvrtcCompileProgram(
            program, len(words), (ctypes.c_char_p * len(words))(*words)
        )
        log = self.text(program, "ProgramLog").decode()
        return status, log, b"" if status else self.text(program, "CUBIN")


def test_volta_machine_code(includes, tmp_path):
    """True sm_70 code, which nvcc 13 refuses: device headers stay free of host-only includes."""
    options = ["--std=c++17", "-arch=sm_70", "--ptxas-options=-v", "-default-device", *includes]
    status, log, cubin = Nvrtc().compile(SM70, options)
    assert status == 0, log
    spills = {
        name: int(stores)
        for name, stores in re.findall(
            r"Function properties for (\S+)\s.*?(\d+) bytes spill stores", log, re.DOTALL
        )
        if "attention_forward" in name
    }
    assert spills and not any(spills.values()), log
    path = tmp_path / "volta.cubin"
    path.write_bytes(cubin)
    tool = disassembler()
    if tool and "SM70" in compiled([tool, "--help"]):  # from 13.1 on it refuses Volta's code
        assert re.search(r"\bHMMA\.884\.", compiled([tool, "-c", path]))


ROW_BIAS_SECOND = """\
#include "kernel_forward.h"
using Kernel = AttentionKernel<cutlass::half_t, cutlass::arch::Sm80, true, 32, 32, true, true,
                               BroadcastNoLoad, BroadcastA, 16>;
template __global__ void attention_forward<Kernel>(Kernel::Params);
"""


def test_a_row_bias_may_be_the_second_one(nvcc, includes, tmp_path):
    """Its first elements are loaded before a block has stored addresses in shared memory."""
    tool = disassembler()
    if not tool:
        pytest.skip("no nvdisasm")
    source, cubin = tmp_path / "second.cu", tmp_path / "second.cubin"
    source.write_text(ROW_BIAS_SECOND)
    flags = ["-std=c++17", "-cubin", "-arch=sm_80", "-diag-suppress=128"]
    compiled([nvcc.path, *flags, *includes, "-o", cubin, source])
    begin, *_ = re.split(r"\bSTS\b", compiled([tool, "-c", cubin]), maxsplit=1)
    assert "LDG" in begin and not re.search(r"\bLDS\S* R\d", begin)


HEADERS = (
    "kernel_forward.h",
    "epilogue/epilogue_grad_bias.h",
    "epilogue/epilogue_rescale_output.h",
    "transform/bias_broadcast.h",
)


def test_headers_by_their_published_paths(nvcc, includes, tmp_path):
    """Nothing but the repository's root and CUTLASS on the include path."""
    root = "csrc/deepspeed4science/evoformer_attn"
    source = tmp_path / "headers.cu"
    source.write_text("".join(f'#include "{root}/{header}"\n' for header in HEADERS))
    flags = ["-std=c++17", "-cubin", "-arch=sm_80", f"-I{REPOSITORY}", includes[1]]
    compiled([nvcc.path, *flags, "-o", tmp_path / "headers.cubin", source])


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
def test_examples_compile(source, nvcc, includes, tmp_path):
    """The headers' published examples, as they are."""
    flags = ["-std=c++17", "-cubin", "-arch=sm_80", "-Ofc=max"]
    compiled([nvcc.path, *flags, *includes, "-o", tmp_path / "examples.cubin", source])


@pytest.mark.gpu
@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(source, nvcc, includes, tmp_path):
    """The same on this machine's GPU, each against a loop on the host."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    program = tmp_path / "examples"
    flags = ["-std=c++17", "-O2", f"-arch=sm_{major}{minor}", "-cudart", "static"]
    compiled([nvcc.path, *flags, *includes, "-o", program, source])
    compiled([program])
