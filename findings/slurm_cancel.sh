#!/usr/bin/env bash
# Slurm 22.05.8 (Debian 12): a cancelled job comes back if its script catches SIGTERM and asks for a requeue.
#
# Expected: after scancel the step saves, srun returns, and the script goes on and reads JobState=CANCELLED.
# Seen (proctrack/linuxproc): scancel ends the script with the step: nothing behind srun runs. One that catches SIGTERM
#   goes on, but reads COMPLETING; a requeue that it asks for is accepted, and the cancelled job runs again.
# Why it matters: a script that queues its job again until a run is finished must not catch SIGTERM, as one would to
#   tidy up. A check for CANCELLED in it is dead code.
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

cat > plain.sh <<'JOB'
#!/bin/bash
[ -z "${SLURM_RESTART_COUNT:-}" ] || { echo "the cancelled job runs again"; exit; }
srun bash -c 'trap "sleep 2; echo the step saved; exit 0" TERM; while true; do sleep 0.1; done' 2> /dev/null
scontrol show job "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z]*'
scontrol requeue "$SLURM_JOB_ID" && echo "the requeue is accepted"
JOB
sed '3i trap "echo the script got SIGTERM" TERM' plain.sh > catches.sh
for name in plain catches; do
    job=$(sbatch --parsable --output="$name" --open-mode=append "$name.sh")
    sleep 3
    scancel "$job"
    sleep 15
    echo "$name: $(scontrol show job "$job" | grep -o 'JobState=[A-Z]*\|Restarts=[0-9]*' | xargs)"
    grep -v slurmstepd "$name" | sort
done > seen
cat seen
diff - seen <<'SEEN'
plain: JobState=CANCELLED Restarts=0
the step saved
catches: JobState=COMPLETED Restarts=1
JobState=COMPLETING
the cancelled job runs again
the requeue is accepted
the script got SIGTERM
the step saved
SEEN
