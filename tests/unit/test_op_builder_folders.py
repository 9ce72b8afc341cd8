"""op_builder's folders import downwards only, as docs/architecture.md says."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "op_builder"

# Each folder imports from itself and from those after it. "": the modules outside of the folders.
FOLDERS = ("ops", "build", "cache", "toolchain", "", "system")
BESIDE = ("env", "errors", "offered", "paths")


def modules() -> dict[str, Path]:
    """Every module but the package's own, which has the public names."""
    files = {path.relative_to(PACKAGE).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    return {".".join(name.parts): file for name, file in files.items() if str(name) != "__init__"}


def folder(name: str) -> str:
    """ "ops" for "ops.builder.OpBuilder", "" for "env", and the top one for a public name."""
    first = name.partition(".")[0]
    if first in BESIDE:
        return ""
    return first if first in FOLDERS else "ops"


def imports(module: str, source: str) -> list[str]:
    """What a module of op_builder imports of op_builder, wherever in the file."""
    package = ["op_builder", *module.split(".")[:-1]]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, node.module] if node.module else base
            found += [".".join([*base, name.name]) for name in node.names]
    return [name.removeprefix("op_builder.") for name in found if name.startswith("op_builder.")]


def upward(module: str, source: str) -> list[str]:
    floor = FOLDERS.index(folder(module))
    return [name for name in imports(module, source) if FOLDERS.index(folder(name)) < floor]


@pytest.mark.parametrize("module", sorted(modules()))
def test_nothing_is_imported_from_a_folder_above(module):
    assert upward(module, modules()[module].read_text()) == []


@pytest.mark.parametrize("module", sorted(modules()))
def test_nobody_names_a_package_above(module):
    """Not as text either: a name can be imported. Messages and docstrings may speak of one."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(modules()[module].read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in strings if re.fullmatch(r"deepspeed4science(\.\w+)+", text)] == []


@pytest.mark.parametrize("module", ["ops.builder", "ops.cpu_builder", "ops.cuda_builder"])
def test_a_generic_builder_knows_no_op(module):
    of_ops = ("ops.evoformer_attn", "ops.instantiations", "ops.presets")
    assert [
        name for name in imports(module, modules()[module].read_text()) if name.startswith(of_ops)
    ] == []


def test_the_docs_name_every_module_in_its_folder():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    _, _, table = text.partition("| folder | contents |")
    named, folder_ = set(), ""
    for row in table.splitlines():
        first, _, rest = row.removeprefix("| ").partition("|")
        folder_ = first.strip(" `") if first.strip() else folder_
        prefix = folder_.replace("/", ".") if folder_.endswith("/") else ""
        named |= {prefix + name for name in re.findall(r"`(\w+)\.py`", rest if prefix else row)}
    assert named == {name for name in modules() if not name.endswith("__init__")}


def test_every_module_is_in_a_folder():
    beside = {name for name in modules() if "." not in name}
    assert beside == set(BESIDE)
    assert {name.partition(".")[0] for name in modules()} - beside == set(FOLDERS) - {""}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cache.search", "from ..build import jit"),
        ("cache.search", "from ..build.jit import load"),
        ("toolchain.nvcc", "def later():\n    from ..cache import key"),
        ("toolchain.nvcc", "import op_builder.cache.key"),
        ("build.jit", "if TYPE_CHECKING:\n    from op_builder.ops.builder import OpBuilder"),
        ("build.jit", "from .. import ALL_OPS"),
        ("env", "from .toolchain import arch"),
        ("system.files", "from .. import env"),
    ],
)
def test_an_import_from_above_is_noticed(module, source):
    assert len(upward(module, source)) == 1
    assert upward("ops.builder", source) == []
