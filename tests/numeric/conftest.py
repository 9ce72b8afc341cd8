"""What the numeric tests share."""

import pytest


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    from tests.numeric.poison import poison_memory

    poison_memory(monkeypatch.setattr)


@pytest.fixture
def one_thread():
    """For many small calls: threads that wait for each other would take most of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels_only(monkeypatch):
    """Few scores are the kernels' too, on a GPU as well."""
    from deepspeed4science import few_scores

    monkeypatch.setattr(few_scores, "MOST_SCORES", 0)


@pytest.fixture
def ran(monkeypatch, kernels_only):
    """Names of the kernels that ran, in order."""
    from deepspeed4science.backends.cpu import CpuBackend
    from deepspeed4science.backends.cuda import CudaBackend

    names = []
    for backend in (CpuBackend, CudaBackend):

        def note(self, kernel, *arguments, launch=backend.launch):
            names.append(kernel.name)
            return launch(self, kernel, *arguments)

        monkeypatch.setattr(backend, "launch", note)
    return names


@pytest.fixture
def plans(monkeypatch):
    """What CUDA kernels said that they would run, in order: of each its choices by name."""
    from deepspeed4science.backends.cuda import CudaBackend

    found, launch = [], CudaBackend.launch

    def note(self, kernel, packed, device):
        words = kernel.plan(packed).split()
        found.append(dict(word.split("=") for word in words if "=" in word))
        return launch(self, kernel, packed, device)

    monkeypatch.setattr(CudaBackend, "launch", note)
    return found
