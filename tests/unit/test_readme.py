"""README tells the truth: short, its files exist, its snippets run, its variables are env.py's. Its
commands: tests/system/test_documented_commands.py.
"""

import re
import sys

import pytest

from op_builder import env
from op_builder.ops.instantiations import FAMILIES, device_head_dim
from tests.documents import PAGES, ROOT, name, snippets

README = (ROOT / "README.md").read_text()
# Python that is run elsewhere, with what it stands in.
RUN_ELSEWHERE = {"docs/adding-a-kernel.md": "tests/system/test_a_new_family.py"}


def test_it_is_read_at_one_sitting():
    assert len(README.splitlines()) <= 150


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r'src="([^"]+)"', README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_every_symbol_of_the_op_is_explained():
    """In the glossary, before the first snippet."""
    glossary = README.partition("\n## Use\n")[2].partition("```python")[0]
    first = " ".join(re.findall(r"^\| ([^|]+) \|", glossary, re.M))
    for symbol in ("B", "N", "L", "H", "D", "Q", "K", "V", "O", "bias1", "bias2"):
        assert re.search(rf"\b{symbol}\b", first), symbol


def test_its_variables_are_rows_of_the_whole_table():
    section = README.partition("\n## Environment variables\n")[2]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == 6
    assert [row for row in rows if row not in env.table().splitlines()] == []


def test_head_dimensions_are_those_of_the_list_of_kernels():
    """ "What runs where", beside `FAMILIES`."""
    rows = re.findall(r"^\| (.*) \|$", README.partition("\n## What runs where\n")[2], re.M)
    said = {re.sub(r"^compute capability ", "", row).split(" | ")[0]: row for row in rows}

    def widest(family, direction, dtype):
        return FAMILIES[family].largest_head_dim(direction, dtype)

    def dims(capability):
        return said[capability].split(" | ")[-1]

    sm70 = [widest("sm70", "bwd", dtype) for dtype in ("fp16", "bf16", "fp32")]
    assert sm70 == [widest("sm75", "bwd", dtype) for dtype in ("fp16", "bf16", "fp32")]
    assert len(set(sm70)) == 1
    assert dims("7.0, 7.2") == f"1 to {sm70[0]}, forward to {widest('sm70', 'fwd', 'fp16')}"
    full = device_head_dim((7, 5), "fp32")
    assert full < sm70[0]
    assert dims("7.5") == f"as above; float32 and bfloat16 to {full}"
    sm80 = {(d, t): widest("sm80", d, t) for d in ("fwd", "bwd") for t in ("fp16", "bf16", "fp32")}
    narrow = sm80.pop(("bwd", "fp32"))
    (wide,) = set(sm80.values())
    assert dims("8.0 and above") == f"1 to {wide}; float32's backward to {narrow}"
    (hopper,) = {widest("sm90", d, t) for d in ("fwd", "bwd") for t in ("fp16", "bf16")}
    assert FAMILIES["sm90"].dtype_for("fwd", "fp32") is None
    assert dims("9.0") == f"multiples of 8 to {hopper}"


def test_nothing_but_env_reads_the_environment():
    """So that its table is complete."""
    sources = [*(ROOT / "op_builder").rglob("*.py"), *(ROOT / "deepspeed4science").rglob("*.py")]
    assert len(sources) > 30
    readers = {
        source.name for source in sources if re.search(r"os\.(environ|getenv)", source.read_text())
    }
    assert readers <= {"env.py"}


@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(page, number, id=f"{name(page)}-{number}")
        for page in PAGES
        for number in range(len(snippets(page.read_text())))
    ],
)
def test_snippets_run(page, number):
    """On a CPU. Switches of models are tried with the models themselves in tests/clients."""
    pytest.importorskip("torch")
    if elsewhere := RUN_ELSEWHERE.get(name(page)):
        assert page.stem in (ROOT / elsewhere).read_text()
        pytest.skip(f"run by {elsewhere}")
    try:
        exec(snippets(page.read_text())[number], {})
    finally:
        switch_back()


def test_the_first_snippet_gives_gradients_of_a_model_of_ones_own():
    torch = pytest.importorskip("torch")
    names: dict[str, object] = {}
    exec(snippets(README)[0], names)
    for linear in (names["to_qkv"], names["to_bias"]):
        assert isinstance(linear, torch.nn.Linear) and linear.weight.grad is not None
        assert linear.weight.grad.isfinite().all() and linear.weight.grad.any()


def test_openfolds_layout_is_openfolds_attention():
    """Its own order of operations, in PyTorch: heads first, biases added one by one."""
    torch = pytest.importorskip("torch")
    names: dict[str, object] = {}
    exec(snippets(README)[1], names)
    q, k, v = (torch.randn(2, 3, 4, 17, 8) for _ in range(3))
    biases = [torch.randn(2, 3, 1, 1, 17), torch.randn(2, 1, 4, 17, 17)]
    scores = torch.matmul(q / 8**0.5, k.transpose(-1, -2)) + biases[0] + biases[1]
    expected = torch.matmul(torch.softmax(scores, -1), v).transpose(-2, -3)
    attention = names["attention"]
    assert callable(attention)
    torch.testing.assert_close(attention(q, k, v, biases), expected)
    torch.testing.assert_close(attention(q / 8**0.5, k, v, biases, scale=1.0), expected)


def switch_back():
    from deepspeed4science.drop_in import Switch

    for finder in [finder for finder in sys.meta_path if isinstance(finder, Switch)]:
        finder.back()
