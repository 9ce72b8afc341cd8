"""Energy and clock of a GPU, by NVML (libnvidia-ml.so.1, a part of the driver)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

NVML_CLOCK_SM = 1
NVML_SUCCESS = 0


class Meter:
    """Answers None where there is no NVML, or where it does not know this device."""

    def __init__(self, device: torch.device, library: str = "libnvidia-ml.so.1") -> None:
        self._nvml: Any = None
        self._handle = ctypes.c_void_p()
        try:
            nvml = ctypes.CDLL(library)
        except OSError:
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() != NVML_SUCCESS:
            return
        if nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)) == NVML_SUCCESS:
            self._nvml = nvml

    def joules(self) -> float | None:
        """Since the driver was loaded; updated about ten times a second."""
        millijoules = ctypes.c_ulonglong()
        if self._nvml is None:
            return None
        status = self._nvml.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(millijoules)
        )
        return millijoules.value / 1e3 if status == NVML_SUCCESS else None

    def clock_mhz(self) -> int | None:
        """Of the multiprocessors, now."""
        clock = ctypes.c_uint()
        if self._nvml is None:
            return None
        status = self._nvml.nvmlDeviceGetClockInfo(self._handle, NVML_CLOCK_SM, ctypes.byref(clock))
        return clock.value if status == NVML_SUCCESS else None
