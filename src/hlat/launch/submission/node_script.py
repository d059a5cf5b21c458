"""The shell script of a pod: the processes of a run on one machine.

    JOB_COMPLETION_INDEX (of the pod), WORLD_SIZE, MASTER_ADDR, MASTER_PORT --> RANK, LOCAL_RANK, GROUP_RANK of each
    SIGTERM --> every process: they save and stop
    exit codes of the processes --the highest--> exit code of the pod, which podFailurePolicy reads

srun does the same for Slurm. torchrun could start the processes too, but ends with 1 for each of their exit codes.
"""

_SCRIPT = """\
# Starts the processes of this machine: bash node.sh COMMAND...
processes={nproc} grace={grace}
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}}"
export GROUP_RANK="$JOB_COMPLETION_INDEX"
pids=()
trap 'kill -TERM "${{pids[@]}}" 2>/dev/null' TERM
for ((local = 0; local < processes; local++)); do
  RANK=$((JOB_COMPLETION_INDEX * processes + local)) LOCAL_RANK=$local "$@" &
  pids+=($!)
done
code=0 limit=0
while ((${{#pids[@]}})); do
  for i in "${{!pids[@]}}"; do
    kill -0 "${{pids[i]}}" 2>/dev/null && continue
    wait "${{pids[i]}}"
    status=$?
    unset "pids[i]"
    ((status > code)) && code=$status
    ((limit)) || limit=$((SECONDS + grace)) # a process has ended: so long for the others
  done
  ((limit && SECONDS > limit && ${{#pids[@]}})) && kill -KILL "${{pids[@]}}" 2>/dev/null
  ((${{#pids[@]}})) && {{ sleep 0.2 & wait $!; }}
done
exit "$code"
"""


def node_script(nproc: int, grace: int) -> str:
    """Write the script.

    Args:
        nproc: processes per machine.
        grace: seconds that the others have when the first process has ended.
    """
    return _SCRIPT.format(nproc=nproc, grace=grace)
