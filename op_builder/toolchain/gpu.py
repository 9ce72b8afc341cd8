"""The NVIDIA GPUs of this machine, from the driver's management library (NVML).

NVML creates no CUDA context: a query neither breaks a later fork nor takes memory on the GPU. It
numbers GPUs by bus and ignores CUDA_VISIBLE_DEVICES; a running op uses torch's answer for the
tensor's own device instead.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Gpus:
    found: tuple[Gpu, ...] = ()
    reason: str = ""  # why there are none
    driver: tuple[int, int] = (0, 0)  # the newest CUDA version that it serves; (0, 0): unknown

    @property
    def capabilities(self) -> tuple[tuple[int, int], ...]:
        """Each compute capability once, highest first."""
        return tuple(sorted({gpu.capability for gpu in self.found}, reverse=True))


@functools.cache
def detect() -> Gpus:
    """The GPUs, or why there are none. Never raises."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Gpus(reason="there is no NVIDIA driver (libnvidia-ml.so.1)")
    status = nvml.nvmlInit_v2()
    if status != 0:
        return Gpus(reason=f"the NVIDIA driver does not answer (NVML status {status})")
    try:
        return _ask(nvml)
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: ctypes.CDLL) -> Gpus:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value == 0:
        return Gpus(reason="the NVIDIA driver sees no GPU")
    found = []
    for index in range(count.value):
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(96)
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            and nvml.nvmlDeviceGetCudaComputeCapability(
                handle, ctypes.byref(major), ctypes.byref(minor)
            )
            == 0
        ):
            nvml.nvmlDeviceGetName(handle, name, len(name))
            found.append(Gpu(name.value.decode(errors="replace"), (major.value, minor.value)))
    reason = "" if found else "the NVIDIA driver does not describe its GPUs"
    return Gpus(tuple(found), reason, _driver(nvml))


def _driver(nvml: ctypes.CDLL) -> tuple[int, int]:
    version = ctypes.c_int()
    if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)) != 0:
        return (0, 0)
    return (version.value // 1000, version.value % 1000 // 10)
