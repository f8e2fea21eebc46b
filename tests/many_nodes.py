"""Two hosts on one machine: network namespaces joined by a cable that can be cut.

    python -m tests.many_nodes [tcp_retries2]     as root, with iproute2; prints what was seen

Run as a program it makes the full comparison: every stage on two hosts against one, plain FSDP and
HSDP, and a cut amid a run; `tests/stages/test_many_nodes.py` makes a short
one.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.ranks import ROOT, SHORT_RUN, environment, launch, run_stages, untimed_lines

Run = tuple[str, int]  # stage, and replicas: 1 is plain FSDP, 2 is HSDP
ADDRESSES = ("10.213.0.1", "10.213.0.2")  # nobody outside the namespaces sees them
PORT = 29500
STEPS, CUT_IN = 4, 3
TINY_GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 192}
REWARDS = f"""
import os
import time
from pathlib import Path

FOLDER = Path(__file__).parent


def letters(completions, trainer_state):
    if os.environ["RANK"] == "1" and trainer_state.global_step == {CUT_IN - 1}:
        (FOLDER / "reached").touch()
        while not (FOLDER / "cut").exists():
            time.sleep(0.05)
    return [float(text.count("e")) for text in completions]
"""
COMMON = SHORT_RUN | {
    "dataset_test_split": "",
    "num_train_rows": 12,
    "max_completion_length": 16,
    "max_steps": STEPS,
}


class TwoHosts:
    """Two network namespaces, each with an end of a cable; deleted again, with what runs there.

    Args:
        tcp_retries2: how often a host sends a packet again before it gives a connection up. 15, the
            default of Linux, are about 16 minutes, which torchrun waits on a host that is cut off.
    """

    def __init__(self, tcp_retries2: int = 15) -> None:
        """Name them."""
        self.tcp_retries2 = tcp_retries2
        tag = uuid.uuid4().hex[:8]
        self.names = (f"sff-{tag}-0", f"sff-{tag}-1")

    def __enter__(self) -> "TwoHosts":
        """Make them.

        Raises:
            OSError: there is no `ip`, or it may not make namespaces; the text says why.
        """
        if shutil.which("ip") is None:
            raise OSError("there is no `ip` (iproute2)")
        try:
            for name in self.names:
                ip("netns", "add", name)
            first, second = self.names
            peer = ("type", "veth", "peer", "name", "eth0", "netns", second)
            ip("link", "add", "eth0", "netns", first, *peer)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                ip("-n", name, "link", "set", "eth0", "addrgenmode", "none")  # no IPv6
                ip("-n", name, "addr", "add", f"{address}/30", "dev", "eth0")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "eth0", "up")
                setting = f"echo {self.tcp_retries2} > /proc/sys/net/ipv4/tcp_retries2"
                ip("netns", "exec", name, "sh", "-c", setting)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        """End what still runs in the namespaces, and delete them."""
        existing = ip("netns", "list").split()
        for name in set(self.names) & set(existing):
            for pid in self.pids(name):
                os.kill(pid, signal.SIGKILL)
            ip("netns", "del", name)

    def pids(self, name: str) -> list[int]:
        """The processes on a host."""
        return [int(pid) for pid in ip("netns", "pids", name).split()]

    def cut(self) -> None:
        """Take the second host off the network."""
        ip("-n", self.names[1], "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Put the second host back."""
        ip("-n", self.names[1], "link", "set", "eth0", "up")

    def start(self, command: Sequence[str], folder: Path) -> list[subprocess.Popen]:
        """Start one process on each host by torchrun; they print to `folder/host_<number>.log`."""
        processes = []
        for number, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=True)):
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            torchrun += ["--nnodes", "2", "--nproc_per_node", "1", "--local_addr", address]
            torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{ADDRESSES[0]}:{PORT}"]
            # A namespace has the machine's host name, by which torchrun would look for itself.
            torchrun += ["--rdzv_conf", f"is_host={int(number == 0)}"]
            with (folder / f"host_{number}.log").open("w") as log:
                process = subprocess.Popen(
                    ["ip", "netns", "exec", name, *torchrun, *command],
                    cwd=ROOT,
                    env=environment(GLOO_SOCKET_IFNAME="eth0"),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        return processes

    def run(self, command: Sequence[str], num_ranks: int, *, folder: Path) -> None:
        """Run a script on both hosts to its end, as `ranks.run_script` does on one."""
        assert num_ranks == len(self.names)
        processes = self.start(command, folder)
        statuses = [process.wait(240) for process in processes]
        logs = [(folder / f"host_{number}.log").read_text()[-4000:] for number in (0, 1)]
        assert statuses == [0, 0], "\n".join(logs)


def ip(*arguments: str) -> str:
    """What `ip` prints.

    Raises:
        OSError: it fails.
    """
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise OSError(f"`ip {' '.join(arguments)}` fails: {result.stderr.strip()}")
    return result.stdout


def make_inputs(folder: Path, tiny_gpt2: Path, tokenizer_folder: Path) -> dict[str, Any]:
    """The reward function's file; the flags of every run."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "cut").touch()  # nobody waits for a cut yet
    paths = {"model_name_or_path": tiny_gpt2, "tokenizer_name_or_path": tokenizer_folder}
    return COMMON | {key: str(path) for key, path in paths.items()}


def grpo_flags(folder: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of GRPO on that reward."""
    reward = f"{folder / 'rewards.py'}:letters"
    return flags | {"num_generations": 4, "beta": 0.0, "entropy_coef": 0.1, "reward_funcs": reward}


def jobs(folder: Path, name: str, flags: dict[str, Any], runs: Sequence[Run]) -> list[dict]:
    """The runs, into `folder/<name>/<stage>_<replicas>`."""
    return [
        {
            "stage": stage,
            "flags": (grpo_flags(folder, flags) if stage == "grpo" else flags)
            | {
                "output_dir": str(folder / name / f"{stage}_{num_replicas}"),
                "num_replicas": num_replicas,
            },
        }
        for stage, num_replicas in runs
    ]


def weights_hash(run: Path) -> str:
    """Of the exported model's file."""
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def run_stages_on_both(
    hosts: TwoHosts, folder: Path, flags: dict[str, Any], runs: Sequence[Run]
) -> None:
    """The same runs on one host with two processes, and on two hosts with one each."""
    for name, run in (("one", None), ("two", partial(hosts.run, folder=folder))):
        launch(run_stages, 2, folder, run=run, jobs=jobs(folder, name, flags, runs))


@dataclass
class Cut:
    """What became of a run one of whose hosts was cut off."""

    statuses: list[int]  # of torchrun, by host
    seconds: list[float]  # from the cut to its end
    logs: list[str]


def cut_amid_run(hosts: TwoHosts, folder: Path, flags: dict[str, Any], limit: float) -> Cut:
    """Start GRPO on both hosts, cut the second off in step `CUT_IN`, wait for both to end.

    Args:
        hosts: connected; connected again afterwards.
        folder: from `make_inputs`.
        flags: of the run.
        limit: seconds that it may take.
    """
    for name in ("reached", "cut"):
        (folder / name).unlink(missing_ok=True)
    processes = hosts.start(grpo_command(flags), folder)
    while not (folder / "reached").exists():
        assert not [p for p in processes if p.poll() is not None], "it ended before the cut"
        time.sleep(0.05)
    hosts.cut()
    began = time.monotonic()
    (folder / "cut").touch()
    seconds = [-1.0, -1.0]
    while min(seconds) < 0 and time.monotonic() - began < limit:
        for number, process in enumerate(processes):
            if seconds[number] < 0 and process.poll() is not None:
                seconds[number] = time.monotonic() - began
        time.sleep(0.05)
    left = [pid for name in hosts.names for pid in hosts.pids(name)]
    hosts.mend()
    logs = [(folder / f"host_{number}.log").read_text() for number in (0, 1)]
    assert not left, f"processes {left} are left after {limit} s\n{logs[0]}\n{logs[1]}"
    return Cut([process.wait(10) for process in processes], seconds, logs)


def grpo_command(flags: dict[str, Any]) -> list[str]:
    """The script and its arguments."""
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    return [str(ROOT / "train_grpo.py"), *words]


def main() -> int:
    """Run everything and print what was seen; the exit status is 1 if anything differs."""
    as_claimed: list[bool] = []
    tcp_retries2 = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    from common.text import synthetic

    with tempfile.TemporaryDirectory() as name, TwoHosts(tcp_retries2) as hosts:
        folder = Path(name)
        (folder / "tiny.json").write_text(json.dumps(TINY_GPT2))
        synthetic.train_tokenizer().save_pretrained(folder / "tokenizer")
        flags = make_inputs(folder, folder / "tiny.json", folder / "tokenizer")
        runs = [(stage, n) for stage in ("sft", "reward", "dpo", "grpo") for n in (1, 2)]
        run_stages_on_both(hosts, folder, flags, runs)
        for job in jobs(folder, "one", flags, runs):
            one = Path(job["flags"]["output_dir"])
            two = folder / "two" / one.name
            same = untimed_lines(one) == untimed_lines(two), weights_hash(one) == weights_hash(two)
            print(f"{one.name}: metrics equal {same[0]}, weights equal {same[1]}", flush=True)
            as_claimed += same
        for num_replicas in (1, 2):
            run = folder / f"cut_{num_replicas}"
            changes = {"save_steps": 1, "ddp_timeout": 20}
            grpo = grpo_flags(folder, flags) | changes
            grpo |= {"output_dir": run, "num_replicas": num_replicas}
            cut = cut_amid_run(hosts, folder, grpo, limit=1200)
            ends = ", ".join(f"{seconds:.1f}" for seconds in cut.seconds)
            print(f"cut, {num_replicas} replica(s): statuses {cut.statuses}, seconds {ends}")
            for number, log in enumerate(cut.logs):
                lines = re.findall(r"^(?:rank |RuntimeError: ).*", log, re.MULTILINE)
                print(f"  host {number}:", *lines, sep="\n    ")
            as_claimed.append(0 not in cut.statuses)
            hosts.run(grpo_command(grpo), 2, folder=folder)
            same = weights_hash(run) == weights_hash(folder / "one" / f"grpo_{num_replicas}")
            steps = [line["step"] for line in untimed_lines(run)]
            print(f"  resumed: steps {steps}, weights {same}")
            as_claimed += [same, steps == list(range(1, STEPS + 1))]
    return 0 if all(as_claimed) else 1


if __name__ == "__main__":
    sys.exit(main())
