"""Run a function, stages or a script on several ranks: the parent's side and the child's.

`launch` has every rank call the function that was named and hand back what it returned.
`run_stages` is such a function: it runs the scripts' own `main`, one after another in one process
group. `Script` starts a script as a user does, alone or under torchrun, to be killed or waited for.
Importing torch costs more than fifty steps of a tiny model, so a rank is a fork of a server, a
process of this file that has only imported, and torchrun's ranks are forks of torchrun. There are
two servers, of the even and of the odd ranks: processes that are started apart hash texts
differently, and a set's order that decides something must show.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.tensor import DTensor

import common
from common import distributed
from common.checkpoint import export
from common.config.parser import parse
from common.launch import close_and_exit, leave
from common.model import fsdp, optim
from common.record.glossary import ENDS, METRICS, PREFIXES
from common.record.jsonl import read_jsonl
from common.record.metrics import PHASES
from common.report import plots
from common.sampling.sampler import Rollouts, Sampler
from common.shutdown import signals
from common.text import synthetic

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
STAGES = {
    "sft": ("train_sft", "SFTConfig"),
    "reward": ("train_reward", "RewardConfig"),
    "dpo": ("train_dpo", "DPOConfig"),
    "grpo": ("train_grpo", "GRPOConfig"),
}
TIMINGS = {*PHASES, "step_seconds", "elapsed_minutes", "tokens_per_second", "peak_memory_gb"}
Job = dict[str, Any]  # "stage", and its "flags" without their dashes
SHORT_RUN: dict[str, Any] = {  # on the embedded task
    "dataset_name": "synthetic",
    "num_sample_prompts": 0,
    "max_prompt_length": 128,
    "batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
}
TINY_GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 192,
}
# A server imports these before it forks, as most forks use them.
IMPORTED_AHEAD = ("evaluate", "pytest", "tiny", "transformers.models.gpt2.modeling_gpt2")
NUM_SERVERS = 2
SERVERS: list["subprocess.Popen[bytes]"] = []
for _name in ("ranks", "tests.support.ranks"):  # one module and one set of servers by either name
    sys.modules.setdefault(_name, sys.modules[__name__])


def launch(
    function: Callable[..., Any],
    num_ranks: int,
    folder: Path,
    *,
    run: Callable[[Sequence[str], int], Any] | None = None,
    timeout: float = 300,
    **arguments: Any,
) -> list:
    """Results of `function(**arguments)` on each of `num_ranks` CPU processes, by rank.

    Args:
        function: at the top of a module in tests/; its arguments and its result must fit in JSON.
        num_ranks: processes.
        folder: existing, for the files between parent and children.
        run: starts a script on that many processes, as `run_script` does, in place of forks.
        timeout: seconds, without `run`.
        arguments: for the function, the same on every rank.
    """
    call = {"module": function.__module__, "name": function.__name__, "arguments": arguments}
    call_file = Path(tempfile.mkdtemp(prefix="launch_", dir=folder)) / "call.json"
    call_file.write_text(json.dumps(call))
    try:
        if run or sys.platform != "linux":  # elsewhere system libraries do not survive a fork
            (run or partial(run_script, timeout=timeout))([__file__, str(call_file)], num_ranks)
        else:
            fork_ranks(call_file, num_ranks, timeout)
    except AssertionError as error:
        tracebacks = [path.read_text() for path in call_file.parent.glob("*.error")]
        raise AssertionError("\n".join([*tracebacks, str(error)])) from None
    results = (call_file.with_name(f"rank_{rank}.json") for rank in range(num_ranks))
    return [json.loads(file.read_text()) for file in results]


def fork_ranks(call_file: Path, num_ranks: int, timeout: float) -> None:
    """Answer the call on forks of the servers, which meet as torchrun's processes do.

    Raises:
        AssertionError: a rank failed, or took longer than `timeout` seconds; then all are killed.
            The message has the exit status or the signal, and the ends of the ranks' logs.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    group |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    deadline = time.monotonic() + timeout
    try:
        num_servers = min(num_ranks, NUM_SERVERS)
        need_servers(num_servers)
        for server in range(num_servers):
            requests: list[dict[str, Any]] = []
            for rank in range(server, num_ranks, num_servers):
                of_rank = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                variables = environment(**of_rank if num_ranks > 1 else {})
                log = str(call_file.with_name(f"rank_{rank}.log"))
                requests.append({"call": str(call_file), "log": log, "variables": variables})
            ask(server, requests)
        left, pipes = num_ranks, [server.stdout for server in SERVERS[:num_servers]]
        while left:
            ended, _, _ = select.select(pipes, [], [], max(0.0, deadline - time.monotonic()))
            logs = [path.read_text()[-6000:] for path in call_file.parent.glob("*.log")]
            assert ended, "\n".join([f"no end within {timeout} s", *logs])
            for pipe in ended:
                status = pipe.readline().decode().strip()
                assert status == "0", "\n".join([f"a rank ended with {ending(status)}", *logs])
                left -= 1
    except BaseException:
        end_servers()
        raise


def ask(number: int, requests: Sequence[dict[str, Any]]) -> list[int]:
    """Have a server answer on forks: their process ids."""
    need_servers(number + 1)
    server = SERVERS[number]
    server.stdin.write(f"{json.dumps(requests)}\n".encode())
    return [*map(int, server.stdout.readline().split())]


def need_servers(number: int) -> None:
    """Start those that are missing, at the same time: they serve until this process ends."""
    if not SERVERS:
        atexit.register(end_servers)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    command, env = [sys.executable, __file__], environment()
    while len(SERVERS) < number:
        started = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)
        SERVERS.append(started)


def ending(status: str) -> str:
    """The end of a rank: its exit status, or the name of the signal that killed it."""
    if not status:
        return "its server, which printed no status"
    code = os.waitstatus_to_exitcode(int(status))
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def end_servers() -> None:
    """Kill the servers and their forks."""
    for server in SERVERS:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
    SERVERS.clear()


class Script:
    """A script with its arguments that runs on a fork of a server, as `subprocess.Popen` has it.

    Its folder is that of this process.

    Args:
        command: the script's path and its arguments.
        log: gets what all its processes print.
        torchrun: options of torchrun; without any the script runs alone.
        network: a network namespace to run in.
        server: number of the server that forks; each hashes texts differently.
        variables: of the environment, in addition to `environment`.
    """

    def __init__(
        self,
        command: Sequence[object],
        log: Path,
        torchrun: Sequence[str] = (),
        *,
        network: str = "",
        server: int = 0,
        **variables: str,
    ) -> None:
        request = {"command": [*map(str, command)], "torchrun": torchrun, "network": network}
        request |= {"log": str(log), "variables": environment(**variables), "folder": os.getcwd()}
        (self.pid,) = ask(server, [request])
        self.log, self.pipe, self.returncode = log, SERVERS[server].stdout, None

    def wait(self, timeout: float) -> int:
        """Its exit status.

        Raises:
            subprocess.TimeoutExpired: it goes on after these seconds.
        """
        if self.returncode is None:
            if not select.select([self.pipe], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.log), timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self.pipe.readline()))
        return self.returncode

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def processes(self) -> list[int]:
        """Those that print to its log, zombies aside: its ranks too."""
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(path / "fd" / "1") == str(self.log.resolve()):
                    pids.append(int(path.name))
        return pids


def environment(**variables: str) -> dict[str, str]:
    """The variables of a child process: CPU only, one thread, no network, our modules."""
    rooms = sorted({path.parent for path in TESTS.rglob("test_*.py")})
    ours = {
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, TESTS, TESTS / "support", *rooms])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return {**os.environ, **ours, **variables}


def run_script(
    command: Sequence[str], num_ranks: int, *, timeout: float = 300, folder: Path = ROOT
) -> str:
    """Run a script and its arguments on CPU processes; its output, if it succeeds.

    Several ranks are started by torchrun, one without it, in the folder.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    result = subprocess.run(
        [sys.executable, *(launcher if num_ranks > 1 else []), *command],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-6000:]}"
    return result.stdout


def untimed_lines(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl without timings."""
    lines = read_jsonl(run / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines]


def answer(call_file: Path) -> None:
    """The child's side of `launch`."""
    call = json.loads(call_file.read_text())
    distributed.start()
    file = call_file.with_name(f"rank_{distributed.rank()}.json")
    try:
        function = getattr(importlib.import_module(call["module"]), call["name"])
        file.write_text(json.dumps(function(**call["arguments"])))
    except BaseException:  # also SystemExit, with which a refused flag ends
        file.with_suffix(".error").write_text(traceback.format_exc())
        close_and_exit(1)
    torch.distributed.barrier()
    leave()


def serve() -> None:
    """The server's side of `ask`: it prints the forks' process ids, then each one's status."""
    for module in (*(stage for stage, _ in STAGES.values()), *IMPORTED_AHEAD):
        importlib.import_module(module)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork would wait for its pool of threads
    synthetic.train_tokenizer()
    gc.freeze()  # or the first collection in each rank copies every page
    faulthandler.enable()  # on descriptor 2, which each rank sends to its log
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` around the tests is not around the runs
    for line in sys.stdin:
        pids = []
        for request in json.loads(line):
            pids.append(os.fork())
            if pids[-1] == 0:
                serve_on_fork(request)
        print(*pids, flush=True)
        for _ in pids:
            print(os.wait()[1], flush=True)


def serve_on_fork(request: dict[str, Any]) -> NoReturn:
    """Answer a call, or run a script."""
    os.dup2(os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
    os.dup2(1, 2)
    common.PARENT = os.getppid()  # as of a process that was started anew
    os.environ.clear()
    os.environ.update(request["variables"])
    if "call" in request:
        answer(Path(request["call"]))
        close_and_exit(0)
    if request["network"]:
        enter_network(request["network"])
    os.chdir(request["folder"])
    run_here(request["command"], request["torchrun"])


def run_here(command: Sequence[str], options: Sequence[str] = ()) -> NoReturn:
    """Run a script to the end of this process, under torchrun if that has options."""
    sys.argv = list(command)
    try:
        if options:
            with mock.patch.object(subprocess_handler, "Popen", ForkOfTorchrun):
                torchrun.main([*options, *command])
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        close_and_exit(int(error.code or 0))
    except BaseException:
        traceback.print_exc()
        close_and_exit(1)
    close_and_exit(0)


class ForkOfTorchrun:
    """A rank that torchrun starts, as `subprocess.Popen` has it."""

    def __init__(self, args: Sequence[str], env: dict[str, str], **_: Any) -> None:
        """Fork; `args` are Python, its option -u, the script and the script's arguments."""
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            os.setsid()
            common.PARENT = os.getppid()
            for number in signals.STOPPING:  # a new process has no handlers
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(env)
            run_here(args[2:])

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.02)
        return status


def enter_network(name: str) -> None:
    """Move this process into a network namespace that `ip` has made."""
    with open(f"/var/run/netns/{name}") as file:
        clone_newnet = 0x40000000  # see setns(2)
        assert ctypes.CDLL(None).setns(file.fileno(), clone_newnet) == 0


def of_stage(stage: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Flags that stages share, without those of sampling for a reward model."""
    of_policies = ("sample_steps", "generation_batch_size") if stage == "reward" else ()
    return {name: value for name, value in flags.items() if name not in of_policies}


def is_defined(name: str) -> bool:
    """Whether a metric is in `METRICS`, begins with one of `PREFIXES`, or is an interval end."""
    head, slash, function = name.partition("/")
    for end in ENDS if head.startswith("eval_") else ():
        head = head.removesuffix(end)
    name = head + slash + function
    return name in METRICS or any(name.startswith(p) and len(name) > len(p) for p in PREFIXES)


def run_stages(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Run each job's stage on this rank, in order; returns what was seen inside each."""
    records = []
    for job in jobs:
        module_name, config_name = STAGES[job["stage"]]
        module = importlib.import_module(module_name)
        flags = of_stage(job["stage"], job["flags"])
        config = parse(getattr(module, config_name), arguments(flags))
        # Pictures have their own tests, and take longer than the steps that are drawn.
        with mock.patch.object(plots, "plot_run"), watched() as record:
            module.main(config)
        records.append(record)
        lines = read_jsonl(Path(config.output_dir) / "metrics.jsonl")
        assert all(is_defined(name) for line in lines for name in line if name != "step")
    return records


def run_and_listen(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """`run_stages`, and in each record the warnings that its stage gave on this rank."""
    records = []
    for job in jobs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (record,) = run_stages([job])
        records.append(record | {"warnings": [str(warning.message) for warning in caught]})
    return records


def flag(key: str, value: Any) -> list[str]:
    return [f"--{key}", *map(str, value if isinstance(value, list) else [value])]


def arguments(flags: dict[str, Any]) -> list[str]:
    return [word for key, value in flags.items() for word in flag(key, value)]


def with_paths(flags: dict[str, Any], paths: dict[str, str]) -> dict[str, Any]:
    """Flags with the path of each name that stands for one."""

    def path(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(path, value)]
        return paths.get(value, value) if isinstance(value, str) else value

    return {key: path(value) for key, value in flags.items()}


@contextlib.contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Note what a stage does on this rank; the functions that it calls still run.

    Noted are the devices of each model before sharding, how often the first block of the trained
    model ran for a gradient (recomputing counts) and in which dtype, dtypes and sizes at the last
    step, every completion sampled for training, whether parameters were offloaded, and hashes of
    the state after training.
    """
    shard, clip_and_step = fsdp.shard, optim.clip_and_step
    save_pretrained, sample = export.save_pretrained, Sampler.sample
    record: dict[str, Any] = {"devices": [], "num_forwards": 0, "rollouts": {}}
    trained: list[nn.Module] = []

    def note_forward(module: nn.Module, *_: Any) -> None:
        record["num_forwards"] += torch.is_grad_enabled()
        record["compute_dtypes"] = names(p.dtype for p in module.parameters())

    def note_devices(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        record["devices"].append(sorted({p.device.type for p in module.parameters()}))
        if any(p.requires_grad for p in module.parameters()):  # not a frozen model
            # A part of a block: transformers 5.23 does not repeat the block's own hooks.
            next(fsdp.blocks(module)[0].children()).register_forward_pre_hook(note_forward)
            trained.append(module)
        return shard(module, *args, **kwargs)

    def note_dtypes(optimizer: Any, *args: Any) -> dict[str, Any]:
        parameters = [p for module in trained for p in module.parameters()]
        record["gradient_dtypes"] = names(p.grad.dtype for p in parameters if p.grad is not None)
        result = clip_and_step(optimizer, *args)
        states = [value for state in optimizer.state.values() for value in state.values()]
        record["parameter_dtypes"] = names(p.dtype for p in parameters)
        record["optimizer_dtypes"] = names(value.dtype for value in states)
        record["num_local"] = sum(local(p).numel() for p in parameters)
        record["num_total"] = sum(p.numel() for p in parameters)
        return result

    def note_rollouts(sampler: Sampler, examples: Any, **options: Any) -> Rollouts:
        rollouts = sample(sampler, examples, **options)
        num_samples = options.get("num_samples", 1)
        if "step" in options:  # not for tables and evaluation
            for i, example in enumerate(examples):
                ids = rollouts.completion_ids[i * num_samples : (i + 1) * num_samples]
                record["rollouts"][f"step {options['step']}, row {example.row}"] = ids
        return rollouts

    def note_state(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        record["state"] = state_hashes(module)
        save_pretrained(module, *args, **kwargs)

    with (
        mock.patch.object(fsdp, "shard", note_devices),
        mock.patch.object(optim, "clip_and_step", note_dtypes),
        mock.patch.object(Sampler, "sample", note_rollouts),
        mock.patch.object(export, "save_pretrained", note_state),
        mock.patch.object(fsdp, "CPUOffloadPolicy", wraps=fsdp.CPUOffloadPolicy) as offload,
    ):
        yield record
        record["is_offloaded"] = offload.called


def names(dtypes: Any) -> list[str]:
    return sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from this rank's replica; plain tensors as they are. Collective.

    A parameter that escaped sharding is not gathered: it would show as a difference between ranks.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_hashes(module: nn.Module) -> dict[str, str]:
    """A hash of every parameter's and buffer's bits as this rank sees them. Collective."""
    fsdp.reshard(module)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: hash_of(whole(tensor.detach())) for name, tensor in tensors.items()}


def hash_of(tensor: torch.Tensor) -> str:
    data = tensor.cpu().flatten().contiguous()
    head = f"{tuple(tensor.shape)} {tensor.dtype} ".encode()
    return hashlib.sha256(head + data.view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    answer(Path(sys.argv[1])) if sys.argv[1:] else serve()
