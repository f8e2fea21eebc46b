"""Claims: a failing rank ends all of them, in time, and torchrun names it as the first.

On two processes under torchrun: one that raises, one that is killed, one that hangs. Ranks with
unequal rows, or with none at all, make the steps that one process makes. About
`common.shutdown` and `common.launch`.
"""

import ctypes
import errno
import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import ROOT, SHORT_RUN, Script, environment, launch, run_stages, untimed_lines

import common
import common.launch
from common import distributed
from common.errors import UserError, of_full_disk
from common.launch import PATIENCE
from common.record import terminal
from common.record.jsonl import read_jsonl
from common.shutdown import failures, processes, signals

STEPS = 6
REWARDS = """
import os
import signal
import time
from pathlib import Path

import torch

import common.launch

common.launch.PATIENCE = 1.5  # seconds, in which torchrun looks at its processes 15 times
RANK = os.environ["RANK"]
FOLDER = Path(__file__).parent


def lengths(completions):
    return [float(len(text)) for text in completions]


def raises(completions, trainer_state, **columns):
    if RANK == "1" and trainer_state.global_step == 2:
        (FOLDER / "when").touch()
        raise ValueError("no such answer")
    return lengths(completions)


def breaks(completions, trainer_state, **columns):
    if RANK == "1" and trainer_state.global_step == 2:
        (FOLDER / "when").touch()
        torch.Tensor.backward = lambda *_, **__: None.rank_1  # what comes next
    return lengths(completions)


def dies(completions, trainer_state, **columns):
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
NO_ROOM = "No space left on device (os error 28)"
FULL = f"error: a disk, or the temporary folder (TMPDIR), is full: {NO_ROOM}."
OBJECTIVES = """
import torch

import common.launch
from common import distributed

common.launch.PATIENCE = 1.5
CALLS = []


def is_broken(number):
    from pathlib import Path

    CALLS.append(None)
    mended = Path(__file__ + ".mended").exists()
    return len(CALLS) == number and distributed.rank() == 1 and not mended


def policy(logps, advantages, mask):
    assert not is_broken(5 + 2 * 2 + 2), "no such token"  # 5 at start; in step 3's last micro-batch
    return torch.where(mask, -logps * advantages, 0.0)


def groups(rewards, all_reduce):
    assert not is_broken(23 + 3), "no such group"  # 23 at start; the other rank waits for a sum
    return rewards - all_reduce(rewards.sum()) / all_reduce(torch.tensor(float(rewards.numel())))
"""
CLOSED = "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"


# --- real processes ---


@dataclass
class Ended:
    """A run that is over."""

    status: int
    output: str  # of all processes, stdout and stderr
    seconds: float  # from what its reward function did to its end

    @property
    def root_cause(self) -> tuple[str, str, str]:
        """The failure that torchrun names as the first: rank, exit status, text."""
        pattern = r"Root Cause.*?rank +: (\d).*?exitcode +: (-?\d+).*?traceback : (.*)\n===="
        failure = re.search(pattern, self.output, re.DOTALL)
        assert failure, self.output
        return failure[1], failure[2], failure[3]


def flags_of(folder: Path, function: str, **flags: Any) -> dict[str, Any]:
    """The flags of GRPO with a reward function of REWARDS."""
    return {
        **SHORT_RUN,
        "output_dir": folder / function,
        "model_name_or_path": folder / "tiny.json",
        "tokenizer_name_or_path": folder / "tokenizer",
        "dataset_test_split": "",
        "num_train_rows": 12,
        "max_completion_length": 8,
        "num_generations": 2,
        "beta": 0.0,
        "max_steps": STEPS,
        "self_check": "false",
        "reward_funcs": f"{folder / 'rewards.py'}:{function}",
        **flags,
    }


def run_grpo(folder: Path, function: str, *options: str, **flags: Any) -> Ended:
    """Run GRPO with a reward function of REWARDS on two processes, until none of them is left."""
    flags = flags_of(folder, function, **flags)
    command = [ROOT / "train_grpo.py"]
    command += [word for key, value in flags.items() for word in (f"--{key}", value)]
    (folder / "when").unlink(missing_ok=True)
    options = ("--standalone", "--nproc_per_node", "2", *options)
    log = folder / f"{Path(flags['output_dir']).name}.log"
    script = Script(command, log, options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    status = script.wait(300)
    ended = time.time()
    left = script.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes are left behind"
    since = (folder / "when").stat().st_mtime if (folder / "when").exists() else ended
    return Ended(status, log.read_text(), ended - since)


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path
) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "mine.py").write_text(OBJECTIVES)
    (folder / "tiny.json").symlink_to(tiny_gpt2)
    (folder / "tokenizer").symlink_to(tokenizer_folder)
    return folder


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are looked for in /proc"
)


@needs_proc
@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("raises", "ValueError: no such answer"),
        ("breaks", "AttributeError: 'NoneType' object has no attribute 'rank_1'"),
    ],
)
def test_a_failure_of_one_rank_is_its_traceback(folder: Path, function: str, error: str) -> None:
    """In a reward function, which all ranks report and for which all save, and after one."""
    run = run_grpo(folder, function)
    assert run.status != 0
    assert run.seconds < 15
    rank, status, text = run.root_cause
    is_saved = function == "raises"
    assert (rank, status) == ("0" if is_saved else "1", "1")
    begins = "error: reward function .* raised ValueError: .* goes on from .*2.\n *Traceback"
    assert re.match(begins if is_saved else "Traceback", text)
    assert text.endswith(error)
    assert run.output.count(f"rank {rank} of train_grpo, after step 2 of ") == 1
    assert is_saved or "rank 0" not in run.output  # whose connection broke
    assert "Connection closed" not in run.output
    assert (folder / function / "checkpoints" / "step_00000002").exists() == is_saved


@needs_proc
@pytest.mark.parametrize(
    ("flag", "name", "error"),
    [("policy_objective", "policy", "no such token"), ("advantages", "groups", "no such group")],
)
def test_an_objective_that_raises_on_one_rank_costs_no_step(
    folder: Path, flag: str, name: str, error: str
) -> None:
    """All ranks save and end; once it is mended, the same command gives an undisturbed run's."""
    flags: dict[str, Any] = {flag: folder / f"mine.py:{name}", "micro_batch_size": 2}
    flags |= {"penalize_missing_eos": "false"}
    mended = Path(f"{folder / 'mine.py'}.mended")
    mended.unlink(missing_ok=True)
    run = run_grpo(folder, "lengths", output_dir=folder / name, **flags)
    assert run.status != 0
    _, _, text = run.root_cause
    where = r"raised AssertionError: .* .at step 3, rows \d+.*; the same command goes on from .*2\."
    assert re.match(rf"error: --{flag} {flags[flag]} {where}\n *Traceback", text), text
    assert text.endswith(f"AssertionError: {error}")
    mended.touch()
    runs = (folder / name, folder / f"whole {name}")
    jobs = [flags_of(folder, "lengths", **flags, output_dir=output_dir) for output_dir in runs]
    jobs = [{"stage": "grpo", "flags": {n: str(v) for n, v in each.items()}} for each in jobs]
    launch(run_stages, 2, folder, jobs=jobs)
    assert untimed_lines(runs[0]) == untimed_lines(runs[1])
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


@needs_proc
def test_a_killed_rank_ends_all_and_torchrun_starts_them_again(folder: Path) -> None:
    run = run_grpo(folder, "dies", "--max-restarts", "1", save_steps=1)
    assert run.status == 0
    assert re.search(r"failed \(exitcode: -9\) local_rank: 1 ", run.output)  # torchrun's own
    assert run.output.count("12 of 12 rows") == 2  # two starts
    lines = read_jsonl(folder / "dies" / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert (folder / "dies" / "model" / "model.safetensors").exists()


@needs_proc
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(folder: Path) -> None:
    run = run_grpo(folder, "hangs", ddp_timeout=5)
    assert run.status != 0
    assert 2 < run.seconds < 5 + 15  # the other rank may have begun to wait before
    rank, status, text = run.root_cause
    assert (rank, status) == ("0", "1")
    assert re.search(r"rank 0 of train_grpo, after step 2 of \d+:\nTraceback", run.output)
    assert re.search(r"RuntimeError: .*Timed out waiting 5000ms", text)


UNEVEN = SHORT_RUN | {
    "max_completion_length": 24,
    "micro_batch_size": 2,
    "max_steps": 2,
    "learning_rate": 1e-4,
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
        of_kind = [{k: row[k] for k in ("prompt", *columns)} for row in rows]
        for split in ("train", "validation"):
            tiny.write_rows(folder / kind / f"{split}.jsonl", of_kind)
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


# --- who speaks, and when ---


@pytest.mark.parametrize(
    ("error", "local_rank", "signal_name", "expected"),
    [
        (ValueError("a bad row"), 0, "", (0.0, "ValueError: a bad row", 1)),
        (ValueError("a bad row"), 1, "SIGTERM", (PATIENCE, "ValueError: a bad row", 1)),
        (UserError("There is no file."), 0, "", (0.0, "error: There is no file.", 2)),
        (UserError("There is no file."), 1, "", (PATIENCE, "error: There is no file.", 2)),
        (RuntimeError(CLOSED), 0, "", (PATIENCE, f"RuntimeError: {CLOSED}", 1)),
        (RuntimeError(CLOSED), 0, "SIGTERM", (0.0, "", 1)),
        (dist.DistNetworkError("gone"), 0, "SIGTERM", (0.0, "", 1)),
        (ConnectionResetError("of a judge"), 0, "", (0.0, "ConnectionResetError: of a judge", 1)),
        (SystemExit(0), 0, "", (0.0, "SystemExit: 0", 1)),
        (Exception(NO_ROOM), 0, "", (0.0, FULL, 2)),
        (KeyboardInterrupt(), 0, "", (0.0, "", 130)),
    ],
    ids=repr,
)
def test_who_speaks_at_once_and_who_waits_for_the_cause(
    error: BaseException,
    local_rank: int,
    signal_name: str,
    expected: tuple[float, str, int],
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    slept: list[float] = []

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: local_rank)
    monkeypatch.setattr(signals, "received", lambda: signal_name)
    monkeypatch.setattr(common.launch, "close_and_exit", leave)
    monkeypatch.setattr(failures, "_progress", None)
    with pytest.raises(SystemExit) as left:
        common.launch.fail(error)
    text = capsys.readouterr().err
    assert (sum(slept), text.rstrip().split("\n")[-1], left.value.code) == expected
    file = tmp_path / "error.json"
    assert file.exists() == bool(text)
    if text:
        assert json.loads(file.read_text())["message"]["message"] == text.rstrip()


def of_a_small_file(folder: Path) -> BaseException:
    """What tokenizers raises where a file would be too large."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        tiny.tokenizer().save_pretrained(folder)
    except BaseException as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    raise AssertionError("it was written")


def chained(*errors: BaseException) -> BaseException:
    """The last error, caused by the one before it, and so on."""
    for cause, error in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[-1]


@pytest.mark.parametrize(
    "make",
    [
        of_a_small_file,
        lambda _: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x"),
        lambda _: OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        lambda _: chained(Exception(NO_ROOM), ValueError("no data set was generated")),
        lambda _: FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
    ],
)
def test_a_disk_without_room_ends_a_command_in_a_sentence(make: Any, tmp_path: Path, capsys: Any):
    """A stage does the same in `launch.fail`; any other error keeps its traceback."""
    error = make(tmp_path)

    def fails() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        terminal.run_command(fails)
    assert ended.value.code == 2
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("error: a disk, or the temporary folder (TMPDIR), is full: ")
    tiny.check_sentence(printed)
    handled = ValueError("another fault")
    handled.__context__, handled.__suppress_context__ = error, True
    assert of_full_disk(handled) is None
    assert of_full_disk(OSError(errno.EACCES, os.strerror(errno.EACCES))) is None


def test_a_peer_lost_below_another_exception_is_seen() -> None:
    wrapped = RuntimeError("reward function 'judge' raised RuntimeError on a batch of 2 rows")
    wrapped.__cause__ = RuntimeError(CLOSED)  # a sharded reward model lost its peers
    assert failures.lost_peers(wrapped)


def test_the_place_in_the_run(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_grpo.py"])
    failures.note_step(11, 20)
    assert failures.place(1) == "\nrank 1 of train_grpo, after step 11 of 20:\n"
    monkeypatch.setattr(failures, "_progress", None)
    assert failures.place(0) == ""


def test_restarts_need_a_new_store(monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    processes.refuse_stale_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UserError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        processes.refuse_stale_store()


def status_of_rank(*, torchrun_dies: bool) -> int:
    """Exit status of a process that has imported, whose torchrun died meanwhile or did not."""
    prctl, pr_set_child_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(pr_set_child_subreaper, 1, 0, 0, 0)  # orphans become children of this process
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    this, (has_begun, begin) = os.getpid(), os.pipe()
    if launcher := os.fork():
        status = os.waitpid(launcher, 0)[1]
        return os.waitstatus_to_exitcode(os.wait()[1] if torchrun_dies else status)
    if rank := os.fork():
        os.read(has_begun, 1)
        if torchrun_dies:
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))
    common.PARENT = os.getppid()
    os.write(begin, b"!")
    while torchrun_dies and os.getppid() != this:
        time.sleep(0.02)
    processes.die_with_launcher()
    os._exit(7)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(("torchrun_dies", "status"), [(True, -signal.SIGKILL), (False, 7)])
def test_a_process_whose_torchrun_died_while_it_imported_ends(
    torchrun_dies: bool, status: int, tmp_path: Path
) -> None:
    assert launch(status_of_rank, 1, tmp_path, torchrun_dies=torchrun_dies) == [status]


def test_a_sentence_with_another_at_its_end_has_one_full_stop() -> None:
    error = UserError("the model could not be written.")
    error.add(f"; {UserError('the checkpoint could not be written.')}")
    error.add(" (step 2)")
    sentence = "the model could not be written; the checkpoint could not be written (step 2)."
    assert str(error) == sentence


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("machine", "has_products"),
    [("x86_64", ()), ("x86_64", ("amx_tile",)), ("AMD64", ("avx512_bf16",)), ("aarch64", ())],
)
def test_a_cpu_on_which_bfloat16_is_slow_is_named(
    device: str, machine: str, has_products: tuple[str, ...], capsys: Any, monkeypatch: Any
) -> None:
    """AVX-512 alone has no such products, though oneDNN takes bfloat16 there."""
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(
            torch.cpu, f"_is_{name}_supported", lambda name=name: name in has_products
        )
    is_x86 = machine != "aarch64"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_x86)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(distributed, "device", lambda: torch.device(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    processes.check_bfloat16("shared_prefix")
    printed = capsys.readouterr().out.strip()
    assert bool(printed) == (device == "cpu" and not has_products)
    if printed:
        tiny.check_sentence(printed, "no bfloat16 products", "--bf16 true is several times slower")


@pytest.mark.parametrize("visible", ["0", "", None])
@pytest.mark.parametrize(
    ("cuda", "message"),
    [
        ("13.0", "built for CUDA 13.0, .* 535.129.03; update the driver, .*"),
        (None, "built without CUDA, .* 535.129.03; install a torch for CUDA, .*"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(
    cuda: str | None, message: str, visible: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    """Unless the user has hidden the GPU, or there is none."""
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023"
    )
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(processes, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(processes, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    processes.refuse_without_gpu()
    (tmp_path / "nvidia0").touch()
    if visible == "":
        processes.refuse_without_gpu()
        return
    with pytest.raises(UserError, match=f"{message}CUDA_VISIBLE_DEVICES="):
        processes.refuse_without_gpu()


ALLOCATOR = """
import torch
from common import distributed
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda rank: print(torch._C._accelerator_getAllocatorSettings())
distributed.start()
"""


def test_a_gpu_s_memory_is_in_segments_that_grow() -> None:
    """Asked of torch's allocator, which has read the environment by the time a GPU is chosen."""
    command = [sys.executable, "-c", ALLOCATOR]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert result.stdout == "expandable_segments:True\n"


# --- make ---

WAIT = "wait: ; $(RUN) sh -c \"echo 'begun'; exec sleep 60\""


def test_a_signal_ends_what_make_runs() -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    words = ["make", "--silent", f"--eval={WAIT}", "wait"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.terminate()
    begun = time.monotonic()
    assert process.stdout.read() == b""  # ends when nobody holds the other end
    assert time.monotonic() - begun < 30
    assert process.wait(timeout=10) != 0


def test_every_recipe_that_runs_the_project_hands_signals_on() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    runs = [line for line in lines if re.match(r"\t.* -m (experiments\.|pytest)", line)]
    assert len(runs) > 5
    assert [line for line in runs if not line.startswith(("\t$(RUN) ", "\texec "))] == []


def test_a_gpu_without_attention_in_bfloat16_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    processes.check_bfloat16("padded")
    with pytest.raises(UserError) as caught:
        processes.check_bfloat16("shared_prefix")
    tiny.check_sentence(caught.value, "--bf16 false", "--layout padded")
