#!/usr/bin/env bash
# Run a command on a machine that may be taken away, and keep what it needs to go on elsewhere.
#
#   launch/keep.sh torchrun ... -m grpo train ...
#
#   OUTPUT        the command's output folder (build/train): the run is finished when its run.json is new
#   HOST_RANK     other than 0: another host writes it, and the command's own status is all that counts here
#   BRING         a command that brings runs/ back from where it is kept; none where runs/ is on a volume that stays
#   SEND          a command that sends runs/ there
#   SEND_SECONDS  seconds between two sends (120): what a machine that vanishes can lose of what was saved
#
# SIGTERM, which comes before a machine is taken away, goes on to the command. `grpo train` then ends its round and exits
# with 75 (a temporary failure), so that a scheduler starts it again. Where a launcher in between makes a 0 of it, this
# script exits with 75 itself.
set -euo pipefail

send() { if [[ -n ${SEND:-} ]]; then bash -c "$SEND" || echo "keep.sh: SEND failed; it is tried again" >&2; fi; }

# Read whole before it begins: the file may change while the training runs.
main() {
  OUTPUT=${OUTPUT:-build/train}
  SEND_SECONDS=${SEND_SECONDS:-120}
  started=$(mktemp)
  child='' sender='' interrupted=yes

  trap 'interrupted=yes; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM
  trap '[[ -z $sender ]] || kill "$sender" 2>/dev/null || true; rm -f "$started"' EXIT

  if [[ -n ${BRING:-} ]]; then bash -c "$BRING"; fi
  touch "$started"
  "$@" &
  child=$!
  if [[ -n ${SEND:-} ]]; then
    while sleep "$SEND_SECONDS"; do send; done &
    sender=$!
  fi
  # The signal ends the waiting and not the command: it is waited for again.
  while [[ $interrupted == yes ]]; do
    interrupted=no status=0
    wait "$child" || status=$?
  done
  send
  if [[ $status -ne 0 ]]; then exit "$status"; fi
  if [[ ${HOST_RANK:-0} == 0 && ! "$OUTPUT/run.json" -nt "$started" ]]; then
    echo "keep.sh: the command ended and $OUTPUT/run.json is not new: the run is not finished" >&2
    exit 75
  fi
}

main "$@"
exit
