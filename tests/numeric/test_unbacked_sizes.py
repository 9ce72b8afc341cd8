"""CONTRACT: torch.compile(fullgraph=True) with sizes that depend on data stops at no guard, and
what is wrong with them is said when the program runs.
"""

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention, triangle_attention
from deepspeed4science.errors import InvalidInputError
from tests.numeric.cases import DEVICES

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.usefixtures("seed")]

OLD_INDUCTOR = torch.__version__ < "2.12"


@pytest.fixture(autouse=True)
def unbacked(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def chosen(size, device):
    """Indices whose number no compiler knows."""
    kept = torch.rand(size, device=device) < 0.5
    kept[0], kept[1] = True, False
    return kept


def some_keys(x, kept, bias1, bias2):
    some = kept.nonzero()[:, 0]
    q = x[:, :, some]
    return DS4Sci_EvoformerAttention(q, 2 * q, q + 1, [bias1[..., some]])


def some_rows(x, kept, bias1, bias2):
    some = kept.nonzero()[:, 0]
    q = x[:, some]
    mask = bias1[:, some, 0, 0, 0] > 0
    biases = [bias1[:, some], bias2.expand(-1, q.shape[1], -1, -1, -1)]
    return DS4Sci_EvoformerAttention(q, 2 * q, q + 1, biases, row_mask=mask, scale=0.3)


def some_rows_of_rank_4(x, kept, bias1, bias2):
    some = kept.nonzero()[:, 0]
    q = x[0, some]
    return DS4Sci_EvoformerAttention(q, 2 * q, q + 1, [bias1[0, some], bias2[0, 0]])


def some_queries(x, kept, bias1, bias2):
    some = kept.nonzero()[:, 0]
    q = x[:, :, some]
    return DS4Sci_EvoformerAttention(q, x, x + 1, [bias1, bias2[:, :, :, some]])


def some_rows_of_a_triangle(x, kept, bias1, bias2):
    some = kept.nonzero()[:, 0]
    q = x[:, some].transpose(2, 3)
    expanded = bias2.expand(-1, q.shape[1], -1, -1, -1)
    return triangle_attention(q, 2 * q, q + 1, expanded, bias1[:, some] > 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "step",
    [some_keys, some_rows, some_rows_of_rank_4, some_queries, some_rows_of_a_triangle],
    ids=lambda f: f.__name__,
)
def test_values_and_gradients(step, backend, device):
    if step is some_rows_of_a_triangle and backend == "inductor" and OLD_INDUCTOR:
        pytest.skip("PyTorch before 2.12 compiles no transposed inputs of such sizes (limits.md)")
    L = 12
    x = torch.randn(1, L, L, 2, 8, device=device, requires_grad=True)
    bias1 = torch.randn(1, L, 1, 1, L, device=device)
    bias2 = torch.randn(1, 1, 2, L, L, device=device, requires_grad=True)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    leaves = (x,) if step is some_keys else (x, bias2)
    for _ in range(2):
        arguments = (x, chosen(L, device), bias1, bias2)
        results = []
        for function in (compiled, step):
            o = function(*arguments)
            results.append((o, *torch.autograd.grad(o.sin().sum(), leaves)))
        torch.testing.assert_close(*results)


def test_what_does_not_fit_is_said_at_run_time(device):
    def step(x, kept):
        q = x[:, :, kept.nonzero()[:, 0]]
        return DS4Sci_EvoformerAttention(q, q, x)

    x = torch.randn(1, 3, 12, 2, 8, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises(InvalidInputError, match="V: expected"):
        compiled(x, chosen(12, device))
