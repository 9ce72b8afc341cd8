"""The command line of boltzgen with this op: `__main__` in all its processes."""

import sys
from pathlib import Path

# For a clone that is not installed; behind everything else.
sys.path.append(str(Path(__file__).parents[3]))

from deepspeed4science.drop_in import launching

launching.switch_and_tell("boltzgen")  # also in processes that multiprocessing spawns

if __name__ == "__main__":
    launching.run("boltzgen")
