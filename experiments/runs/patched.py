"""Run a Python file, then a stage script in the same process: how a sweep's patches are run.

    python experiments/runs/patched.py PATCH.py train_reward.py --config ...

The patch replaces functions of `common` before the script uses them: known bugs of other code are
re-enacted so, for which the stage scripts have no flag. A run with a patch says so in its first
line.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    patch, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)  # as if Python had been given the script
    about = runpy.run_path(patch)["__doc__"] or ""
    from common import distributed

    if distributed.is_rank0():
        print(f"!!! PATCHED ({patch}): {about.strip().splitlines()[0]}", flush=True)
    runpy.run_path(script, run_name="__main__")
