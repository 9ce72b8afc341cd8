"""GPUs of different kinds in one machine: each gets its own build. What the driver says of them is
made up; nvcc is the real one.
"""

import json
import subprocess
import sys

import pytest

from tests import fakes

from .toys import REPOSITORY

# NVML as gpu.py uses it; FAKE_GPUS is "status/driver/name:major.minor/...".
FAKE_NVML = """\
#include <cstdio>
#include <cstdlib>
#include <cstring>
static const char* field(unsigned index) {
  static char text[256];
  std::snprintf(text, sizeof text, "%s", std::getenv("FAKE_GPUS"));
  char* rest = text;
  for (char* part; (part = strsep(&rest, "/"));)
    if (index-- == 0) return part;
  return nullptr;
}
extern "C" {
int nvmlInit_v2() { return std::atoi(field(0)); }
int nvmlShutdown() { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = std::atoi(field(1)), 0; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  for (*count = 0; field(*count + 2);) ++*count;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = reinterpret_cast<void*>(index + 2ul);
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) {
  const char* gpu = field(reinterpret_cast<unsigned long>(handle));
  return std::sscanf(std::strchr(gpu, ':'), ":%d.%d", major, minor) == 2 ? 0 : 999;
}
int nvmlDeviceGetName(void* handle, char* name, unsigned) {
  const char* gpu = field(reinterpret_cast<unsigned long>(handle));
  *std::strchr(std::strcpy(name, gpu), ':') = 0;
  return 0;
}
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A function from what the driver says to a process's variables."""
    folder = tmp_path_factory.mktemp("driver")
    source = fakes.file(folder / "nvml.cpp", FAKE_NVML)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return lambda says: {"LD_LIBRARY_PATH": str(folder), "FAKE_GPUS": says}


ASK = """\
import json
from dataclasses import asdict
from op_builder.toolchain import gpu
print(json.dumps(asdict(gpu.detect()) | {"capabilities": gpu.detect().capabilities}))
"""


@pytest.mark.parametrize(
    ("says", "gpus", "reason"),
    [
        ("0/13000/A:8.0/B:9.0/A:8.0", [["A", [8, 0]], ["B", [9, 0]], ["A", [8, 0]]], ""),
        ("0/12040/V:7.0", [["V", [7, 0]]], ""),
        ("0/13000", [], "sees no GPU"),
        ("18/13000/A:8.0", [], "does not answer (NVML status 18)"),
        ("0/13000/A:unknown", [], "does not describe its GPUs"),
    ],
    ids=["three", "one", "none", "driver and library of different versions", "no words"],
)
def test_what_the_driver_says(says, gpus, reason, driver):
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(
        command, env=driver(says), cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    assert [list(gpu.values()) for gpu in said["found"]] == gpus
    assert reason in said["reason"] and bool(reason) == bool(said["reason"])
    kinds = {tuple(capability) for _, capability in gpus}
    assert [tuple(one) for one in said["capabilities"]] == sorted(kinds, reverse=True)
    if gpus:
        version = int(says.split("/")[1])
        assert said["driver"] == [version // 1000, version % 1000 // 10]


BUILD = """
from dataclasses import dataclass
from op_builder import EvoformerAttnBuilder, paths
from op_builder.cache import cache
from op_builder.toolchain import gpu
@dataclass(frozen=True)
class Toy:
    arch: str
    first = (7, 0)
    usual_seconds = 1.0
    name = "toy"
    def source(self):
        return workshop.source().replace('#include "toy.h"', "#define TOY_STATUS 40")
builder = EvoformerAttnBuilder()
toys = [Toy(str(builder.compiled_for("sm80", device))) for device in gpu.detect().capabilities]
op = builder.load(kernels=toys)
report(
    archs=[toy.arch for toy in toys],
    origins=[op.kernel(toy).origin for toy in toys],
    paths=len({str(op.kernel(toy).path) for toy in toys}),
    targets=sorted(entry.targets for entry in cache.entries(paths.cache_root())),
)
"""


@pytest.mark.parametrize("workshop", ["CUDA"], indirect=True)
def test_each_kind_gets_its_own_build(workshop, driver):
    """One home, two kinds of GPU: neither overwrites nor loads the other's."""
    variables = driver("0/13000/NVIDIA A100:8.0/NVIDIA H200:9.0")
    first = workshop.run(BUILD, **variables).report
    assert first["archs"] == ["9.0", "8.0"]
    assert first["origins"] == ["built", "built"]
    assert first["paths"] == 2
    assert first["targets"] == [["sm_80"], ["sm_90"]]
    # Each machine that has but one of them finds its own.
    for gpus, arch in (("NVIDIA A100:8.0", "8.0"), ("NVIDIA H200:9.0", "9.0")):
        later = workshop.run(BUILD, **driver(f"0/13000/{gpus}")).report
        assert (later["archs"], later["origins"]) == ([arch], ["cache"])


def test_the_tensors_own_device_decides(monkeypatch):
    """And not device 0, nor the current one."""
    torch = pytest.importorskip("torch")
    from deepspeed4science.backends import cuda
    from deepspeed4science.dispatch import choose
    from deepspeed4science.problem import Problem
    from op_builder import EvoformerAttnBuilder

    for name in ("DS4S_CUDA_FAMILY", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    kinds = ((8, 0), (7, 5), (8, 6))
    monkeypatch.setattr(cuda, "capability", lambda device: kinds[device.index])
    cuda.serving_families.cache_clear()
    tensors = [torch.randn(1, 1, 16, 1, 32, dtype=torch.float16)] * 3
    sizes = {"B": 1, "N": 1, "Lq": 16, "Lk": 16, "H": 1, "D": 32, "Dv": 32}
    of_all = Problem(**sizes, dtype=torch.float16, device=None, bias1_dtype=None, bias2_dtype=None)
    devices = [torch.device("cuda", index) for index in range(len(kinds))]
    specs = [choose(of_all._replace(device=one), "fwd", tensors).kernel for one in devices]
    cuda.serving_families.cache_clear()
    assert [(spec.family, spec.arch) for spec in specs] == [
        *(("sm80", "8.0"), ("sm75", "7.5"), ("sm80", "8.6"))
    ]
    jobs = EvoformerAttnBuilder().jobs(specs)
    assert len({job.ident for job in jobs}) == 3
