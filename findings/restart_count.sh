#!/usr/bin/env bash
# Slurm 22.05.8 (Debian 12): a first start that a requeued job submits has that job's SLURM_RESTART_COUNT.
#
# Expected: SLURM_RESTART_COUNT is set by Slurm for the job that it starts: unset at a job's first start, whoever
#   submitted it.
# Seen: sbatch hands its environment on, and Slurm does not clear the variable. A job that is submitted from
#   within a requeued job begins with the count of that one, while `scontrol show job` says Restarts=0. With
#   `env -u SLURM_RESTART_COUNT sbatch` it is unset.
# Why it matters: scripts read the variable to decide between a new start and a resume. A chain of jobs (train,
#   then evaluate or the next stage) resumes what does not exist, or skips its set-up, after a preemption only.
set -euo pipefail
folder=$(mktemp -d)
end() {
    scancel --me
    sleep 3
    kill -KILL $(jobs -p)
    wait
    rm -rf "$folder"
}
trap 'set +e; end 2> /dev/null' EXIT
chmod 755 "$folder"
cd "$folder"
version=22.05.8-4+deb12u3
packages=(munge=0.5.15-2+deb12u1 libmunge2=0.5.15-2+deb12u1 libhwloc15=2.9.0-1 libnuma1=2.0.16-1)
for name in slurmctld slurmd slurm-client slurm-wlm-basic-plugins; do packages+=("$name=$version"); done
apt-get download "${packages[@]}" > log 2>&1 || { cat log; exit 1; }
for package in *.deb; do dpkg-deb -x "$package" .; done
lib=$(echo usr/lib/*/slurm-wlm)
export LD_LIBRARY_PATH=$folder/$lib:${lib%/*}:$folder/${lib%/*}
export PATH=$folder/usr/bin:$folder/usr/sbin:$PATH SLURM_CONF=$folder/slurm.conf
for program in usr/*bin/*-wlm; do ln -s "${program##*/}" "${program%-wlm}"; done
mkdir state spool
head -c 1024 /dev/urandom > munge.key
chmod 400 munge.key
read -r first second < <(python3 -c '
import socket
free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in free))')
cat > slurm.conf <<CONF
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$first
AuthInfo=socket=$folder/munge.socket,cred_expire=5
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
PluginDir=$folder/$lib
MpiDefault=none
ProctrackType=proctrack/linuxproc
SchedulerParameters=batch_sched_delay=1,sched_interval=1
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
NodeName=$(hostname -s) NodeAddr=127.0.0.1 Port=$second
PartitionName=all Nodes=ALL Default=YES
CONF
munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --seed-file="$folder/munge.seed" --log-file="$folder/munged.log" >> log 2>&1 &
until [ -S munge.socket ]; do sleep 0.1; done
slurmctld -D >> log 2>&1 &
slurmd -D -d "$folder/usr/sbin/slurmstepd" >> log 2>&1 &
until [ -n "$(sinfo --noheader --states idle --format %D 2>> log)" ]; do sleep 0.2; done

cat > first.sh <<'JOB'
#!/bin/bash
echo "first job: count ${SLURM_RESTART_COUNT:-unset}"
[ -n "${SLURM_RESTART_COUNT:-}" ] || { scontrol requeue "$SLURM_JOB_ID"; sleep 60; }
sbatch --output=second second.sh "submitted by it"
env -u SLURM_RESTART_COUNT sbatch --output=third second.sh "submitted without the variable"
JOB
cat > second.sh <<'JOB'
#!/bin/bash
echo "$1: count ${SLURM_RESTART_COUNT:-unset}, $(scontrol show job "$SLURM_JOB_ID" | grep -o 'Restarts=[0-9]*')"
JOB
sbatch --output=first --open-mode=append first.sh >> log
until [ -s third ]; do sleep 1; done
grep -h count first second third > seen
cat seen
diff - seen <<'SEEN'
first job: count unset
first job: count 1
submitted by it: count 1, Restarts=0
submitted without the variable: count unset, Restarts=0
SEEN
