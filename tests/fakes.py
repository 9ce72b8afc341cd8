"""Fake tool folders for tests of searches: scripts that answer as the real programs do, and empty
headers.

They are fixtures for *finding* tools; compiling is tested with real compilers.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

DEFAULT_TARGETS = ("75", "80", "86", "90", "100", "120")

_NVCC = """\
#!/bin/sh
case "$1" in
  --version) echo "nvcc: NVIDIA (R) Cuda compiler driver"
    echo "Cuda compilation tools, release {release}, V{version}" ;;
  --dryrun) printf '#$ _HERE_={root}/bin\\n#$ TOP={root}/bin/..\\n' >&2 ;;
  --list-gpu-code) {codes} ;;
  --list-gpu-arch) {archs} ;;
  *) for last; do :; done; echo object > "$last" ;;
esac
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def file(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def no_cutlass_package(folder: Path) -> Path:
    """A folder of modules that hides an installed nvidia-cutlass by one without headers."""
    file(folder / "cutlass_library" / "__init__.py")
    return folder


def toolkit(
    root: Path, version: str = "13.0.88", targets: tuple[str, ...] = DEFAULT_TARGETS
) -> Path:
    """A complete CUDA toolkit in the eyes of nvcc.py; returns its nvcc."""
    major, minor = version.split(".")[:2]
    file(root / "nvvm" / "bin" / "cicc")
    runtime = f"#define CUDART_VERSION  {int(major) * 1000 + int(minor) * 10}\n"
    file(root / "include" / "cuda_runtime_api.h", runtime)
    file(root / "include" / "crt" / "host_config.h")
    file(root / "include" / "cccl" / "cuda" / "std" / "version")
    file(root / "lib" / "libcudart_static.a")
    script = _NVCC.format(
        release=f"{major}.{minor}",
        version=version,
        root=root,
        codes="; ".join(f"echo sm_{number}" for number in targets),
        archs="; ".join(f"echo compute_{number}" for number in targets),
    )
    return program(root / "bin" / "nvcc", script)


def debian_toolkit(usr: Path, version: str = "12.4.131") -> Path:
    """A toolkit as in the package of Debian and Ubuntu; returns the script on PATH before nvcc."""
    root, include = usr / "lib" / "nvidia-cuda-toolkit", usr / "include"
    nvcc = toolkit(root, version)
    nvcc.write_text(nvcc.read_text().replace(f"#$ TOP={root}/bin/..\\n", ""))
    (root / "nvvm" / "bin" / "cicc").rename(root / "bin" / "cicc")
    (root / "include").rename(include)
    (include / "cccl" / "cuda").rename(include / "cuda")
    (root / "lib").rename(usr / "lib" / "x86_64-linux-gnu")
    return wrapper(usr / "bin" / "nvcc", nvcc)


# As nvcc in front of a host compiler that has no use for most of its flags. What nvcc itself puts
# before every unit is the runtime's header.
_HOST_NVCC = """\
import subprocess, sys
words, command = iter(sys.argv[1:]), [{compiler!r}, "-include", "cuda_runtime_api.h"]
for word in words:
    if word in ("-Xcompiler", "-Xlinker", "-cudart", "-ccbin"):
        value = next(words)
        command += {{"-Xcompiler": [value], "-Xlinker": ["-Wl," + value]}}.get(word, [])
    elif word == "smoke.cu":
        command += ["-x", "c++", "/dev/null"]
    elif word.endswith(".cu"):
        command += ["-x", "c++", word]
    elif not word.startswith(("-gencode", "--expt", "-diag", "-L", "-Xptxas")):
        command.append(word)
sys.exit(subprocess.run([*command, "-I{root}/include"]).returncode)
"""
_HOST_RUNTIME = """
typedef int cudaError_t;
typedef void* cudaStream_t;
enum {{ cudaSuccess, cudaErrorInvalidValue }};
inline cudaError_t cudaGetLastError() {{ return cudaSuccess; }}
inline const char* cudaGetErrorString(cudaError_t) {{ return "an error of no GPU"; }}
"""


def host_toolkit(root: Path, compiler: str, targets: tuple[str, ...] = DEFAULT_TARGETS) -> Path:
    """A toolkit that compiles host code only, for any target; returns its nvcc."""
    nvcc = toolkit(root, targets=targets)
    script = file(root / "host_nvcc.py", _HOST_NVCC.format(compiler=compiler, root=root))
    compile_it = f'*) exec {sys.executable} {script} "$@" ;;'
    program(nvcc, nvcc.read_text().replace(_NVCC.splitlines()[-2].strip(), compile_it))
    header = root / "include" / "cuda_runtime_api.h"
    header.write_text(header.read_text() + _HOST_RUNTIME.format())
    return nvcc


def changed_toolkit(real: Path, root: Path, part: str, script: str) -> Path:
    """Links to a real toolkit, with a shell script for the program `part`; returns its nvcc."""
    inner = ("bin", "nvvm", "nvvm/bin")
    for folder in ("", *inner):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("", *inner):
        for entry in (real / folder).iterdir():
            if (Path(folder) / entry.name).as_posix() not in inner:
                (root / folder / entry.name).symlink_to(entry)
    (root / part).unlink()
    program(root / part, f"#!/bin/sh\n{script}\n")
    return root / "bin" / "nvcc"


def wheel_toolkit(real: Path, root: Path) -> Path:
    """A real toolkit as the wheels of CUDA 13.0 lay it out: libraries in `lib`, and an nvcc.profile
    that says `lib64`; returns its nvcc.
    """
    path = changed_toolkit(real, root, "bin/bin2c", f'exec {real}/bin/bin2c "$@"')
    for name in ("lib64", "targets", "bin/nvcc.profile"):
        (root / name).unlink(missing_ok=True)
    profile = (real / "bin" / "nvcc.profile").read_text()
    lines = [line for line in profile.splitlines() if not line.startswith("LIBRARIES")]
    lines.append('LIBRARIES =+ $(_SPACE_) "-L$(TOP)/$(_TARGET_DIR_)/lib$(_TARGET_SIZE_)"')
    file(root / "bin" / "nvcc.profile", "\n".join(lines) + "\n")
    return path


def wrapper(path: Path, program_behind: Path) -> Path:
    return program(path, f'#!/bin/sh\nexec {program_behind} "$@"\n')


def quick_compiler(path: Path) -> Path:
    """g++ for kernels whose code does not matter: most of a real kernel's time is optimization."""
    return program(path, '#!/bin/sh\nexec g++ "$@" -O0\n')


def import_path(site_packages: Path) -> list[str]:
    """A `sys.path` with this folder for packages and no other; the standard library stays."""
    importlib.invalidate_caches()
    return [str(site_packages), *(place for place in sys.path if "-packages" not in place)]


def cutlass(include: Path, version: str = "4.2.0") -> Path:
    """The two files by which cutlass.py recognises the headers; returns the include folder."""
    major, minor, patch = version.split(".")
    parts = {"MAJOR": major, "MINOR": minor, "PATCH": patch}
    text = "".join(f"#define CUTLASS_{part} {number}\n" for part, number in parts.items())
    file(include / "cutlass" / "version.h", text)
    file(include / "cute" / "tensor.hpp")
    return include
