"""Every recorded figure by one command, on one commit.

    make results                              # all parts; resumes where it was stopped
    make results PARTS="demo film"            # some: parts, or all parts of a study

A part is a command of a study's `record.yaml` (`records/studies.py`). It runs on the CPU unless it
takes a GPU. What is kept of it goes to `assets/results/<part>`, with `record.json`: command,
commit, machine, versions, date, checksums of its inputs, and minutes over all starts. A part with a
record of this code is not made again: of this commit, or of one with the same golden trajectories
and recipes (`records/current.py`). The commit is the last one that changed the code of figures
(`CODE`), from which nothing may differ. Commands run in a git worktree of it,
`output/results/<commit>`, so later edits do not change what is measured. In the end the tables of
README and `docs/` are made anew (`tables.py`).
"""

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from common.record.environment import accelerator, cpu_model, versions
from common.record.run_folder import digest
from experiments.evidence import tables
from experiments.evidence.records import current, studies
from experiments.evidence.records.studies import Record, Recording
from experiments.runs.stages import exit_with_status

STARTS = "starts.json"
# The code of figures, as git's paths; a part may name more
CODE = (
    *(":(glob)*.py", "common", "assets/recipes", "assets/requirements.lock", "experiments"),
    *(f":(exclude)experiments/evidence/{name}" for name in ("records", "make.py", "tables.py")),
    *(f":(exclude)assets/recipes/*/{name}" for name in ("record.yaml", "tables.py")),
)
PACKAGES = ("torch", "transformers", "numpy", "trl")


def main(argv: Sequence[str] | None = None) -> int:
    """Make what has no record of this code; the exit status is 1 if a part failed."""
    recordings = studies.recordings()
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    names = dict.fromkeys([*recordings, *(recording.study for recording in recordings.values())])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(names)}")
    asked = parser.parse_args(argv).parts
    if unknown := set(asked) - names.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    commit = code_commit()
    tree = worktree(commit)
    chosen = [p for p in recordings.values() if not asked or p.name in asked or p.study in asked]
    is_made = [make(recording, commit, tree) for recording in chosen]
    return 0 if all(is_made) else 1


def make(recording: Recording, commit: str, tree: Path) -> bool:
    """Make a part unless it has a record of this code or lacks an input; False if it failed."""
    name, recorded, out = recording.name, studies.read_record(recording.name), tree / recording.out
    if recorded and studies.is_current(recording, recorded, commit):
        print(f"{name}: recorded on {recorded.git_commit[:10]}", flush=True)
        return True
    lacking = [path for path in recording.needs if not (tree / path).exists()]
    if not (studies.ROOT / recording.python).exists():  # its environment is made by another target
        lacking.append(recording.python)
    if lacking:
        print(f"{name}: left out, since {' and '.join(lacking)} is not there", flush=True)
        return True
    trajectories = current.trajectories(recording.stages, studies.ROOT)
    print(f"{name}: {recording.words} (prints to {out}/printed.md)", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    if status := run(recording, tree):
        print(f"{name}: failed with status {status}; see {out}/errors", flush=True)
        return False
    seconds = json.loads((out / STARTS).read_text())
    record = Record(
        commands=[recording.words],
        git_commit=commit,
        trajectories=trajectories,
        settings=current.settings(recording.settings, tree),
        inputs={path: checksums(tree / path) for path in recording.needs},
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        minutes=round(sum(seconds) / 60, 1),
        starts=len(seconds),
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        gpu=accelerator(1)["gpu"] if recording.takes_gpu else None,
        python=platform.python_version(),
        packages={name: v for name, v in versions(PACKAGES).items() if v},
    )
    keep(recording, tree, record)
    tables.write()
    print(f"{name}: recorded in {record.minutes} minutes", flush=True)
    return True


def run(recording: Recording, tree: Path) -> int:
    """Run a part's command: its exit status. `starts.json` gets the seconds of every start."""
    out = tree / recording.out
    command = [str(studies.ROOT / recording.python), "-m", *recording.words.split()]
    earlier = json.loads((out / STARTS).read_text()) if (out / STARTS).is_file() else []
    environment = {"OMP_NUM_THREADS": str(recording.threads)}
    if not recording.takes_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    started = time.perf_counter()
    with (out / "printed.md").open("w") as printed, (out / "errors").open("w") as errors:
        process = subprocess.Popen(
            command, cwd=tree, env=os.environ | environment, stdout=printed, stderr=errors
        )
        try:
            process.wait()
        finally:  # Ctrl-C too: the child saves its state, and must end
            process.terminate()
            process.wait()
            write_json(out / STARTS, [*earlier, round(time.perf_counter() - started, 1)])
    return process.returncode


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by its name in the folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): digest(file) for file in files}


def keep(recording: Recording, tree: Path, record: Record) -> None:
    """Replace the record of a part.

    Raises:
        FileNotFoundError: a glob finds nothing; the old record stays.
    """
    new, folder = studies.RECORDS / f".{recording.name}", tree / (recording.folder or recording.out)
    files = {pattern: sorted(folder.glob(pattern)) for pattern in recording.keep}
    if missing := [pattern for pattern, matches in files.items() if not matches]:
        raise FileNotFoundError(f"{recording.name}: nothing is {' or '.join(missing)} in {folder}")
    shutil.rmtree(new, ignore_errors=True)
    for file in (file for pattern in recording.keep for file in files[pattern]):
        target = new / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    if recording.keep_by:
        module, _, function = recording.keep_by.partition(":")
        getattr(importlib.import_module(module), function)(folder, new)
    write_json(new / studies.RECORD, asdict(record))
    shutil.rmtree(studies.RECORDS / recording.name, ignore_errors=True)
    new.rename(studies.RECORDS / recording.name)


def write_json(file: Path, value: object) -> None:
    """Write indented JSON."""
    file.write_text(json.dumps(value, indent=1) + "\n")


# ---- the commit ----------------------------------------------------------------------------------


def code_commit() -> str:
    """The last commit that changed `CODE`. Exits with a sentence where the tree differs from it."""
    paths = [*CODE, *(path for each in studies.recordings().values() for path in each.code)]
    if changed := git("status", "--porcelain", "--", *paths):
        sys.exit(f"error: a record is of a commit; commit or undo first:\n{changed}")
    return git("log", "-1", "--format=%H", "--", *paths)


def worktree(commit: str) -> Path:
    """A git worktree of the commit, with this tree's `data`; made if it is not there."""
    tree = studies.ROOT / "output" / "results" / commit[:12]
    if not tree.exists():
        git("worktree", "add", "--quiet", "--force", "--detach", str(tree), commit)
        (tree / "data").symlink_to(studies.ROOT / "data")
    return tree


def git(*arguments: str) -> str:
    """The output of a git command."""
    command = ["git", "-C", str(studies.ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    exit_with_status(lambda: sys.exit(main()))  # a part's processes end with this one
