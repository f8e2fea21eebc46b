"""A script in a fork of this process, which has imported torch already: five seconds less a run.

For one process on a CPU. A run on a GPU starts afresh, since CUDA does not survive a fork.
"""

import importlib
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import torch

STAGES = ("train_sft", "train_reward", "train_dpo", "train_grpo", "evaluate")
# What the stages import only where they use it.
LATE = ("transformers.models.gpt2.modeling_gpt2", "matplotlib.backends.backend_agg")


class ForkedScript:
    """A running script; what `subprocess.Popen` offers of it.

    Args:
        words: the script and its arguments.
    """

    def __init__(self, words: Sequence[str]) -> None:
        """Start it."""
        for name in (*STAGES, *LATE):
            importlib.import_module(name)
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            run_here(words, writing)
        os.close(writing)
        self.stdout: TextIO = os.fdopen(reading, encoding="utf-8", errors="replace")

    def terminate(self) -> None:
        """Ask it to stop."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Its exit status; minus the number of the signal that ended it."""
        self.stdout.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def is_possible() -> bool:
    """Whether a run of one process may be forked from this one.

    Not from one with threads, as after a backward pass: a lock that one of them holds at that
    moment would never be released in the child.
    """
    if sys.platform != "linux" or torch.cuda.is_available():
        return False
    return len(os.listdir("/proc/self/task")) == 1


def run_here(words: Sequence[str], output: int) -> NoReturn:
    """Become a script whose output goes to a file descriptor."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", 1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # not the driver's
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    status = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
