"""One process, many imports: the operators are registered once, and Ctrl-C does no harm."""

import functools
import os
import subprocess
import sys

import pytest

from ..toys import REPOSITORY

PRELUDE = """\
import importlib, os, signal, sys, threading
import torch
OURS = ("deepspeed4science", "op_builder")
def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
def check(close=torch.testing.assert_close):
    from deepspeed4science import DS4Sci_EvoformerAttention as attention
    from deepspeed4science.reference import evoformer_attention as reference
    q = torch.randn(1, 1, 4, 1, 8, requires_grad=True)
    got, = torch.autograd.grad(attention(q, q, q).square().sum(), q)
    x = q.double()  # in float32, the reference's own error exceeds the tolerance now and then
    expected, = torch.autograd.grad(reference(x, x, x).square().sum(), q)
    close(got, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, q, q).dtype == torch.bfloat16
"""


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return done.stdout


def test_second_import():
    run("check()\nforget()\ncheck()\nforget()\ncheck()")


def test_reload():
    run(
        "check()\nfrom deepspeed4science import evoformer_attn, operators\n"
        "importlib.reload(operators)\nimportlib.reload(evoformer_attn)\ncheck()"
    )


def test_last_import_serves():
    """Errors of the operator are those that the caller can name: of the modules he has now."""
    run(
        """
check()
forget()
from deepspeed4science import DS4Sci_EvoformerAttention as attention
from deepspeed4science.errors import InvalidInputError
q = torch.randn(1, 1, 4, 1, 8)
try:
    torch.ops.deepspeed4science.evoformer_attn(q, q[..., :4], q, None, None, False)
except InvalidInputError:
    print("named")
"""
    )


def test_what_was_compiled_before_a_second_import_still_runs(tmp_path):
    run(
        """
from deepspeed4science import DS4Sci_EvoformerAttention as attention
compiled = torch.compile(attention, fullgraph=True)
q = torch.randn(1, 1, 4, 1, 8)
before = compiled(q, q, q)
forget()
check()
torch.testing.assert_close(compiled(q, q, q), before)
""",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
    )


def test_another_version_in_the_same_process():
    """Its operator has another signature: an error that says so, and the old one goes on."""
    said = run(
        """
from deepspeed4science import registration
check()
other = registration.Operator("evoformer_attn(Tensor q) -> Tensor", {}, len, len)
try:
    registration.register(other)
except ImportError as error:
    print(error)
check()
"""
    )
    assert "another version of deepspeed4science" in said
    assert "(Tensor q) -> Tensor, got deepspeed4science::evoformer_attn(Tensor q, Ten" in said
    assert "restart the process" in said


# Raises KeyboardInterrupt in the main thread at the `place`-th line of the files named. Not where
# Python lets go of a lock, which no signal interrupts.
INTERRUPT = """
import linecache, random
FILES = ("deepspeed4science", "op_builder", "torch/library.py", "torch/_library")
def interrupted(place):
    seen = 0
    def tracer(frame, event, argument):
        nonlocal seen
        if not any(part in frame.f_code.co_filename for part in FILES):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith("with "):
            seen += 1
            if seen == place:
                sys.settrace(None)
                raise KeyboardInterrupt
        return tracer
    sys.settrace(tracer)
    try:
        from deepspeed4science import DS4Sci_EvoformerAttention
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        num_lines.append(seen)
num_lines = []
def close(got, expected):
    assert torch.allclose(got, expected, rtol=1.3e-6, atol=1e-5)
def start(place):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            if interrupted(place):
                # assert_close imports DTensor, which takes 3 s: it is called at some places only.
                check() if place % 3 == 0 else check(close)
            code = 0
        except BaseException as error:
            sys.stderr.write(f"place {place}: {error!r}\\n")
        os._exit(code)
    return child
"""


@functools.cache
def _warm_cache() -> None:
    run("check()")


@pytest.mark.parametrize("where", ["registration", "anywhere"])
def test_interrupt_inside_the_first_import(where):
    """Ctrl-C at 12 lines of registering and of the whole import, other ones in each run of the
    tests; the next import works.
    """
    _warm_cache()
    only = 'FILES = ("registration.py", "torch/library.py", "torch/_library")'
    script = f"""
{only if where == "registration" else ""}
reading, writing = os.pipe()
if os.fork() == 0:
    interrupted(0)
    os.write(writing, str(num_lines[0]).encode())
    os._exit(0)
total = int(os.read(reading, 20))
os.wait()
step = max(total // 12, 1)
places = range(random.randint(1, step), total + 1, step)
failed, running = [], {{}}
def finish_one():
    child, status = os.wait()
    place = running.pop(child)
    if os.waitstatus_to_exitcode(status) != 0:
        failed.append(place)
for place in places:
    if len(running) == 2:
        finish_one()
    running[start(place)] = place
while running:
    finish_one()
print(total, failed)
"""
    total, failed = run(INTERRUPT + script).split(" ", 1)
    assert int(total) > 30, "the lines were not seen"
    assert failed.strip() == "[]"


def test_interrupt_while_the_builders_are_imported():
    """At every line of both packages' own modules: no half of op_builder stays."""
    script = """
FILES = ("deepspeed4science/__init__", "op_builder/__init__")
failed = []
for place in range(1, 1000):
    child = os.fork()
    if child == 0:
        try:
            was = interrupted(place)
            from op_builder import OpBuilder
            os._exit(0 if was else 2)
        except BaseException:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.wait()[1])
    if status == 2:
        break  # no such line
    if status:
        failed.append(place)
print(place, failed)
"""
    places, failed = run(INTERRUPT + script).split(" ", 1)
    assert int(places) > 30, "the lines were not seen"
    assert failed.strip() == "[]"
