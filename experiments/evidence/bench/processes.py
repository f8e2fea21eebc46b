"""Processes whose peak memory is measured.

The peak resident memory of a process is what the kernel hands to its parent when it ends
(`ru_maxrss`). A child starts as a copy of its parent, whose size is then its peak so far: the
parent must stay smaller than what it measures.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
ERROR_LINES = 30


def variables(threads: int) -> dict[str, str]:
    """Of the environment of a process that is measured: threads of all libraries, CPU, no network.

    Args:
        threads: Of every library that multiplies matrices.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
    }


def run(
    arguments: Sequence[str],
    log: Path,
    *,
    threads: int,
    more_environment: Mapping[str, str] | None = None,
) -> float:
    """Run this Python with these arguments in the repository; returns its peak memory in MB.

    Args:
        arguments: Of the interpreter: a script or `-m module`, and flags.
        log: File that gets what it prints.
        threads: Of every library that multiplies matrices.
        more_environment: Further variables.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    environment = os.environ | variables(threads) | dict(more_environment or {})
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:  # an interrupt must not leave it running, nor torchrun's ranks
            process.terminate()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-ERROR_LINES:])
        command = " ".join(arguments)
        raise RuntimeError(f"exit status {process.returncode} of: {command}\n{tail}")
    return usage.ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024)
