"""What the numeric tests share."""

import pytest


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    import torch

    from tests.numeric.poison import poisoning

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))


@pytest.fixture
def one_thread():
    """For many small calls: threads that wait for each other would take most of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ran(monkeypatch):
    """Names of the CUDA kernels that calls were given, in order."""
    from deepspeed4science import backend_cuda

    names = []
    real = backend_cuda.CudaBackend._kernel

    def note(self, *arguments):
        kernel = real(self, *arguments)
        names.append(kernel.name)
        return kernel

    monkeypatch.setattr(backend_cuda.CudaBackend, "_kernel", note)
    return names
