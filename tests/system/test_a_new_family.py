"""A family of kernels is added by its folder, its row and its backend. What docs/adding-a-kernel.md
says is done in a copy of the repository; host code, which a stand-in for nvcc compiles, is the
kernel.
"""

import json
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests import fakes

from . import trees

ROW = "op_builder/ops/instantiations.py"
BACKEND = "deepspeed4science/backends/sm100.py"
KERNEL = "csrc/deepspeed4science/evoformer_attn/sm100/forward/launch.h"
LAUNCH = """\
#pragma once

#include <cmath>
#include <vector>

#include "common/plan_print.h"
#include "params.h"

namespace ds4s::sm100 {

template <typename scalar_t, int kHeadDim>
struct Sm100Forward {
  static int64_t workspace_bytes(const FwdParams& p) { return p.Lk * int64_t(sizeof(float)); }
  static int run(const FwdParams& p, cudaStream_t) {
    if (p.D > kHeadDim || p.Dv > kHeadDim || p.workspace == nullptr) return cudaErrorInvalidValue;
    for (int64_t b = 0; b < p.B; ++b)
      for (int64_t n = 0; n < p.N; ++n)
        for (int64_t h = 0; h < p.H; ++h)
          for (int64_t i = 0; i < p.Lq; ++i) one_query(p, b, n, h, i);
    return cudaSuccess;
  }
  static void print_plan(const FwdParams& p, PlanText& text) {
    text.add("queries", p.Lq), text.add("workspace_bytes", workspace_bytes(p));
  }

 private:
  static int64_t at(const int64_t* stride, int64_t b, int64_t n, int64_t l, int64_t h) {
    return b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
  }
  static void one_query(const FwdParams& p, int64_t b, int64_t n, int64_t h, int64_t i) {
    const auto* q = static_cast<const scalar_t*>(p.q) + at(p.q_stride, b, n, i, h);
    auto* o = static_cast<scalar_t*>(p.o) + at(p.o_stride, b, n, i, h);
    auto* weights = static_cast<float*>(p.workspace);
    const auto* bias1 = static_cast<const scalar_t*>(p.bias1);
    const auto* bias2 = static_cast<const scalar_t*>(p.bias2);
    const int64_t* stride1 = p.bias1_stride;
    double sum = 0;
    for (int64_t j = 0; j < p.Lk; ++j) {
      const auto* k = static_cast<const scalar_t*>(p.k) + at(p.k_stride, b, n, j, h);
      float score = 0;
      for (int64_t d = 0; d < p.D; ++d) score += q[d] * k[d];
      score *= p.scale;
      if (bias1) score += bias1[b * stride1[0] + n * stride1[1] + j * stride1[2]];
      if (bias2) score += bias2[at(p.bias2_stride, b, h, i, j)];
      sum += weights[j] = std::exp(score);
    }
    std::vector<double> total(p.Dv);
    for (int64_t j = 0; j < p.Lk; ++j) {
      const auto* v = static_cast<const scalar_t*>(p.v) + at(p.v_stride, b, n, j, h);
      for (int64_t d = 0; d < p.Dv; ++d) total[d] += weights[j] * v[d];
    }
    for (int64_t d = 0; d < p.Dv; ++d) o[d] = scalar_t(total[d] / sum);
  }
};

}  // namespace ds4s::sm100
"""

# Tensors are on the CPU, the devices that backends are asked about are of 10.0.
SCRIPT = """
import json
import torch
from deepspeed4science import DS4Sci_EvoformerAttention, dispatch
from deepspeed4science.backends import cuda
from deepspeed4science.call import ForwardCall
from deepspeed4science.problem import describe
from deepspeed4science.reference import evoformer_attention
from op_builder import EvoformerAttnBuilder
from op_builder.ops import presets
from op_builder.toolchain import arch

real, ran = cuda.CudaBackend.device_obstacle, []
def launch(self, kernel, packed, device):
    ran.append((kernel.name, kernel.plan(packed)))
    return kernel.run(packed, 0)
def workspace_bytes(self, kernel, packed, device):
    return kernel.workspace_bytes(packed)
cuda.capability = lambda device: (10, 0)
cuda.CudaBackend.device_obstacle = lambda self, device: real(self, torch.device("cuda", 0))
cuda.CudaBackend.launch = launch
cuda.CudaBackend.workspace_bytes = workspace_bytes
dispatch.BACKENDS = dispatch.BACKENDS[1:]

q, k, v = torch.randn(3, 2, 3, 9, 2, 24).unbind()
biases = torch.randn(2, 3, 1, 1, 9), torch.randn(2, 1, 2, 9, 9)
o = DS4Sci_EvoformerAttention(q, k, v, biases)
difference = (o - evoformer_attention(q.double(), k.double(), v.double(), *biases)).abs().max()

def choice(direction, dtype):
    tensors = [x.to(dtype) for x in (q, k, v)]
    problem = describe(ForwardCall(*tensors, None, None, False))
    chosen = dispatch.choose(problem, direction, tensors)
    return chosen.kernel.name, chosen.reason

builder = EvoformerAttnBuilder()
wanted = presets.calls(presets.INSTALL_ROWS[:1], dtypes=("fp32", "bf16"))
print(json.dumps({
    "ran": ran,
    "difference": difference.item(),
    "families": builder.families((10, 0)),
    "elsewhere": [builder.families(device) for device in ((9, 0), (10, 3), (12, 0))],
    "note": builder.family_note((10, 0)),
    "fp32": choice("fwd", torch.float32),
    "bf16": choice("fwd", torch.bfloat16),
    "backward": choice("bwd", torch.float32),
    "installed": [one.name for one in builder.kernels_for(wanted, arch.parse("10.0"))],
}))
"""


def documented():
    """The texts of the row and of the backend."""
    page = (trees.REPOSITORY / "docs" / "adding-a-kernel.md").read_text()
    row, backend = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return row, backend


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the copy with the new family says."""
    pytest.importorskip("torch")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("family")
    copy = trees.clone(folder / "copy", without=("tests", "benchmarks", "docs"))
    row, backend = documented()
    end_of_families = "    )\n}\nCUDA_FAMILIES = "
    rows = (copy / ROW).read_text()
    assert rows.count(end_of_families) == 1
    row = textwrap.indent(row.rstrip() + ",\n", " " * 8)
    (copy / ROW).write_text(rows.replace(end_of_families, row + end_of_families))
    (copy / BACKEND).write_text(backend)
    fakes.file(copy / KERNEL, LAUNCH)
    fakes.host_toolkit(folder / "cuda", compiler, (*fakes.DEFAULT_TARGETS, "90a", "100a"))
    fakes.cutlass(folder / "cutlass" / "include")
    variables = {
        "CUDA_HOME": str(folder / "cuda"),
        "CUTLASS_PATH": str(folder / "cutlass"),
        "DS4S_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(copy),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=trees.environment(folder, **variables),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_its_kernel_is_compiled_and_computes_the_call(answers):
    ((name, _),) = answers["ran"]
    assert name == "sm100_fwd_fp32_d32_both"
    assert answers["difference"] < 1e-5


def test_it_tells_what_it_runs(answers):
    ((_, plan),) = answers["ran"]
    assert plan == "queries=9 workspace_bytes=36"


def test_it_serves_its_own_devices_only(answers):
    assert answers["families"] == ["sm100", "sm80"]
    assert answers["elsewhere"] == [["sm90", "sm80"], ["sm80"], ["sm80"]]
    assert answers["note"] == "sm80 for 16 bits and gradients"


def test_what_it_does_not_take_is_the_next_ones(answers):
    assert answers["fp32"] == ["sm100_fwd_fp32_d32_none", ""]
    instead = "Sm80 takes the place of Sm100"
    name, reason = answers["bf16"]
    assert name == "sm80_fwd_bf16_d32_none_aligned"
    assert reason == f"{instead} (fwd): no kernel for torch.bfloat16"
    name, reason = answers["backward"]
    assert name == "sm80_bwd_fp32_d32_none_aligned"
    assert reason == f"{instead} (bwd): no kernel for torch.float32"


def test_an_install_compiles_it(answers):
    assert answers["installed"] == [
        "sm100_fwd_fp32_d32_both",
        "sm80_bwd_fp32_d32_bias2_aligned",
        "sm80_fwd_bf16_d32_both_aligned",
        "sm80_bwd_bf16_d32_bias2_aligned",
    ]
