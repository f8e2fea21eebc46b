"""Claims: a failing rank ends all of them, in time, and the first cause is printed once.

On two processes under torchrun: a reward function that raises on one of them is named with its row,
rank and step; a process that is killed leaves no other behind, and is started again by torchrun to
finish the run; one that hangs ends the run after `ddp_timeout`. Ranks with unequal rows, or with
none at all, make the steps that one process makes. What is printed by whom is tested without
processes, on a store that several "ranks" share.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ROOT, environment, launch, run_stages
from torch.distributed.checkpoint.api import CheckpointException

import common.launch
from common import distributed
from common.errors import UserError
from common.exits import failures
from common.record.jsonl import read_jsonl
from common.record.logger import RunLogger

STEPS = 6
REWARDS = """
import os
import signal
import time
from pathlib import Path

RANK = os.environ["RANK"]
FOLDER = Path(__file__).parent
bad_prompts = []


def lengths(completions):
    return [float(len(text)) for text in completions]


def raises(prompts, completions, trainer_state, **columns):
    if RANK == "1" and trainer_state.global_step == 2:
        (FOLDER / "when").touch()
        bad_prompts[:] = bad_prompts or prompts[-1:]
        if bad_prompts[0] in prompts:
            raise ValueError("no such answer")
    return lengths(completions)


def dies(completions, trainer_state, **columns):
    signal.signal(signal.SIGTERM, lambda *_: None)  # torchrun may be quicker than a broken socket
    once = FOLDER / "died"
    if RANK == "1" and trainer_state.global_step == 2 and not once.exists():
        time.sleep(1)  # the other rank comes to wait for this one
        once.touch()
        (FOLDER / "when").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return lengths(completions)


def hangs(completions, trainer_state, **columns):
    if RANK == "1" and trainer_state.global_step == 2:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun waits 30 s, and kills it then
        (FOLDER / "when").touch()
        time.sleep(3600)
    return lengths(completions)
"""
GLOO = "[/x/third_party/gloo/gloo/transport/tcp/{}] {}"
CLOSED = GLOO.format("pair.cc:538", "Connection closed by peer [127.0.0.1]:4242. More text")
WAITED = GLOO.format("unbound_buffer.cc:81", "Timed out waiting 15000ms for recv operation")


# --- real processes ---


@dataclass
class Ended:
    """A run that is over."""

    status: int
    output: str  # of all processes, stdout and stderr
    seconds: float  # from what its reward function did to its end

    @property
    def line(self) -> str:
        """The one line in which a rank says what ended it."""
        lines = re.findall(r"^rank \d+ .*", self.output, re.MULTILINE)
        assert len(lines) == 1, self.output
        return str(lines[0])


def run_grpo(folder: Path, function: str, *options: str, **flags: Any) -> Ended:
    """Run GRPO with a reward function of REWARDS on two processes, until none of them is left."""
    flags = {
        "output_dir": folder / function,
        "model_name_or_path": folder / "tiny.json",
        "tokenizer_name_or_path": folder / "tokenizer",
        "token_cache_dir": "",
        "dataset_test_split": "",
        "num_train_rows": 12,
        "num_sample_prompts": 0,
        "max_prompt_length": 128,
        "max_completion_length": 8,
        "batch_size": 4,
        "num_generations": 2,
        "beta": 0.0,
        "max_steps": STEPS,
        "logging_steps": 1,
        "self_check": "false",
        "reward_funcs": f"{folder / 'rewards.py'}:{function}",
        **flags,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", *options, str(ROOT / "train_grpo.py")]
    command += [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    (folder / "when").unlink(missing_ok=True)
    mark = uuid.uuid4().hex
    variables = environment(RUN_OF_TEST=mark)
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(300)
            ended = time.time()
            assert not marked(mark), "processes are left behind"
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
            process.wait(10)
        log.seek(0)
        output = log.read()
    since = (folder / "when").stat().st_mtime if (folder / "when").exists() else ended
    return Ended(status, output, ended - since)


def marked(mark: str) -> list[int]:
    """The processes that have the mark in their environment, zombies aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"RUN_OF_TEST={mark}".encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path
) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "tiny.json").symlink_to(tiny_gpt2)
    (folder / "tokenizer").symlink_to(tokenizer_folder)
    return folder


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are looked for in /proc"
)


@needs_proc
def test_a_reward_function_that_raises_on_one_rank_is_named_once(folder: Path) -> None:
    run = run_grpo(folder, "raises")
    assert run.status != 0
    assert run.seconds < 15
    ((line, where),) = re.findall(r"^(error: .*)\n(.*)", run.output, re.MULTILINE)
    assert line.startswith("error: reward function ")
    assert "rewards.py:raises' raised ValueError on row 2 of the batch: no such answer" in line
    assert where == "  (rank 1, at step 3 of train_grpo)"
    assert "rank 0" not in run.output  # whose connection broke
    assert "Connection closed" not in run.output
    assert run.output.count("in raises\n") == 0  # no traceback: the line is in the sentence
    kept = folder / "raises" / "failed" / "step_00000003" / "rewards_rank_1"
    assert line.endswith(f"its completions are in {kept}.")
    assert "ValueError: no such answer" in (kept / "traceback.txt").read_text()
    assert len((kept / "rollouts.jsonl").read_text().splitlines()) == 2  # this rank's prompts
    assert not kept.with_name("rewards_rank_0").exists()
    assert re.search(r"Root Cause.*?rank +: 1 ", run.output, re.DOTALL)


@needs_proc
def test_a_killed_rank_ends_all_and_torchrun_starts_them_again(folder: Path) -> None:
    run = run_grpo(folder, "dies", "--max-restarts", "1", save_steps=1)
    assert run.status == 0
    assert run.line.startswith("rank 0 lost its peers at step 3 of train_grpo (a process ended")
    assert re.search(r"failed \(exitcode: -9\) local_rank: 1 ", run.output)  # torchrun's own
    assert run.output.count("12 of 12 rows") == 2  # two starts
    lines = read_jsonl(folder / "dies" / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert (folder / "dies" / "model" / "model.safetensors").exists()


@needs_proc
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(folder: Path) -> None:
    run = run_grpo(folder, "hangs", ddp_timeout=10)
    assert run.status != 0
    assert 6 < run.seconds < 10 + 15  # the other rank may have begun to wait before
    line = run.line
    assert line.startswith("rank 0 lost its peers at step 3 of train_grpo (a process ended")
    assert line.endswith("no word from rank 1")


UNEVEN = {
    "num_sample_prompts": 0,
    "max_prompt_length": 128,
    "max_completion_length": 24,
    "micro_batch_size": 2,
    "logging_steps": 1,
    "max_steps": 2,
    "learning_rate": 1e-4,
    "token_cache_dir": "",
    "num_eval_rows": 1,
    "batch_size": 2,
}


def jobs_on_uneven_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Every stage for an epoch of two steps, on rows of very different lengths."""
    jobs = []
    for stage in ("sft", "reward", "dpo", "grpo"):
        flags = UNEVEN | {
            "output_dir": str(folder / name / stage),
            "dataset_name": str(folder / ("pairs" if stage in ("reward", "dpo") else "sft")),
            "model_name_or_path": str(folder / "tiny.json"),
            "tokenizer_name_or_path": str(folder / "tokenizer"),
        }
        if stage == "grpo":
            flags |= {"num_generations": 2, "reward_funcs": "length", "entropy_coef": 0.1}
        jobs.append({"stage": stage, "flags": flags})
    return jobs


def run_and_measure(jobs: list[dict[str, Any]]) -> list[float]:
    """Run the stages; then the timeouts, in seconds, of the groups that are made later."""
    run_stages(jobs)
    distributed._limit = timedelta(seconds=77)
    groups = distributed.mesh(distributed.world_size()).get_all_groups()
    groups.append(distributed.another_group())
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_ranks_without_rows_make_the_steps_of_one_process(folder: Path) -> None:
    """Of 3 rows in batches of 2 one rank has none in the second step, nor one to evaluate on."""
    short = {"prompt": "a", "completion": " b", "chosen": " b", "rejected": " c"}
    words = " ".join(["word"] * 60)
    long = {"prompt": words, "completion": words[:60], "chosen": words[:60], "rejected": " no"}
    rows = [short, long, {**short, "prompt": "of another"}]
    for kind, columns in (("sft", ["completion"]), ("pairs", ["chosen", "rejected"])):
        (folder / kind).mkdir()
        text = "".join(json.dumps({k: row[k] for k in ("prompt", *columns)}) + "\n" for row in rows)
        for split in ("train", "validation"):
            (folder / kind / f"{split}.jsonl").write_text(text)
    for num_ranks in (1, 2):
        jobs = jobs_on_uneven_rows(folder, str(num_ranks))
        timeouts = launch(run_and_measure, num_ranks, folder, jobs=jobs)
    assert timeouts == [[77.0] * 3] * 2  # torch's own default would be half an hour
    names = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
    for stage in ("sft", "reward", "dpo", "grpo"):
        expected, lines = (read_jsonl(folder / n / stage / "metrics.jsonl") for n in ("1", "2"))
        assert [line["step"] for line in lines] == [line["step"] for line in expected]
        assert [line["step"] for line in lines if line.get("grad_norm", 0) > 0] == [1, 2]
        for line, other in zip(lines, expected, strict=True):
            values, wanted = ({k: x[k] for k in names if k in x} for x in (line, other))
            assert values == pytest.approx(wanted, rel=1e-4, abs=1e-6), stage


# --- who says what ---


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store that "ranks" share; this process is in step 12 of 20 of train_grpo."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_grpo.py"])
    monkeypatch.setattr(failures, "LINGER", 0.0)
    monkeypatch.setattr(failures, "_progress", (11, 20))
    return dist.HashStore()


def caught(error: BaseException) -> BaseException:
    """The exception with a traceback."""
    try:
        raise error
    except BaseException as raised:
        return raised


def say(capsys: Any, error: BaseException, *where: Any) -> str:
    """What a rank prints for the exception."""
    failures.report(caught(error), *where)
    return capsys.readouterr().err.strip()


def test_the_first_cause_is_printed_and_what_follows_is_not(store: Any, capsys: Any) -> None:
    text = say(capsys, ValueError("a bad row. And more"), store, 1, 4)
    first, *rest = text.splitlines()
    assert first == "rank 1 failed at step 12 of train_grpo: ValueError: a bad row"
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "ValueError: a bad row. And more"
    assert say(capsys, RuntimeError(CLOSED), store, 0, 4) == ""
    assert say(capsys, dist.DistNetworkError("gone"), store, 2, 4) == ""
    assert say(capsys, ValueError("a bad row. And more"), store, 3, 4) == ""  # the same one again


def test_another_failure_is_one_line(store: Any, capsys: Any) -> None:
    say(capsys, ValueError("a bad row"), store, 1, 4)
    assert say(capsys, MemoryError("of rank 3"), store, 3, 4) == (
        "rank 3 failed at step 12 of train_grpo: MemoryError: of rank 3 (after rank 1 failed)"
    )


def test_other_hosts_repeat_the_cause_once(store: Any, capsys: Any) -> None:
    say(capsys, ValueError("a bad row"), store, 1, 8, 0)
    assert say(capsys, RuntimeError(CLOSED), store, 5, 8, 1) == (
        "rank 5 ends: rank 1 failed at step 12 of train_grpo: ValueError: a bad row"
    )
    assert say(capsys, RuntimeError(CLOSED), store, 6, 8, 1) == ""
    assert say(capsys, RuntimeError(CLOSED), store, 2, 8, 0) == ""


def test_a_lost_peer_is_a_sentence_without_a_traceback(store: Any, capsys: Any) -> None:
    (line,) = say(capsys, RuntimeError(CLOSED), store, 0, 2).splitlines()
    assert line.startswith(
        "rank 0 lost its peers at step 12 of train_grpo (a process ended or hangs, or a host is "
        "unreachable) (test_failures.py, line "
    )
    assert line.endswith("Connection closed by peer [127.0.0.1]:4242")


def test_ranks_that_did_not_answer_are_named(store: Any, capsys: Any) -> None:
    store.set(f"{failures.HEARD}/2", "yes")  # it waited in vain as well
    line = say(capsys, RuntimeError(WAITED), store, 0, 4)
    assert line.endswith("Timed out waiting 15000ms for recv operation; no word from rank 1, 3")


def test_a_store_that_does_not_answer_is_said(store: Any, capsys: Any, monkeypatch: Any) -> None:
    is_over = threading.Event()

    class Gone:
        def set(self, key: str, value: str) -> None:
            is_over.wait()
            raise dist.DistNetworkError("the store is gone")

    monkeypatch.setattr(failures, "STORE_TIMEOUT", 0.05)
    line = say(capsys, RuntimeError(CLOSED), Gone(), 1, 2)
    assert line.endswith("4242; nor does the store answer")
    text = say(capsys, ValueError("a bad row"), Gone(), 1, 2)
    assert text.startswith(
        "rank 1 failed at step 12 of train_grpo: ValueError: a bad row\nTraceback"
    )
    is_over.set()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_sentence(number: int, store: Any, capsys: Any) -> None:
    error = OSError(number, os.strerror(number), "/data/run/metrics.jsonl")
    assert say(capsys, error, store, 1, 2) == (
        f"rank 1 stopped at step 12 of train_grpo: {os.strerror(number).lower()} while writing "
        "/data/run/metrics.jsonl."
    )
    assert failures.exit_status(error) == 1


def test_a_full_disk_is_seen_below_other_exceptions(
    store: Any, capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.symlink_to("/dev/full")  # a device on which every write finds the disk full
    opened = file.open("w")
    logger: Any = SimpleNamespace(_files={file.name: opened}, output_dir=tmp_path)
    with pytest.raises(OSError, match="No space left") as raised, opened:
        RunLogger._append(logger, file.name, {"step": 1})
    assert failures.disk_full(raised.value) == f"no space left on device while writing {file}"
    wrapped = CheckpointException("saving", {0: (raised.value, None)})
    assert failures.disk_full(wrapped) == f"no space left on device while writing {file}"
    nameless = CheckpointException("saving", {0: (OSError(errno.ENOSPC, "full"), None)})
    line = failures.disk_full(caught(nameless))  # what came from another rank has no traceback
    assert re.fullmatch(r"no space left on device \(test_failures.py, line \d+\)", line)
    library = RuntimeError("I/O error: No space left on device (os error 28)")
    line = say(capsys, library, store, 0, 1)
    assert re.search(r"no space left on device \(test_failures.py, line \d+\).$", line)
    assert failures.disk_full(OSError(errno.EACCES, "Permission denied", "f")) == ""


def test_the_line_named_is_one_of_ours() -> None:
    """A virtual environment may lie in the project's folder."""
    installed = str(ROOT / ".venv" / "lib" / "site-packages" / "library.py")
    with pytest.raises(OSError, match="full") as raised:
        exec(compile("raise OSError('full')", installed, "exec"))
    assert failures.origin(raised.value).startswith("(test_failures.py, line ")


def test_the_network_of_a_reward_function_is_not_taken_for_a_peer(store: Any, capsys: Any) -> None:
    text = say(capsys, ConnectionResetError("Connection reset by peer"), store, 1, 2)
    assert text.startswith("rank 1 failed at step 12 of train_grpo: ConnectionResetError: ")
    assert "Traceback" in text
    wrapped = RuntimeError("reward function 'judge' raised RuntimeError on a batch of 2 rows")
    wrapped.__cause__ = RuntimeError(CLOSED)  # a sharded reward model lost its peers
    assert failures.lost_peers(wrapped)


def test_being_interrupted_is_said_once_without_a_traceback(store: Any, capsys: Any) -> None:
    assert say(capsys, KeyboardInterrupt(), store, 1, 2) == (
        "rank 1 was interrupted at step 12 of train_grpo"
    )
    assert say(capsys, KeyboardInterrupt(), store, 0, 2) == ""
    assert failures.report(KeyboardInterrupt(), None, 1, 2) == 130  # before there is a store
    assert not capsys.readouterr().err
    assert say(capsys, KeyboardInterrupt(), None, 0, 2).startswith("rank 0 was interrupted")


@pytest.mark.parametrize(("code", "status"), [(0, 1), (None, 1), (3, 3), ("no", 1), (256, 1)])
def test_leaving_amid_a_run_is_a_failure(code: Any, status: int, store: Any, capsys: Any) -> None:
    assert say(capsys, SystemExit(code), store, 1, 2) == (
        f"rank 1 left at step 12 of train_grpo: sys.exit({code!r}) was called"
    )
    assert failures.exit_status(SystemExit(code)) == status


def test_the_place_in_the_run(store: Any, monkeypatch: Any) -> None:
    assert failures.place() == "at step 12 of train_grpo"
    assert failures.aside(1) == "\n  (rank 1, at step 12 of train_grpo)"  # below a refusal
    failures.note_step(20, 20)
    assert failures.place() == "after step 20, the last of train_grpo"
    monkeypatch.setattr(failures, "_progress", None)
    assert failures.place() == "in train_grpo"
    assert failures.aside(1) == ""


def test_a_refused_rank_is_no_riddle_to_its_peers(
    store: Any, capsys: Any, monkeypatch: Any
) -> None:
    """Rank 1 alone finds a file missing; rank 0 loses the connection and has nothing to add."""
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(failures, "_progress", None)  # it is found before the first step
    monkeypatch.setattr(common.launch, "REFUSED_ALONE_AFTER", 0.0)
    monkeypatch.setattr(distributed, "store", lambda: store)
    monkeypatch.setattr(common.launch, "close_and_exit", lambda status: None)
    common.launch.refuse(UserError("there is no file rows.jsonl."))
    assert capsys.readouterr().err == "error: there is no file rows.jsonl.\n"
    assert say(capsys, RuntimeError(CLOSED), store, 0, 2) == ""


def test_a_restarted_process_meets_the_living_only() -> None:
    """The store holds what an earlier start left; rank 1 comes first, and waits for rank 0."""
    shared = dist.HashStore()
    shared.set("start", "old")
    shared.set("old/here/1", "a dead rank's word")
    shared.set("old/confirmed/1", "a dead rank's word")
    parts: dict[int, Any] = {}

    def join(number: int) -> None:
        parts[number] = distributed.part_of_this_start(shared, number, 2)

    second, first = (threading.Thread(target=join, args=(n,), daemon=True) for n in (1, 0))
    second.start()
    time.sleep(0.2)
    assert not parts
    first.start()
    first.join(10)
    second.join(10)
    parts[0].set("key", "of both")
    assert parts[1].get("key") == b"of both"
    assert not shared.check(["key", "old/key"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WORLD_SIZE": "abc"}, "'abc'); the environment has RANK 1, WORLD_SIZE abc, MASTER_ADDR "),
        ({"RANK": "abc"}, "'abc'); the environment has RANK abc, "),
        ({"MASTER_ADDR": None}, "MASTER_ADDR not set, MASTER_PORT "),
        ({"WORLD_SIZE": "1"}, "(there is no process 1 of 1); "),
        ({"MASTER_ADDR": "no.invalid"}, "while trying to connect to (no.invalid, "),
    ],
)
def test_an_environment_of_no_group_is_refused(changes: Any, said: str, monkeypatch: Any) -> None:
    there = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    group["MASTER_PORT"] = str(there.port)
    monkeypatch.setattr(distributed, "_limit", timedelta(seconds=1))
    for name, value in (group | changes).items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    with pytest.raises(UserError, match=re.escape(said)):
        distributed.meet()
    assert distributed.rank() in (0, 1)
    assert distributed.world_size() in (1, 2)


ORPHAN = """
import ctypes, os, subprocess, sys, time
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
LAUNCHER = '''
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid)
'''
WORKER = '''
import os, time
from common import distributed
while open(f"/proc/{os.getppid()}/comm").read().strip() != os.environ["PARENT"]:
    time.sleep(0.05)
distributed.die_with_launcher()
os._exit(7)
'''
prctl = ctypes.CDLL(None).prctl
prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what an orphan becomes a child of
prctl(PR_SET_NAME, os.environ["PARENT"].encode(), 0, 0, 0)
pid = int(subprocess.check_output([sys.executable, "-c", LAUNCHER, WORKER]))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(("parent", "status"), [("systemd", -signal.SIGKILL), ("pt_elastic", 7)])
def test_a_process_whose_torchrun_died_while_it_imported_ends(parent: str, status: int) -> None:
    variables = environment(TORCHELASTIC_RUN_ID="none", PARENT=parent)
    command = [sys.executable, "-c", ORPHAN]
    assert subprocess.check_output(command, env=variables, text=True) == f"{status}\n"


@pytest.mark.parametrize("visible", ["0", "", None])
@pytest.mark.parametrize(
    ("cuda", "said"),
    [("13.0", "for CUDA 13.0 .* 535.129.03; update"), (None, "without CUDA .* a torch for CUDA,")],
)
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(
    cuda: str | None, said: str, visible: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    """Unless the user has hidden the GPU, or there is none."""
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023"
    )
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(distributed, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(distributed, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    distributed.refuse_without_gpu()
    (tmp_path / "nvidia0").touch()
    if visible == "":
        distributed.refuse_without_gpu()
        return
    with pytest.raises(UserError, match=f"built {said}.* CUDA_VISIBLE_DEVICES="):
        distributed.refuse_without_gpu()


ALLOCATOR = """
import torch
from common import distributed
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda rank: print(torch._C._accelerator_getAllocatorSettings())
distributed.start()
"""


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_gpus_memory_is_in_segments_that_grow_unless_the_user_has_set_something(
    name: str,
) -> None:
    """Asked of torch's allocator, which has read the environment by the time a GPU is chosen."""
    given = {name: "max_split_size_mb:100"} if name else {}
    command = [sys.executable, "-c", ALLOCATOR]
    found = subprocess.run(command, env=environment(**given), capture_output=True, text=True)
    expected = "max_split_size_mb:100" if name else "expandable_segments:True"
    assert found.stdout == f"{expected}\n"
