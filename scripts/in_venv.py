"""Imported first by the scripts in Python: starts them again with .venv's Python, which has CUTLASS
and what else they need, where scripts/setup-venv has made it.
"""

import os
import sys
from pathlib import Path

_VENV = Path(__file__).resolve().parent.parent / ".venv"
_PYTHON = _VENV / "bin" / "python"

if _PYTHON.exists() and not os.path.samefile(sys.prefix, _VENV):
    os.execv(_PYTHON, [str(_PYTHON), *sys.argv])
