#!/usr/bin/env bash
# submitit 1.5.4: a job on this host has no GPU and 90 seconds, unless it is given both.
#
# Expected: a function submitted to LocalExecutor without parameters sees the GPUs that this process
#   sees, and runs as long as it takes.
# Seen: CUDA_VISIBLE_DEVICES is empty in the job. After 1.5 of 2 minutes the job gets SIGUSR2, and
#   its result is an error: "timed-out and not checkpointable".
# Why it matters: training runs on the CPU of a GPU host without a word, and ends when a first try of
#   a minute had worked.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet submitit==1.5.4
cat > jobs.py <<'PY'
import os
import time

import submitit


def gpus():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def long_work():
    time.sleep(150)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    executor = submitit.LocalExecutor("jobs")
    print("CUDA_VISIBLE_DEVICES of the job:", repr(executor.submit(gpus).result()))
    start = time.monotonic()
    error = str(executor.submit(long_work).exception())
    print("ended after", 30 * round((time.monotonic() - start) / 30), "s")
    print(next(line for line in error.splitlines() if "not requeued" in line))
PY
venv/bin/python jobs.py > seen
cat seen
diff - seen <<'SEEN'
CUDA_VISIBLE_DEVICES of the job: ''
ended after 90 s
submitit.core.utils.UncompletedJobError: Job not requeued because: timed-out and not checkpointable.
SEEN
