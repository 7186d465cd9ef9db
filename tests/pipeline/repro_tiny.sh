#!/usr/bin/env bash
# The whole pipeline for real, with the tiny policy, in a copy of the working tree: prepare, policy, train,
# evaluate, report; then that repeating does nothing, and that a changed value reruns what depends on it alone.
set -euo pipefail

top=$(git rev-parse --show-toplevel)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$top"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --target-directory "$work"
cd "$work"
git init --quiet
git add --all
git -c user.name=grpo -c user.email=grpo@localhost commit --quiet --message "A copy to run the pipeline in"
export PYTHONPATH="$work/src" OMP_NUM_THREADS=1

dvc pull --quiet data.dvc

tiny=(
  --set-param configs/policy.yaml:source.class_path=grpo.training.tiny_policy.TinyPolicy
  --set-param 'configs/policy.yaml:end_tokens=[]'
  --set-param configs/train.yaml:data.rounds=3
  --set-param configs/train.yaml:data.groups_per_round=6
  --set-param configs/train.yaml:data.validation_problems=8
  --set-param configs/train.yaml:model.round.group_size=4
)
dvc exp run --name tiny "${tiny[@]}"

fail() { echo "repro_tiny: $*" >&2; exit 1; }

for file in report/report.md report/comparison.json build/train/policy/model.safetensors build/train/metrics.csv; do
  [ -s "$file" ] || fail "$file is missing or empty"
done
rows=$(python -c 'import pyarrow.parquet as pq; print(pq.read_table("build/train/record/rollouts").num_rows)')
[ "$rows" -eq $((3 * 6 * 4)) ] || fail "the record holds $rows rollouts, not 3 rounds x 6 groups x 4 members"

again=$(dvc repro 2>&1)
grep --quiet "up to date" <<< "$again" || fail "a second run did something: $again"

status=$(dvc status)
[ "$status" = "Data and pipelines are up to date." ] || fail "status after a run: $status"

# What the README shows of DVC, run as it stands there.
grep --only-matching --perl-regexp '^dvc (status|params|metrics|plots|exp show)[^#]*' README.md | while read -r command; do
  echo "+ $command"
  $command > output.txt 2>&1 || { cat output.txt; fail "the README's command failed: $command"; }
done
grep --quiet headline.json <<< "$(dvc metrics diff)" || fail "dvc metrics diff does not show what the run changed"
grep --quiet data.rounds <<< "$(dvc params diff)" || fail "dvc params diff does not show what the run changed"
rm -rf output.txt dvc_plots

sed -i 's/^seed: .*/seed: 7/' configs/evaluate.yaml
changed=$(dvc repro 2>&1)
for stage in evaluate report; do
  grep --quiet "Running stage '$stage" <<< "$changed" || fail "an edited configs/evaluate.yaml does not rerun $stage"
done
for stage in prepare policy train; do
  ! grep --quiet "Running stage '$stage" <<< "$changed" || fail "an edited configs/evaluate.yaml reruns $stage"
done
echo "repro_tiny: the pipeline runs, repeats as nothing, and reruns what depends on a change"
