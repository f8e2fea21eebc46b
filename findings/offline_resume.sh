#!/usr/bin/env bash
# wandb 0.31.0: offline, resume="must" resumes nothing and refuses nothing.
#
# Expected: `resume="must"` raises an error for an id that no run has had, offline too. For an id that has a run in
#   this folder it goes on behind that run's last step, `run.resumed` says so, and "never" raises an error.
# Seen: every start is a new run at step 0 with `resumed` False, whatever `resume` says: the same id has a second
#   folder, in which steps 0, 1, 2 are logged again. A step that is given with `log` is kept.
# Why it matters: on a node without a network a training that was stopped and goes on logs its later rewards
#   under the steps of its first ones, unless the script gives each step itself. A mistyped id is no error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet wandb==0.31.0
cat > probe.py <<'PY'
import wandb

settings = wandb.Settings(silent=True)
for name in ("never seen", "seen once"):
    for mode in ("never", "allow", "must"):
        fields = {"project": "test", "id": f"run-{mode}", "mode": "offline", "settings": settings}
        with wandb.init(resume=mode, **fields) as run:
            start = run.step, run.resumed
            for _ in range(3):
                run.log({"reward": 1.0})
            end = run.step
            run.log({"reward": 1.0}, step=100)
            print(f"id {name}, resume {mode}: step {start[0]}, resumed {start[1]}; after three rows {end}, "
                  f"after step=100 {run.step}")
PY
venv/bin/python probe.py 2> log > seen || cat log
echo "folders of run-must: $(find wandb -name 'offline-run-*-run-must' | wc -l)" >> seen
cat seen
diff - seen <<'SEEN'
id never seen, resume never: step 0, resumed False; after three rows 3, after step=100 100
id never seen, resume allow: step 0, resumed False; after three rows 3, after step=100 100
id never seen, resume must: step 0, resumed False; after three rows 3, after step=100 100
id seen once, resume never: step 0, resumed False; after three rows 3, after step=100 100
id seen once, resume allow: step 0, resumed False; after three rows 3, after step=100 100
id seen once, resume must: step 0, resumed False; after three rows 3, after step=100 100
folders of run-must: 2
SEEN
