#!/usr/bin/env bash
# submitit 1.5.4: a cancelled job on this host has one second to save, and leaves its children running.
#
# Expected: `cancel()` interrupts the function, which saves in 3 seconds, and ends the program that it
#   had started. A function that calls sys.exit(0) has a result, or an error at once.
# Seen: one second after the interrupt the function is killed, nothing is saved, and its child runs
#   on. After sys.exit(0) `result()` waits for 15 seconds and raises "has not produced any output".
# Why it matters: an interrupted study loses the step in progress, and orphans hold the memory of the
#   GPUs that its next start asks for.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet submitit==1.5.4
cat > jobs.py <<'PY'
import os
import subprocess
import sys
import time
from pathlib import Path

import submitit


def train():
    child = subprocess.Popen(["sleep", "30"])
    Path("child").write_text(str(child.pid))
    Path("ready").touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(3)
        Path("saved").touch()
        child.terminate()


def leave():
    sys.exit(0)


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    executor = submitit.LocalExecutor("jobs")
    job = executor.submit(train)
    while not Path("ready").exists():
        time.sleep(0.1)
    start = time.monotonic()
    job.cancel()
    while not job.done():
        time.sleep(0.1)
    print("ended after", round(time.monotonic() - start), "s")
    time.sleep(4)
    child = int(Path("child").read_text())
    print("saved:", Path("saved").exists(), "child runs:", runs(child))
    os.kill(child, 9)
    job = executor.submit(leave)
    while not job.done():
        time.sleep(0.1)
    start = time.monotonic()
    try:
        job.result()
    except submitit.core.utils.UncompletedJobError as error:
        print("has not produced any output" in str(error), round(time.monotonic() - start), "s")
PY
venv/bin/python jobs.py > seen 2> /dev/null
cat seen
diff - seen <<'SEEN'
ended after 1 s
saved: False child runs: True
True 15 s
SEEN
