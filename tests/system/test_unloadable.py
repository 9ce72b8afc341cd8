"""What was compiled and cannot be loaded: told, never published, and never in a sound one's way."""

import hashlib
import json
import shutil
import subprocess

LOAD_SOURCE = """
try:
    report(origin=[jit.load([toy(source={source!r})])[0].origin])
except BuildError as error:
    report(error=str(error))
"""


def unloadable(workshop):
    """A source that compiles and links, but calls what no library has."""
    source = workshop.source().replace("return TOY_STATUS", "nowhere(); return TOY_STATUS")
    return 'extern "C" void nowhere();\n' + source


def test_it_is_not_published(workshop):
    """Nor does a second process find it: each says what is wrong."""
    script = LOAD_SOURCE.format(source=unloadable(workshop))
    for _ in range(2):
        error = workshop.run(script).report["error"]
        assert "toy was compiled but cannot be loaded" in error
        assert "undefined symbol: nowhere" in error
        assert workshop.entries == []


def test_an_entry_that_cannot_be_loaded_gives_way_to_one_that_can(workshop):
    """It was published by a machine that differs, or before kernels were loaded first."""
    workshop.run()
    (entry,) = workshop.entries
    library = entry / "toy.so"
    (workshop.root / "toy.cpp").write_text(unloadable(workshop))
    compiler, include = shutil.which("g++") or "c++", f"-I{workshop.include}"
    command = [compiler, "-shared", "-fPIC", include, "toy.cpp", "-o", str(library)]
    subprocess.run(command, cwd=workshop.root, check=True)
    meta = json.loads((entry / "meta.json").read_text())
    data = library.read_bytes()
    meta |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (entry / "meta.json").write_text(json.dumps(meta))
    mended = workshop.run()
    assert mended.origin == "built"
    assert "cannot be loaded" in mended.messages
    assert "private copy" not in mended.messages
    assert workshop.run().origin == "cache"
