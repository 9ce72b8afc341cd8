"""The cases of this folder, on processes of one machine: gloo on the CPU, NCCL on as many GPUs."""

import functools

import pytest

torch = pytest.importorskip("torch")

from tests.numeric.cases import cuda_reason  # noqa: E402

from . import cases, world  # noqa: E402


def _gpu_reason(size):
    if reason := cuda_reason():
        return reason
    count = torch.cuda.device_count()
    return f"{count} GPUs here, expected {size}" if count < size else None


def _worlds():
    found = []
    for backend in ("gloo", "nccl"):
        for size in (2, 4):
            reason = _gpu_reason(size) if backend == "nccl" else None
            skip = pytest.mark.skipif(reason is not None, reason=reason or "")
            marks = [pytest.mark.gpu, skip] if backend == "nccl" else []
            for name in cases.of(size):
                found.append(
                    pytest.param(backend, size, name, id=f"{backend}-{size}-{name}", marks=marks)
                )
    return found


@functools.cache
def _found(backend, size, seed):
    return world.launch(backend, size, seed)


@pytest.mark.parametrize(("backend", "size", "case"), _worlds())
def test_case(backend, size, case, session_seed):
    """One process's results, by the error law."""
    found, output = _found(backend, size, session_seed)
    if case not in found:
        stopped = [name for name, problem in found.items() if problem]
        pytest.fail(f"not reached: {', '.join(stopped) or output[-3000:]} failed first")
    assert found[case] is None, found[case]
