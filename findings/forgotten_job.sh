#!/usr/bin/env bash
# Slurm 22.05.8 (Debian 12): `afterok` of a job that Slurm has forgotten starts at once, also if that job failed.
#
# Expected: sbatch refuses a dependency on a job that the controller does not know, or the job waits for ever, as
#   one does whose `afterok` was submitted in time and has failed.
# Seen: a job is forgotten MinJobAge after its end (300 s by default, 2 s here). A job that is submitted with
#   `afterok` of it then has no dependency left and runs, as does one after a number that no job has had, and one
#   with `afternotok`.
# Why it matters: an evaluation that is queued, by a driver that was started again, behind a training that had
#   failed ten minutes before runs on the checkpoint that is there, and its numbers go into the table.
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
MinJobAge=2
PartitionName=all Nodes=ALL Default=YES
CONF
munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --seed-file="$folder/munge.seed" --log-file="$folder/munged.log" >> log 2>&1 &
until [ -S munge.socket ]; do sleep 0.1; done
slurmctld -D >> log 2>&1 &
slurmd -D -d "$folder/usr/sbin/slurmstepd" >> log 2>&1 &
until [ -n "$(sinfo --noheader --states idle --format %D 2>> log)" ]; do sleep 0.2; done

printf '#!/bin/bash\nexit "$1"\n' > train.sh
printf '#!/bin/bash\necho ran\n' > evaluate.sh
evaluate() {
    local job
    job=$(sbatch --parsable --output=evaluation --dependency="$2" evaluate.sh)
    sleep 5
    echo "$1: $(cat evaluation 2> /dev/null || squeue --noheader --job "$job" --format "waits, %r")"
    scancel "$job" 2> /dev/null || true
    rm -f evaluation
}
{
    failed=$(sbatch --parsable --output=/dev/null train.sh 1)
    evaluate "afterok of a failed job" "afterok:$failed"
    while scontrol show job "$failed" > /dev/null 2>&1; do sleep 1; done
    evaluate "afterok of a forgotten failed job" "afterok:$failed"
    evaluate "afternotok of it" "afternotok:$failed"
    evaluate "afterok of a job that never was" afterok:4321
} > seen
cat seen
diff - seen <<'SEEN'
afterok of a failed job: waits, DependencyNeverSatisfied
afterok of a forgotten failed job: ran
afternotok of it: ran
afterok of a job that never was: ran
SEEN
