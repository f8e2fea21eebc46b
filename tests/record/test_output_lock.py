"""Two live runs never share an `output_dir`, and a dead one never keeps it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from common.checkpoint import layout, resume
from common.errors import UserError
from common.record import output_lock

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from common.record import output_lock
output_lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
TAKE = HOLD.replace("time.sleep(60)", "")


def test_a_folder_is_another_run_s_until_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        layout.folder_of(tmp_path, 1).mkdir(parents=True)
        with pytest.raises(UserError, match="is being written by another run; wait"):
            resume.find_checkpoint(tiny.train_config(output_dir=str(tmp_path)))  # before it is read
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    output_lock.take(tmp_path)
    output_lock.take(tmp_path)  # a run in the same process goes on
    again = [sys.executable, "-c", TAKE, str(tmp_path)]
    refused = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "UserError" in refused.stderr
    output_lock.release(tmp_path)
    subprocess.run(again, cwd=ROOT, check=True)
