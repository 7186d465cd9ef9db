"""A policy that vLLM's kernels for processors can run, and its engines: in this process, and behind an address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import torch
from fixtures_policy import TEMPLATE, TOKENIZER
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from grpo.rollouts.policies import LoadedPolicy, save_policy

REPOSITORY = Path(__file__).parents[1]
SECONDS_TO_START = 240
CONTEXT = 160  # more than a block of vLLM's cache on a processor, which is 128 tokens


def wide_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers, 64 wide: heads of 32, the narrowest that vLLM has kernels for."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def wide_policy_folder(folder: Path, seed: int = 0) -> Path:
    ends = (TOKENIZER.eos_token_id, *TOKENIZER("\n").input_ids)
    model = wide_llama(seed)
    model.generation_config = GenerationConfig(eos_token_id=list(ends), pad_token_id=ends[0], do_sample=True)
    save_policy(folder, LoadedPolicy(model, TOKENIZER, TEMPLATE, ends), {"made": "for tests"})
    return folder


@contextmanager
def served(policy: Path, log: Path) -> Iterator[str]:
    """The address of a server that was started as the recipe does; it ends with the context."""
    port = free_port()
    # The environment that the tests run in.
    variables = {"VENV": str(Path(sys.executable).parents[1]), "PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(REPOSITORY / "launch" / "vllm_server.sh"), str(policy)]
    options = ["--enforce-eager", "--kv-cache-memory-bytes", "100000000", "--max-model-len", str(CONTEXT)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *options], env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(address, process, log)
            yield address
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
        except (URLError, TimeoutError, ConnectionError):
            time.sleep(1)
        else:
            return
    raise AssertionError(f"no server within {SECONDS_TO_START} s: {log.read_text()[-3000:]}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
