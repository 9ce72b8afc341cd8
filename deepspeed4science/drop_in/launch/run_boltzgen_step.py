"""One step of boltzgen with this op: its command line starts a process of this script for each."""

import sys
from pathlib import Path

# For a clone that is not installed; behind everything else.
sys.path.append(str(Path(__file__).parents[3]))

from deepspeed4science.drop_in import launching

launching.switch_and_tell("boltzgen")  # also in processes that multiprocessing spawns

if __name__ == "__main__":
    from boltzgen.resources.main import main

    main(sys.argv[1], sys.argv[2:])
