"""`benchmarks load`: what is divided by what, and what NVML is asked."""

from __future__ import annotations

import ctypes
from statistics import median
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from benchmarks import load, power, replay  # noqa: E402


class Device:
    """A replay takes 2 ms; 600 W once it is warm, 100 W before. The clock falls in steps."""

    def __init__(self, knows_energy=True):
        self.now, self.used, self.clocks = 0.0, 0.0, []
        self.knows_energy = knows_energy

    def replay_ms(self, _, num_replays=1):
        watts = 600.0 if self.now >= load.WARMUP_SECONDS else 100.0
        seconds = 2e-3 * num_replays
        self.now, self.used = self.now + seconds, self.used + watts * seconds
        return 1e3 * seconds

    def joules(self):
        return self.used if self.knows_energy else None

    def clock_mhz(self):
        self.clocks.append(1980 - int(self.now * 100))
        return self.clocks[-1]


@pytest.fixture
def measured(monkeypatch):
    def measure(device, seconds):
        monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: device.now))
        monkeypatch.setattr(replay, "replay_ms", device.replay_ms)
        return load._under_load(None, device, seconds)

    return measure


def test_figures_are_those_of_one_call_after_the_warm_up(measured):
    device = Device()
    found = measured(device, seconds=1.0)
    assert (found.us, found.millijoules, found.watts) == (2000.0, 1200.0, 600.0)
    assert len(device.clocks) >= 10 and found.clock_mhz == int(median(device.clocks))
    assert device.now == pytest.approx(load.WARMUP_SECONDS + 1.0, abs=2 * load.BATCH_SECONDS)


def test_a_call_longer_than_the_time_is_made_once(measured):
    found = measured(Device(), seconds=0.0)
    assert found.us == 2000.0 and found.millijoules == 1200.0


def test_without_a_counter_there_is_the_time(measured):
    found = measured(Device(knows_energy=False), seconds=0.2)
    assert found.us == 2000.0 and found.millijoules is None and found.watts is None
    assert str(found).split() == ["2000.0", "us", "?", "mJ", "?", "W", f"{found.clock_mhz}", "MHz"]


class Nvml:
    """The functions that are called, of a driver with one device."""

    def __init__(self, status=power.NVML_SUCCESS):
        self.status, self.asked = status, []

    def nvmlInit_v2(self):  # noqa: N802
        return power.NVML_SUCCESS

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        handle._obj.value = 7
        return power.NVML_SUCCESS if uuid == b"GPU-of-cuda:1" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, out):  # noqa: N802
        assert handle.value == 7 and isinstance(out._obj, ctypes.c_ulonglong)
        out._obj.value = 3_000_000_000_250
        return self.status

    def nvmlDeviceGetClockInfo(self, handle, kind, out):  # noqa: N802
        assert handle.value == 7 and isinstance(out._obj, ctypes.c_uint)
        out._obj.value = {0: 1, 1: 1755, 2: 3201}[kind]
        return self.status


@pytest.mark.parametrize(
    ("device", "status", "joules", "mhz"),
    [("cuda:1", 0, 3_000_000_000.25, 1755), ("cuda:1", 3, None, None), ("cuda:0", 0, None, None)],
    ids=["answers", "not-supported", "unknown-device"],
)
def test_nvml_is_asked_about_the_device_of_torch(monkeypatch, device, status, joules, mhz):
    monkeypatch.setattr(power.ctypes, "CDLL", lambda _: Nvml(status))
    properties = lambda device: SimpleNamespace(uuid=f"of-{device}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    meter = power.Meter(torch.device(device))
    assert meter.joules() == joules
    assert meter.clock_mhz() == mhz


def test_without_nvml_a_meter_says_nothing():
    meter = power.Meter(torch.device("cuda"), library="libno-such-library.so.1")
    assert meter.joules() is None and meter.clock_mhz() is None
