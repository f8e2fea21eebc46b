"""Claims: two hosts compute what one does, and a host that is cut off ends the run on both.

The hosts are network namespaces of this machine, joined by a cable that can be cut. About
`common.distributed`.
"""

import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, SHORT_RUN, STAGES, Script, launch, run_stages, untimed_lines

RUNS = [(stage, num_replicas) for stage in STAGES for num_replicas in (1, 2)]  # FSDP and HSDP
ADDRESSES = ("10.213.0.1", "10.213.0.2")  # nobody outside the namespaces sees them
PORT = 29500
STEPS, CUT_IN = 4, 3
DDP_TIMEOUT = 6  # seconds that a rank waits; both start as forks, at once
# Packets are sent again for about 13 s; 15 times, the default of Linux, are about 16 minutes. So
# long torchrun waits for a host that does not answer. Its rank has spoken 5 s after the timeout.
TCP_RETRIES2, GIVEN_UP = 5, 13
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
GRPO = {"num_generations": 4, "beta": 0.0, "entropy_coef": 0.1}


class TwoHosts:
    """Two network namespaces, each with an end of a cable; deleted again, with what runs there."""

    def __init__(self) -> None:
        tag = uuid.uuid4().hex[:8]
        self.names = (f"sff-{tag}-0", f"sff-{tag}-1")

    def __enter__(self) -> "TwoHosts":
        """Make them; an OSError says why `ip` cannot."""
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
                setting = f"echo {TCP_RETRIES2} > /proc/sys/net/ipv4/tcp_retries2"
                ip("netns", "exec", name, "sh", "-c", setting)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for name in set(self.names) & set(ip("netns", "list").split()):
            for pid in self.pids(name):
                os.kill(pid, signal.SIGKILL)
            ip("netns", "del", name)

    def pids(self, name: str) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", name).split()]

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", "eth0", "down")

    def mend(self) -> None:
        ip("-n", self.names[1], "link", "set", "eth0", "up")

    def start(self, command: Sequence[object], folder: Path) -> list[Script]:
        """Start one process on each host by torchrun; they print to `folder/host_<number>.log`."""
        scripts = []
        for number, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=True)):
            options = ["--nnodes", "2", "--nproc_per_node", "1", "--local_addr", address]
            options += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{ADDRESSES[0]}:{PORT}"]
            # A namespace has the machine's host name, by which torchrun would look for itself.
            options += ["--rdzv_conf", f"is_host={int(number == 0)}"]
            log = folder / f"host_{number}.log"
            log.unlink(missing_ok=True)
            host = {"network": name, "server": number, "GLOO_SOCKET_IFNAME": "eth0"}
            scripts.append(Script(command, log, options, **host))
        return scripts

    def run(self, command: Sequence[object], num_ranks: int, *, folder: Path) -> None:
        """Run a script on both hosts to its end, as `ranks.run_script` does on one."""
        assert num_ranks == len(self.names)
        scripts = self.start(command, folder)
        statuses = [script.wait(240) for script in scripts]
        assert statuses == [0, 0], "\n".join([script.log.read_text()[-4000:] for script in scripts])


def ip(*arguments: str) -> str:
    """Output of `ip`; an OSError if it fails."""
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise OSError(f"`ip {' '.join(arguments)}` fails: {result.stderr.strip()}")
    return result.stdout


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    try:
        both = TwoHosts().__enter__()
    except OSError as error:
        pytest.skip(f"two hosts need root and network namespaces: {error}")
    yield both
    both.__exit__()


@pytest.fixture(scope="module")
def folder(
    hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory, start_flags: dict[str, str]
) -> Path:
    """Holds `one/` and `two/`: runs on one host with two processes, and on two with one each."""
    folder = tmp_path_factory.mktemp("many_nodes")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "cut").touch()  # nobody waits for a cut yet
    for name, run in (("one", None), ("two", partial(hosts.run, folder=folder))):
        jobs = []
        for stage, num_replicas in RUNS:
            output_dir = folder / name / f"{stage}_{num_replicas}"
            flags = flags_of(stage, num_replicas, output_dir, folder) | start_flags
            jobs.append({"stage": stage, "flags": flags})
        launch(run_stages, 2, folder, run=run, jobs=jobs)
    return folder


def flags_of(stage: str, num_replicas: int, output_dir: Path, folder: Path) -> dict[str, Any]:
    flags = COMMON | {"output_dir": str(output_dir), "num_replicas": num_replicas}
    if stage == "grpo":
        flags |= GRPO | {"reward_funcs": f"{folder}/rewards.py:letters"}
    return flags


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("stage", "num_replicas"), RUNS)
def test_two_hosts_compute_what_one_does(folder: Path, stage: str, num_replicas: int) -> None:
    one, two = (folder / name / f"{stage}_{num_replicas}" for name in ("one", "two"))
    assert [line["step"] for line in untimed_lines(two)] == list(range(1, STEPS + 1))
    assert untimed_lines(two) == untimed_lines(one)  # digit by digit
    assert any(line["grad_norm"] > 1e-3 for line in untimed_lines(one))
    assert weights(two) == weights(one)


def seconds_to_end_without_second(hosts: TwoHosts, scripts: list[Script]) -> list[float]:
    """Cut the second host off, and wait for both to end; the host is connected again afterwards."""
    hosts.cut()
    began, limit = time.monotonic(), GIVEN_UP + 60
    (scripts[0].log.parent / "cut").touch()
    seconds = [-1.0, -1.0]
    while min(seconds) < 0 and time.monotonic() - began < limit:
        for number, script in enumerate(scripts):
            if seconds[number] < 0 and script.poll() is not None:
                seconds[number] = time.monotonic() - began
        time.sleep(0.05)
    left = [pid for name in hosts.names for pid in hosts.pids(name)]
    hosts.mend()
    assert not left, f"processes {left} are left after {limit} s"
    return seconds


def test_a_host_that_is_cut_off_ends_the_run_which_then_resumes(hosts, folder, start_flags):
    run = folder / "cut_off"
    for name in ("cut", "reached"):
        (folder / name).unlink()
    flags = flags_of("grpo", 2, run, folder) | start_flags | {"save_steps": 1}
    command = [ROOT / "train_grpo.py"]
    command += [word for key, value in flags.items() for word in (f"--{key}", value)]
    scripts = hosts.start([*command, "--ddp_timeout", DDP_TIMEOUT], folder)
    while not (folder / "reached").exists():
        assert [script.poll() for script in scripts] == [None, None], "it ended before the cut"
        time.sleep(0.05)
    seconds = seconds_to_end_without_second(hosts, scripts)
    assert seconds[0] < DDP_TIMEOUT + 15
    assert seconds[1] < GIVEN_UP + 15
    for rank, script in enumerate(scripts):
        assert script.wait(10) != 0
        log = script.log.read_text()
        place = rf"rank {rank} of train_grpo, after step {CUT_IN - 1} of \d+:\nTraceback"
        assert re.search(place, log), log
        assert re.search(r"^RuntimeError: .*/gloo/", log, re.MULTILINE)
    assert [line["step"] for line in untimed_lines(run)] == list(range(1, CUT_IN))

    patient = [*command, "--ddp_timeout", 300]  # a busy machine may take long to draw and export
    hosts.run(patient, 2, folder=folder)
    undisturbed = folder / "one" / "grpo_2"
    assert untimed_lines(run) == untimed_lines(undisturbed)
    assert weights(run) == weights(undisturbed)
