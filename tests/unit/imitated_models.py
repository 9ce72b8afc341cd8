"""Packages of a few lines in place of models, for tests of the drop-ins."""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write(site, files):
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in path.relative_to(site).parents:
            if str(package) != "." and not package.name.endswith("dist-info"):
                (site / package / "__init__.py").touch()
        path.write_text(textwrap.dedent(text))


BOLTZ = {
    "boltz/model/layers/triangular_attention/primitives.py": """
        def kernel_triangular_attn(q=0, k=0, v=0, tri_bias=0, mask=0, scale=0):
            return "its own"
    """,
    "boltz/model/layers/triangular_mult.py": """
        def kernel_triangular_mult(x, direction, mask, **weights):
            return "its own"
    """,
    "boltz-2.2.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: boltz\nVersion: 2.2.1\n",
    "boltz-2.2.1.dist-info/entry_points.txt": "[console_scripts]\nboltz = boltz.main:cli\n",
}
ATTENTION = "boltz.model.layers.triangular_attention.primitives"


def run(site, *arguments, check=True, cwd=None):
    environment = {"PYTHONPATH": f"{site}:{ROOT}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, cwd=cwd
    )
    assert not check or done.returncode == 0, done.stderr
    return done
