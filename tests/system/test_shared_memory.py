"""No kernel of the older families asks for more shared memory than the GPUs that it serves have."""

import re
import subprocess
from dataclasses import dataclass

import pytest

from op_builder import paths
from op_builder.toolchain import arch, cutlass, nvcc_targets, toolkits
from op_builder.toolchain.nvcc import FLAGS
from tests.system.every_kernel import every_kernel


@dataclass(frozen=True)
class Gpus:
    """That have so much for a block, as the CUDA C++ Programming Guide says."""

    family: str
    archs: tuple[str, ...]  # of the code that they run
    shared_bytes: int

    @property
    def id(self) -> str:
        return "-".join(self.archs)


GPUS = (
    Gpus("sm75", ("7.5",), 64 * 1024),
    Gpus("sm80", ("8.6", "8.9", "12.0"), 99 * 1024),
    Gpus("sm80", ("9.0+PTX",), 99 * 1024),  # 12.0, where nvcc has no target of its own
)
# Of a kernel by its template arguments, in the fewest stages: a launch takes a second one where the
# device has room for it (sm80/backward/plan.h).
BYTES = """\
template <typename Forward>
constexpr int forward_bytes() {
  return Forward::Kernel::kSharedBytes;
}
template <typename Kernel>
constexpr int backward_bytes() {
  using Config = typename Kernel::Config;
  using ds4s::Gradients;
  constexpr Gradients kKeys = Config::kSplitsKeys ? Gradients::kDk : Gradients::kDkDv;
  int most = Kernel::template shared_bytes<Gradients::kDq>(1);
  const int others[] = {Kernel::template shared_bytes<kKeys>(1),
                        Kernel::template shared_bytes<Gradients::kDv>(1),
                        Kernel::dbias2_shared_bytes(1)};
  for (int bytes : others) {
    if (bytes > most) most = bytes;
  }
  if constexpr (Config::kExact) {
    constexpr int kStatistics = ds4s::RowStatistics<Config>::kSharedBytes;
    if (kStatistics > most) most = kStatistics;
  }
  return most;
}
"""


def assertion(kernel, limit):
    arguments = re.search(r"ds4s::Sm80(?:For|Back)ward<([^<>]*)>", kernel.source())[1]
    if kernel.direction == "fwd":
        value = f"forward_bytes<ds4s::Sm80Forward<{arguments}>>()"
    else:
        value = f"backward_bytes<AttentionBackwardKernel<{arguments}>>()"
    return f'static_assert({value} <= {limit}, "{kernel.name}");\n'


def compiled(gpus, folder):
    """What nvcc says of that many assertions; empty: all hold."""
    nvcc, headers = toolkits.find_nvcc(), cutlass.find_cutlass()
    if not nvcc.ok or not headers.ok:
        pytest.skip(f"nvcc: {nvcc.reason}; CUTLASS: {headers.reason}")
    targets = arch.parse(" ".join(gpus.archs))
    if missing := [one for one in targets if one.real not in nvcc_targets.targets(nvcc).real]:
        pytest.skip(f"nvcc {nvcc.version} does not compile for {missing[0]}")
    source = folder / "shared_memory.cu"
    folders = ("forward", "backward")
    lines = [f'#include "sm80/{direction}/launch.h"\n' for direction in folders]
    lines += [BYTES, *(assertion(one, gpus.shared_bytes) for one in every_kernel(gpus.family))]
    source.write_text("".join(lines))
    flags = [flag for one in targets for flag in one.unit_flags()]
    includes = [f"-I{paths.csrc_root()}", f"-I{headers.include_dir}"]
    command = [nvcc.path, "-c", *FLAGS, *flags, *includes, "-o", folder / "out.o", source]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("gpus", GPUS, ids=lambda gpus: gpus.id)
def test_no_kernel_asks_for_more_than_there_is(gpus, tmp_path):
    assert not compiled(gpus, tmp_path)


def test_more_than_there_is_does_not_compile(tmp_path):
    """The widest forward in float32 needs more than half of what 8.6 has."""
    log = compiled(Gpus("sm80", ("8.6",), 48 * 1024), tmp_path)
    assert "sm80_fwd_fp32_d128_both_aligned" in log, log
