"""One run of a stage script as a child process, made once: what a chain of runs is built of.

A finished run is marked by `finished.json` in its folder. The mark holds what made the run: the
script, its flags, and for each file or earlier run that they name a digest of it. So the same
command does nothing, a changed one is made again, and so is all that was built on it. A run that
did not finish is started again, and resumes as the script itself does: `started.json` holds what
made its checkpoints, and those of anything else are not gone on with.

Not collective: a driver is one process, which starts the processes of a run and waits for them.
"""

import importlib
import json
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast, get_type_hints

from filelock import FileLock, Timeout

from common.config.parser import parse
from common.config.recipes import read_recipe
from common.errors import UserError
from common.record import output_lock
from common.record.jsonl import write_atomically
from common.record.run_folder import MARK, digest, input_digests
from common.record.terminal import run_command

ROOT = Path(__file__).resolve().parents[2]
PATCHED = Path(__file__).with_name("patched.py")
BEGUN = "started.json"
DRIVER_LOCK = ".driver.lock"
LOG = "stage.log"
# The stages in order, by the names of their recipes, and their scripts. `reward-small.yaml` is a
# second recipe of `reward`.
CHAIN = {
    "sft": "train_sft.py",
    "pairs": "experiments/sample_pairs.py",
    "reward": "train_reward.py",
    "dpo": "train_dpo.py",
    "grpo": "train_grpo.py",
    "evaluate": "evaluate.py",
    "frontier": "experiments/runs/overoptimization/__main__.py",
}
# A driver starts the processes of its stages itself.
DRIVERS = ("experiments/runs/overoptimization/__main__.py",)
TAIL = 40  # lines of a failed run's output that its error repeats


class StageFailed(RuntimeError):  # noqa: N818 - what has failed is the stage
    """A run did not finish; the text ends with the last lines of its output."""


@dataclass(frozen=True)
class Stage:
    """A stage script with its flags."""

    script: str  # of this project, as `train_sft.py`
    output_dir: Path  # the run's folder; becomes its `--output_dir`
    config: Path | None = None  # its recipe
    flags: Mapping[str, Any] = field(default_factory=dict)  # over the recipe; a list is several
    patch: Path | None = None  # Python file, run in the same process before the script it changes
    num_processes: int = 1  # by torchrun if several; no part of what makes a run, as of its results


def run(stage: Stage) -> None:
    """Make a run, unless the same one is finished. Its output is shown, and kept in `stage.log`.

    Where another driver makes it, or has left its script running, this one waits for that.

    Raises:
        UserError: the script refuses a value.
        StageFailed: it failed, or was stopped before its end.
    """
    stage.output_dir.mkdir(parents=True, exist_ok=True)
    with held(stage.output_dir / DRIVER_LOCK):
        with held(stage.output_dir / output_lock.NAME):
            pass  # of a script whose driver was killed
        make(stage)


def make(stage: Stage) -> None:
    """Make a run that no other driver makes."""
    made_by = description(stage)
    if read_mark(stage.output_dir) == made_by:
        print(f"{stage.output_dir}: finished before", flush=True)
        return
    (stage.output_dir / MARK).unlink(missing_ok=True)
    print(f"\n=== {stage.output_dir}: {stage.script}", flush=True)
    words = command(stage)
    if read_mark(stage.output_dir, BEGUN) != made_by:
        write_mark(stage.output_dir, made_by, BEGUN)
        if Path(stage.script).name.startswith("train_"):  # which keeps checkpoints
            words.append("--resume_from_checkpoint=none")
    status, last_lines = show(words, stage.output_dir / LOG)
    name = f"{stage.script} for {stage.output_dir}"
    refusals = [line for line in last_lines if line.startswith("error: ")]
    if any("stopped after step " in line for line in last_lines):  # by a signal
        raise StageFailed(f"{name} was stopped; the same command goes on with it.")
    if status != 0 and refusals:
        raise UserError(f"{name}: {refusals[0].removeprefix('error: ')}")
    if status != 0:
        raise StageFailed("\n".join([f"{name} ended with status {status}:", *last_lines]))
    write_mark(stage.output_dir, made_by)


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Wait for a lock and hold it; on a file system without locks nothing is locked."""
    lock = FileLock(file, fallback_to_soft=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            print(f"{file.parent}: waits for another process that writes there", flush=True)
            lock.acquire()
    except OSError as error:
        if error.errno not in output_lock.NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def is_finished(stage: Stage) -> bool:
    """Whether the mark in its folder is of this very run: the same flags, patch and inputs."""
    return read_mark(stage.output_dir) == description(stage)


def command(stage: Stage) -> list[str]:
    """The command line that starts the run."""
    script = [str(ROOT / stage.script)]
    if stage.script.startswith("experiments/"):
        script = ["-m", stage.script.removesuffix(".py").replace("/", ".")]
    elif stage.patch:
        script = [str(PATCHED), str(stage.patch), *script]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    is_launched = stage.num_processes > 1 and stage.script not in DRIVERS
    launch = [*launcher, str(stage.num_processes)] if is_launched else []
    return [sys.executable, *launch, *script, *script_arguments(stage)]


def config_class(script: str) -> type[Any]:
    """The config class of a script: the parameter of its `main`."""
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    return cast(type[Any], get_type_hints(module.main)["config"])


def config_of(stage: Stage) -> Any:
    """The config that a run's script would have; a UserError for a flag that it refuses."""
    return parse(config_class(stage.script), script_arguments(stage))


def check_flags(stages: Iterable[Stage]) -> None:
    """Refuse flags that a script refuses, and a patch that is no file, before the first run."""
    for stage in stages:
        where = f"{stage.script} for {stage.output_dir}"
        if stage.patch and not stage.patch.is_file():
            raise UserError(f"{where}: the patch {stage.patch} must be a file.")
        try:
            config_of(stage)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def script_arguments(stage: Stage) -> list[str]:
    """The arguments of a run's script."""
    words = ["--config", str(stage.config)] if stage.config else []
    for name, value in {**stage.flags, "output_dir": stage.output_dir}.items():
        if isinstance(value, list | tuple):
            words += [f"--{name}", *map(as_text, value)]
        else:
            words.append(f"--{name}={as_text(value)}")  # one word: it may begin with a dash
    return words


def moved(value: Any, folders: Mapping[str, Any]) -> Any:
    """A flag's value, or a list's items: a path in one of the folders is in its other one."""
    if isinstance(value, list):
        return [moved(item, folders) for item in value]
    old = next((old for old in folders if f"{value}/".startswith(f"{old}/")), "")
    return f"{folders[old]}{value[len(old) :]}" if old else value


def as_text(value: Any) -> str:
    """A value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def show(words: list[str], log: Path) -> tuple[int, list[str]]:
    """Run a command, showing its output and adding it to a log file: status and last lines."""
    last_lines: deque[str] = deque(maxlen=TAIL)
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    # USR1, which Slurm may send to every process of a job, would end torchrun; scripts take it back
    ignoring = partial(signal.signal, signal.SIGUSR1, signal.SIG_IGN)
    child = subprocess.Popen(
        words, stdout=pipe, stderr=both, encoding="utf-8", errors="replace", preexec_fn=ignoring
    )
    assert child.stdout is not None
    with log.open("a", encoding="utf-8") as file:
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
                last_lines.append(line.rstrip("\n"))
        except BaseException:  # also Ctrl-C: the child saves what it has, and must not be left
            child.terminate()
            file.write(child.stdout.read())
            child.wait()
            raise
    return child.wait(), list(last_lines)


# ---- what made a run -----------------------------------------------------------------------------


def description(stage: Stage) -> dict[str, Any]:
    """Everything that a run depends on, ready for JSON.

    Values are texts, as on a command line: 1e-4 in a recipe and 0.0001 as a flag are two runs.
    """
    patch = digest(stage.patch) if stage.patch else None
    digests = input_digests(flag_texts(stage))
    return {"script": stage.script, "flags": flags_of(stage), "patch": patch, "inputs": digests}


def flags_of(stage: Stage) -> dict[str, str | list[str]]:
    """The flags of recipe and run, but for the folder that it writes to."""
    recipe = read_recipe(str(stage.config)) if stage.config else {}
    return {
        str(name): list(map(as_text, value)) if isinstance(value, list | tuple) else as_text(value)
        for name, value in {**recipe, **stage.flags}.items()
        if name != "output_dir"
    }


def flag_texts(stage: Stage) -> list[str]:
    """Every value of its flags; some name files, or other runs."""
    values = flags_of(stage).values()
    return [t for value in values for t in (value if isinstance(value, list) else [value])]


def read_mark(output_dir: Path, name: str = MARK) -> dict[str, Any] | None:
    """The description of the finished (or the begun) run in a folder, None without one."""
    try:
        return dict(json.loads((output_dir / name).read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write_mark(output_dir: Path, made_by: Mapping[str, Any], name: str = MARK) -> None:
    """Mark a run as finished (or as begun); a mark is whole or not there."""
    write_atomically(output_dir / name, [json.dumps(made_by, indent=1) + "\n"])


# ---- drivers -------------------------------------------------------------------------------------


def exit_by(number: int, _: object) -> None:
    """End this process as a signal would, but through what tidies up."""
    sys.exit(128 + number)


def exit_with_status(main: Callable[[], None]) -> None:
    """Run a driver; it ends with the statuses of a stage, and takes its child along."""
    for asked in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(asked) != signal.SIG_IGN:  # as by nohup
            signal.signal(asked, exit_by)
    try:
        run_command(main)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except StageFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        sys.exit(1)
