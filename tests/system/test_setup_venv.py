"""scripts/setup-venv: what it installs for whom, and what a person sees meanwhile.

Python and pip are shell scripts that write down what they are asked.
"""

from __future__ import annotations

import ast
import os
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

from deepspeed4science.drop_in.clients import CLIENTS
from tests import fakes

from .toys import REPOSITORY

PYTHON = """\
#!/bin/sh
case "$*" in
  --version) echo Python 3.12.1 ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip install "*) echo "$*" >> {log}; {during} ;;
  "-m deepspeed4science demo" | "-m pytest "*) echo "runs with '$PYTHONPATH$PYTHONHOME'" ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    for name in ("scripts/setup-venv", "pyproject.toml", "setup.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    for name in ("requirements-demo.txt", "requirements-dev.txt"):
        shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def set_up(clone, purpose, during=":", first_in_path=()):
    """Its outcome, and what pip was asked for in this run."""
    log = clone / "pip.log"
    log.unlink(missing_ok=True)
    fakes.program(clone / "bin" / "python3", PYTHON.format(log=log, during=during))
    done = subprocess.run(
        [str(clone / "scripts" / "setup-venv"), purpose],
        env=dict(os.environ)
        | {"PATH": os.pathsep.join(map(str, [*first_in_path, clone / "bin", os.environ["PATH"]]))},
        capture_output=True,
        text=True,
    )
    return done, log.read_text() if log.exists() else ""


def test_the_demo_gets_what_it_imports(clone):
    done, asked = set_up(clone, "demo")
    assert done.returncode == 0, done.stderr
    assert "requirements-demo.txt" in asked and asked.count("\n") == 1
    assert not re.search("requirements-dev|nvidia|cutlass|pytest|ruff|mypy|editable", asked)
    again, asked = set_up(clone, "demo")
    assert (again.returncode, again.stderr, asked) == (0, "", "")


def test_a_pip_that_installs_for_the_user(clone):
    """`user = true` in pip.conf, or PIP_USER: pip refuses that in a virtual environment."""
    _, asked = set_up(clone, "test")
    assert asked and all("--no-user" in line.split() for line in asked.splitlines())


@pytest.mark.parametrize("script", ["demo", "test"])
def test_packages_of_a_clusters_modules_stay_out(script, clone, monkeypatch):
    """Such as an older PyTorch on PYTHONPATH, which comes before an environment's own."""
    monkeypatch.setenv("PYTHONPATH", "/apps/pytorch/2.4")
    monkeypatch.setenv("PYTHONHOME", "/apps/python")
    tell = f"echo \"with '$PYTHONPATH$PYTHONHOME'\" >> {clone}/pip.log"
    _, asked = set_up(clone, script, during=tell)
    assert set(re.findall("with '.*'", asked)) == {"with ''"}
    shutil.copy2(REPOSITORY / "scripts" / script, clone / "scripts" / script)
    path = os.pathsep.join([str(clone / "bin"), os.environ["PATH"]])
    ran = subprocess.run(
        [str(clone / "scripts" / script)],
        env=dict(os.environ) | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "runs with ''\n", ran.stderr


def test_tests_get_more_on_top(clone):
    set_up(clone, "demo")
    done, asked = set_up(clone, "test")
    assert done.returncode == 0, done.stderr
    assert "requirements-dev.txt" in asked and "nvidia-cutlass" in asked and "--editable ." in asked
    assert "requirements-demo.txt" not in asked, "the demo's are there"
    assert set_up(clone, "test")[1] == set_up(clone, "demo")[1] == ""


def test_a_change_installs_again_what_it_concerns(clone):
    set_up(clone, "test")
    (clone / "setup.py").write_text("# changed\n")
    _, asked = set_up(clone, "test")
    assert asked.count("\n") == 1 and "--editable ." in asked
    (clone / "requirements-demo.txt").write_text("torch==2.99.0\n")
    _, asked = set_up(clone, "demo")
    assert "requirements-demo.txt" in asked and "--editable" not in asked
    assert "--editable ." in set_up(clone, "test")[1]


def test_an_activated_environment_is_made_anew_by_the_python_outside(clone):
    set_up(clone, "demo")
    activated = clone / ".venv" / "bin"
    outside = f'case "$2" in *_base_executable*) echo {clone}/bin/python3 ;; esac'
    fakes.program(activated / "python3", f"#!/bin/sh\n{outside}\n")
    (clone / "requirements-demo.txt").write_text("torch==2.99.0\n")
    done, asked = set_up(clone, "demo", first_in_path=[activated])
    assert done.returncode == 0, done.stderr
    assert "requirements-demo.txt" in asked and not (activated / "python3").exists()


def test_an_environment_of_the_persons_own_is_left_alone(clone):
    """`uv venv` and `python -m venv .venv` make one of the same name."""
    fakes.program(clone / ".venv" / "bin" / "python", "#!/bin/sh\n")
    done, asked = set_up(clone, "demo")
    assert (done.returncode, asked) == (1, "")
    assert "another environment" in done.stderr and "rm -r .venv" in done.stderr
    assert (clone / ".venv" / "bin" / "python").exists()


def test_a_failure_is_shown_and_not_taken_for_done(clone):
    during = 'case "$*" in *requirements-demo*) echo no room left; exit 1;; esac'
    done, _ = set_up(clone, "demo", during)
    assert done.returncode == 1
    assert "PyTorch" in done.stderr and "no room left" in done.stderr
    assert "requirements-demo.txt" in set_up(clone, "demo")[1]


def begin(clone, during):
    fakes.program(clone / "bin" / "python3", PYTHON.format(log="/dev/null", during=during))
    return subprocess.Popen(
        [str(clone / "scripts" / "setup-venv"), "demo"],
        env=dict(os.environ) | {"PATH": f"{clone / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
    )


def test_nothing_goes_on_once_it_is_killed(clone):
    process = begin(clone, during="exec sleep 20")
    said = b""
    while b"PyTorch" not in said:
        said += os.read(process.stderr.fileno(), 1000)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 6
    while said:  # until the last one that could write has gone
        assert select.select([process.stderr], [], [], max(deadline - time.monotonic(), 0))[0]
        said = os.read(process.stderr.fileno(), 1000)
    process.stderr.close()


def test_it_never_looks_like_a_hang(clone):
    """Something new is seen every few seconds while pip works in silence."""
    process = begin(clone, during="sleep 5")
    longest, before = 0.0, time.monotonic()
    while os.read(process.stderr.fileno(), 1000):
        now = time.monotonic()
        longest, before = max(longest, now - before), now
    assert process.wait() == 0
    process.stderr.close()
    assert longest < 4


IMPORTED = {"torch": "torch", "PIL": "pillow", "ninja": "ninja"}


def test_what_the_package_imports_is_what_the_demo_gets(clone):
    """Each package that our code imports, and ninja, which it runs; numpy is for PyTorch."""
    modules = set()
    for folder in ("op_builder", "deepspeed4science"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    modules |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    modules.add(str(node.module).partition(".")[0])
    ours = {"op_builder", "deepspeed4science", "cpuinfo"}  # cpuinfo: not on Linux
    models = set(CLIENTS)  # what starts a model imports it
    optional = {"triton"}  # PyTorch's GPU builds bring it; without it layers take plain PyTorch
    others = ours | models | optional | set(sys.stdlib_module_names)
    needed = modules - others | {"ninja"}
    assert needed == set(IMPORTED)
    lines = (clone / "requirements-demo.txt").read_text().splitlines()
    names = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert names - {"numpy"} == set(IMPORTED.values())


def test_scripts_in_python_run_in_the_environment(clone):
    """What they need, such as CUTLASS, is there, and mostly not beside the python3 of PATH."""
    programs = ("same_code", "instructions", "forward_tiles")
    fakes.program(clone / ".venv" / "bin" / "python", '#!/bin/sh\necho "in .venv: $*"\n')
    for name in (*programs, "in_venv.py"):
        shutil.copy2(REPOSITORY / "scripts" / name, clone / "scripts" / name)
    for name in programs:
        script = str(clone / "scripts" / name)
        done = subprocess.run([sys.executable, script, "HEAD"], capture_output=True, text=True)
        assert done.stdout == f"in .venv: {script} HEAD\n", done.stderr
