#!/usr/bin/env bash
# The main job on a fresh machine: installs the project, then trains a small MoE from nothing by SFT,
# value pretraining and asynchronous RL.  CPU only, at most 5 minutes after the installation on two
# cores; prints a table and the paths of a figure and a report.  Stopped, it goes on where it was.
# Arguments go to every stage: --config.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(bash launch/setup.sh)

# All stages share a run folder: starting over is for the first of them.
later=()
for argument in "$@"; do
  [[ $argument == --fresh ]] || later+=("$argument")
done

"$venv/bin/sao-jax" sft --config=configs/quickstart.py "$@"
"$venv/bin/sao-jax" pretrain-value --config=configs/quickstart.py ${later[@]+"${later[@]}"}
exec "$venv/bin/sao-jax" train --config=configs/quickstart.py ${later[@]+"${later[@]}"}
