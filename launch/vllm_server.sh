#!/usr/bin/env bash
# Serve a policy with vLLM, ready to take over a training's weights after every round (model.engine.name: vllm_server).
#
#   launch/vllm_server.sh build/policy                      on a GPU
#   launch/vllm_server.sh build/policy --enforce-eager --kv-cache-memory-bytes 1000000000 --no-enable-chunked-prefill
#                                                           on a processor: a gigabyte of cache, nothing compiled, and
#                                                           prompts read whole (vLLM 0.32 fails on parts of one there)
#
#   HOST, PORT  where it listens (127.0.0.1, 8000); model.engine.address is to say the same
#   VENV        an environment with vLLM (.venv-vllm, which `make setup-vllm` makes)
#
# What stands behind the policy goes to vLLM. Whoever reaches the server can change its weights and have it read
# files: it listens to this machine alone unless HOST says otherwise. The weights come through the run's folder, which
# the server must see under the same path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
# Without it vLLM would bind its threads to processors that others may be using.
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}

# What `vllm serve` does; that program itself does not start where vLLM was installed under another name (vllm-cpu).
exec "${VENV:-.venv-vllm}/bin/python" -m vllm.entrypoints.openai.api_server --model "${1:?name the policy folder}" \
  --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" \
  --worker-extension-cls grpo.rollouts.vllm_worker.TakesOverWeights --enable-scale-out \
  --dtype float32 --logprobs-mode processed_logprobs --generation-config vllm "${@:2}"
