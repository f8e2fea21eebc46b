#!/usr/bin/env bash
# torch 2.13.0: torchrun's status after a signal is not that of its processes, nor the shell's.
#
# Expected: processes that catch SIGTERM, save and exit with 0 make torchrun end with 0; one that Ctrl-C
#   stops ends with 130; SIGUSR1, which Slurm sends before a time limit, is passed on as the others.
# Seen: status 1 and a traceback (SignalException) for SIGTERM and SIGINT, whatever the processes
#   return. SIGUSR1 kills torchrun itself (138), and the processes do not get it.
# Why it matters: a script cannot distinguish a saved stop from a crash by the status, and a job that
#   Slurm warns by USR1 loses its launcher before any process could save.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > worker.py <<'PY'
import signal
import sys
import time

received = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: received.append(number))
print("ready", flush=True)
end = time.monotonic() + 15
while not received and time.monotonic() < end:
    time.sleep(0.05)
print("worker got", *(signal.Signals(number).name for number in received), flush=True)
sys.exit(0)
PY
for name in TERM INT USR1; do
    # `env` gives SIGINT its default effect back, which a shell takes from background commands.
    env --default-signal=INT venv/bin/torchrun --standalone worker.py > "$name" 2>&1 &
    until grep -q ready "$name"; do sleep 0.2; done
    kill -s "$name" $!
    status=0
    wait $! || status=$?
    sleep 1
    echo "SIG$name: status $status, $(grep 'worker got' "$name" || echo 'nothing reached the worker')"
done 2> /dev/null > seen
cat seen
diff - seen <<'SEEN'
SIGTERM: status 1, worker got SIGTERM
SIGINT: status 1, worker got SIGINT
SIGUSR1: status 138, nothing reached the worker
SEEN
