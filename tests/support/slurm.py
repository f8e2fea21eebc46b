"""A real Slurm on this machine: a controller and the nodes n1 and n2, with one CPU each and no GPU.

It needs Linux, root and Debian's packages `slurm-wlm` and `munge`. There is no accounting: `sacct`
knows no job.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
# By cgroup, as on most clusters, Slurm signals only the task of a step, by linuxproc its children
# too. Not tried: cgroup v2, which has no such folder.
TRACKING = "cgroup" if Path("/sys/fs/cgroup/freezer").is_dir() else "linuxproc"
# A job that is queued again waits for `cred_expire`: two minutes by default. The number of a job
# is in the names of its cgroups and in its ports, and there may be another Slurm on this machine.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
ProctrackType=proctrack/{tracking}
FirstJobId={ports[0]}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=1
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=debug Nodes=ALL Default=YES
"""
# Process 1 of a namespace: all that Slurm and its jobs started ends with it, at the end of stdin.
# munged is forced: other users cannot enter pytest's folders.
START = """
mount --bind hosts /etc/hosts
munged --foreground --force --key-file="$PWD/munge.key" --socket="$PWD/munge.socket" \
    --pid-file="$PWD/munged.pid" --seed-file="$PWD/munge.seed" --log-file="$PWD/munged.log" &
until [ -S munge.socket ]; do sleep 0.1; done
slurmctld -D &
slurmd -D -N n1 &
slurmd -D -N n2 &
read -r
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run Slurm in the folder; the variables with which `sbatch`, `squeue` and so on reach it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"Slurm needs {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("Slurm needs root, for namespaces of processes and mounts")
    host = socket.gethostname().partition(".")[0]
    folder = folder / "slurm"
    folder.mkdir()
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "hosts").write_text(f"127.0.0.1 localhost n1 n2 {host}\n")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [free.getsockname()[1] for free in sockets]
    for free in sockets:
        free.close()
    configuration = folder / "slurm.conf"
    settings = {"host": host, "ports": ports, "folder": folder, "tracking": TRACKING}
    configuration.write_text(CONFIGURATION.format(**settings))
    (folder / "cgroup.conf").touch()
    variables = {"SLURM_CONF": str(configuration), "PATH": path}
    namespace = ("unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
    with (folder / "log").open("wb") as log:
        daemons = subprocess.Popen(
            [*namespace, "bash", "-e", "-c", START],
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 60
        while not is_ready(variables):
            has_time = daemons.poll() is None and time.monotonic() < deadline
            assert has_time, f"Slurm does not start: {(folder / 'log').read_text()[-6000:]}"
            time.sleep(0.2)
        yield variables
    finally:
        daemons.kill()
        daemons.communicate()


def is_ready(variables: dict[str, str]) -> bool:
    """Whether jobs can start on both nodes."""
    try:
        return call(variables, "sinfo", "-h", "-t", "idle", "-o", "%D") == "2"
    except AssertionError:  # the controller does not answer yet
        return False


def call(variables: dict[str, str], *command: str) -> str:
    """Output of a command of Slurm."""
    result = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
    return result.stdout.strip()
