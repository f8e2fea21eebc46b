#!/usr/bin/env bash
# submitit 1.5.4: to any process but the one that started it, a running job of this host is done.
#
# Expected: LocalJob(folder, id), made in a second process while the job runs, is not done; its state
#   is RUNNING, and `wait` returns when it has ended.
# Seen: `done()` is True at once, with the state "NO PROCESS AND NO RESULT"; in the process that has
#   submitted it the same job is RUNNING, and minutes later it has a result.
# Why it matters: a study that is started again after its driver was killed takes what runs for lost,
#   and starts it a second time into the same folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet submitit==1.5.4
cat > jobs.py <<'PY'
import subprocess
import sys
import time

import submitit


def work():
    time.sleep(15)
    return "a result"


if __name__ == "__main__":
    job = submitit.LocalExecutor("jobs").submit(work)
    time.sleep(5)
    second = f"""
import submitit
job = submitit.LocalJob("jobs", "{job.job_id}")
print("second process:", job.done(), job.state)
"""
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", second], check=True)
    print("first process:", job.done(), job.state)
    print("then:", job.result())
PY
venv/bin/python jobs.py > seen
cat seen
diff - seen <<'SEEN'
second process: True NO PROCESS AND NO RESULT
first process: False RUNNING
then: a result
SEEN
