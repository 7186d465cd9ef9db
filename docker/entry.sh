#!/bin/sh
# Runs the container's command, after a word about the machine where that does not fit what is asked of it.
set -eu

warn() { echo "grpo: $*" >&2; }

shared_mb() { df --portability --block-size=1M /dev/shm 2>/dev/null | awk 'NR == 2 { print $2 }'; }

# The profile named in the command, or else in params.yaml; its trainer.devices, where these are GPUs.
profile_processes() {
  profile=$(printf '%s\n' "$@" | sed -n -e 's/.*\bprofile=//p' -e 's|.*profiles/\(.*\)\.yaml$|\1|p' | tail -n 1)
  [ -n "$profile" ] || profile=$(sed -n 's/^profile: *//p' params.yaml 2>/dev/null || true)
  file="configs/profiles/$profile.yaml"
  grep -q '^ *accelerator: gpu' "$file" 2>/dev/null || { echo 1; return; }
  sed -n 's/^ *devices: *\([0-9][0-9]*\).*/\1/p' "$file" | tail -n 1
}

gpus() { find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l; }

shared=$(shared_mb)
if [ ! -w /dev/shm ] || [ "${shared:-0}" -lt 1 ]; then
  warn "/dev/shm is missing, read-only or smaller than 1 MB, and the processes that judge answers keep their locks there:" \
    "start the container with --shm-size=64m or more."
elif [ "$shared" -lt 1024 ]; then
  processes=$(profile_processes "$@")
  visible=$(gpus)
  if [ "${processes:-1}" -gt 1 ] || [ "$visible" -gt 1 ]; then
    warn "/dev/shm holds $shared MB, which is enough for one process. Several on GPUs exchange tensors through it (NCCL)" \
      "and may end with a bus error or \"No space left on device\": start the container with --shm-size=8g or --ipc=host."
  fi
fi

exec "$@"
