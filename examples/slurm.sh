#!/bin/bash
# A comparison as an array job of SLURM: the tasks train its runs into one folder, the last job writes the report.
#
#     sbatch examples/slurm.sh folder:photos --heads softmax,gsoftmax --seeds 20 --out /shared/photos
#
#SBATCH --job-name=gsoftmax
#SBATCH --array=1-8
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
# A minute before the limit of time a task gets SIGTERM and saves its state: submit the same command again to continue.
# After a preemption SLURM starts the task again by itself.
set -euo pipefail

report=(gsoftmax report)
for ((i = 1; i <= $#; i++)); do
    j=$((i + 1))
    case "${!i}" in
        --out) out="${!j:-}" ;;
        --out=*) out="${!i#*=}" ;;
        --data) report+=(--data "${!j:-}") ;;
        --data=*) report+=(--data "${!i#*=}") ;;
    esac
done
: "${out:?give the folder that all tasks share with --out}"

if [[ "${SLURM_ARRAY_TASK_ID:-}" == "${SLURM_ARRAY_TASK_MIN:-}" && "${SLURM_RESTART_COUNT:-0}" == 0 ]]; then
    sbatch --dependency="afterany:$SLURM_ARRAY_JOB_ID" --job-name=gsoftmax-report --wrap \
        "$(printf '%q ' "${report[@]}" "$out")"
fi
exec gsoftmax compare "$@" --jobs "${SLURM_CPUS_PER_TASK:-1}" --only "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
