"""No question to the file system that raises where a user may not look: PATH, HOME, CUDA_HOME and
others may well point below such a folder.
"""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = (REPOSITORY / "op_builder", REPOSITORY / "deepspeed4science")
FILES = sorted(file for package in PACKAGES for file in package.rglob("*.py"))

# Path's methods that raise PermissionError, or RuntimeError without a home; os.path has them too.
REFUSED = {
    *("exists", "is_file", "is_dir", "is_symlink", "is_mount", "is_fifo", "is_socket"),
    *("samefile", "glob", "rglob", "expanduser", "resolve"),
}
ALLOWED = {"os.path", "glob"}  # modules with functions of such names


def questions(source: str) -> list[str]:
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in REFUSED
        and ast.unparse(node.func.value) not in ALLOWED
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(REPOSITORY).as_posix())
def test_no_question_that_raises(file):
    assert questions(file.read_text()) == []


def test_the_lint_sees_them():
    assert questions("(folder / 'x').exists()\nos.path.exists(x)\nglob.glob(y)") == [
        "line 1: (folder / 'x').exists()"
    ]
    assert questions("for f in root.glob('*'): f.is_dir()") != []
