"""The preflight step of a batch script: `hlat doctor` on every node before the training, and what follows from it.

srun hlat doctor --no bad node--------------------> the training starts
--bad, enough others (--least)---> the training starts without them
--bad, all are needed------------> drained where the user may, and this job queued again;
else a new job that excludes them
"""

import shlex
from collections.abc import Sequence

_STEP = r"""
# The nodes are examined first. A bad one is named, and left out or replaced.
bad_file="$PWD/hlat-bad-nodes-$SLURM_JOB_ID"
{doctor} --exclude-bad "$bad_file"
examined=$?
bad=$(tr '\n' ' ' <"$bad_file" 2>/dev/null) && rm -f "$bad_file"
if [ "$examined" -ne 0 ] && [ -z "$bad" ]; then
  exit "$examined"  # no node is to blame: the doctor has said what is
fi
if [ -n "$bad" ]; then
  count=$(wc -w <<<"$bad")
  echo "bad nodes: $bad" >&2
  if [ "$((SLURM_JOB_NUM_NODES - count))" -ge {least} ]; then
    exclude=(--exclude="$(tr -s ' ' ',' <<<"${{bad% }}")")
    nodes=$((SLURM_JOB_NUM_NODES - count))
  elif scontrol update NodeName="$(tr -s ' ' ',' <<<"${{bad% }}")" State=DRAIN Reason="hlat doctor" 2>/dev/null; then
    echo "drained them, and queueing this job again for other nodes" >&2
    {again}
  else
    echo "this user may not drain nodes: submitting this job again without them" >&2
    sbatch --exclude="$(tr -s ' ' ',' <<<"${{bad% }}")" "$0"
    exit 0
  fi
fi"""


def preflight_step(
    step: Sequence[str], program: Sequence[str], words: Sequence[str], least: int, is_chain: bool
) -> str:
    """Write the step.

    Args:
        step: words of srun.
        program: words of the command that runs hlat.
        words: recipe, overrides and number of processes.
        least: number of nodes that the training needs.
        is_chain: True if the job is an element of a chain, whose next element tries again.
    """
    tasks = ' --ntasks="$nodes" --cpus-per-task="$cores"'
    doctor = shlex.join(step) + tasks + " \\\n  " + shlex.join([*program, "doctor", *words])
    again = "exit 75" if is_chain else 'scontrol requeue "$SLURM_JOB_ID"\n    exit 75'
    return _STEP.format(doctor=doctor, least=least, again=again)
