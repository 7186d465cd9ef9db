#!/usr/bin/env bash
# Train on one host or several by torchrun, one process a GPU: run the same line on every host.
#
#   launch/torchrun.sh --config configs/train.yaml --config configs/profiles/eight_gpu_zero2.yaml
#
#   GPUS       processes on each host (8)
#   HOSTS      how many hosts (1); trainer.num_nodes is set to it
#   HOST_RANK  which of them this is, from 0 (0); each its own
#   HEAD       name or address of host 0, that the others reach (127.0.0.1)
#   PORT       a free port there (29500)
#
# With several hosts, the repository with build/, data/ and runs/ must be one folder that all of them see: every process
# writes its part of the record and, under DeepSpeed, of the state.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

GPUS=${GPUS:-8} HOSTS=${HOSTS:-1} HOST_RANK=${HOST_RANK:-0} HEAD=${HEAD:-127.0.0.1} PORT=${PORT:-29500}

exec bash launch/keep.sh torchrun \
  --nnodes "$HOSTS" --node-rank "$HOST_RANK" --nproc-per-node "$GPUS" --master-addr "$HEAD" --master-port "$PORT" \
  -m grpo train "$@" --trainer.devices "$GPUS" --trainer.num_nodes "$HOSTS"
