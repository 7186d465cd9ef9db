"""vLLM in this process, or behind an address: how each is asked for completions and handed weights.

Weights go by the names that the policy folder has. Whatever else the engine remembers of old weights, the keys and
values of prompts that it has seen, is forgotten with them.
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from grpo.rollouts import vllm_worker
from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.vllm_sampling import Completion, EngineFailed, Request

# What the engine's weights are called while they change: a change that fails leaves this.
HALF_TAKEN_OVER = "half taken over"
# In this process, without reports home; threads are the training's to place.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# That a server may take to say what it is, with one token drawn.
SECONDS_TO_ANSWER = 60.0


class InProcess:
    """An engine of vLLM in the training process, which shares its processor or GPU.

    Args:
        policy: its folder, for the architecture and the names of the weights.
        settings: precision, cache and context.
        max_rows: completions drawn side by side, at most.
    """

    def __init__(self, policy: Path, settings: EngineSettings, max_rows: int) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm

        with threads_left_to_torch():
            self.llm = vllm.LLM(
                model=str(policy),
                dtype=settings.precision,
                kv_cache_memory_bytes=round(settings.cache_gb * 1e9),
                gpu_memory_utilization=0.01,  # how much has to be free at the start; what is taken is said above
                max_model_len=settings.context,
                max_num_seqs=max_rows,
                logprobs_mode="processed_logprobs",  # of the distribution that is drawn from
                generation_config="vllm",  # none of the folder's own defaults
                worker_extension_cls=vllm_worker.CLASS,
                # vLLM 0.32 fails on a processor where a prompt with a seed is read in parts.
                enable_chunked_prefill=False,
                enforce_eager=True,
                disable_log_stats=True,
            )
        self.weight_names = saved_names(policy)
        self.context = int(self.llm.llm_engine.model_config.max_model_len)
        self.name = f"vllm {vllm.__version__} {settings.precision}"

    def take_over(self, model: PreTrainedModel, weights: str) -> None:
        """Raises ValueError where the policy's weights go by other names in memory than in its folder."""
        state = untied(model.state_dict())
        if state.keys() != self.weight_names:
            odd = sorted(state.keys() ^ self.weight_names)
            raise ValueError(
                f"engine.name is vllm, and weights of this policy go by other names in memory than in its folder "
                f"({len(odd)}, such as {odd[0]}): set engine.name to vllm_server, which is handed a folder"
            )
        self.llm.update_weight_version(HALF_TAKEN_OVER)
        self.llm.collective_rpc("take_over", kwargs={"weights": weights, "weights_iterator": iter(state.items())})
        if not self.llm.reset_prefix_cache():
            raise EngineFailed("vLLM did not forget prompts read with the old weights")
        self.llm.update_weight_version(weights)

    def held(self) -> set[str | None]:
        return set(self.llm.collective_rpc("weights_held"))

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        from vllm import SamplingParams, TokensPrompt

        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(request.prompt)) for request in requests],
            [SamplingParams(**request.sampling) for request in requests],
            use_tqdm=False,
        )
        return [self._completion(output.outputs[0]) for output in outputs]

    def _completion(self, drawn: Any) -> Completion:
        tokens = tuple(drawn.token_ids)
        logprobs = (place[token].logprob for token, place in zip(tokens, drawn.logprobs, strict=True))
        return Completion(tokens, tuple(logprobs), frozenset(span.version for span in drawn.weight_versions))

    def close(self) -> None:
        """End the engine; torch's process group goes with it, which vLLM made for itself."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


class Server:
    """vLLM's own server, in a process and, where one wishes, an environment of its own.

    Args:
        address: such as ``http://127.0.0.1:8000``.
        max_rows: completions asked for at a time; how many it draws side by side is the server's to say.
        longest_wait: seconds without a word from it, after which it counts as lost.

    Raises:
        ValueError: no server answers there, or one that was started otherwise than ``launch/vllm_server.sh`` does.
    """

    def __init__(self, address: str, max_rows: int, longest_wait: float = 1800.0) -> None:
        self.address = address.rstrip("/")
        self.max_rows = max_rows
        self.longest_wait = min(SECONDS_TO_ANSWER, longest_wait)
        # Straight to the server, whatever proxy the environment names for the rest of the world.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            version = self._call("/version")["version"]
            model = self._call("/server_info?config_format=json")["vllm_config"]["model_config"]
            self.complete([Request((0,), {"max_tokens": 1, "logprobs": 0})])  # whether it takes tokens at all
        except (EngineFailed, LookupError, TypeError) as error:
            raise ValueError(
                f"engine.address is {address}, and no vLLM server that takes weights answers there: start one with "
                f"launch/vllm_server.sh, or set engine.name to own ({error.args[0]})"
            ) from None
        if model["logprobs_mode"] != "processed_logprobs":
            raise ValueError(
                f"the vLLM server at engine.address gives {model['logprobs_mode']}, which are not of the distribution "
                "that it draws from: start it with --logprobs-mode processed_logprobs, as launch/vllm_server.sh does"
            )
        self.context = int(model["max_model_len"])
        self.name = f"vllm {version} {str(model['dtype']).removeprefix('torch.')}"
        self.longest_wait = longest_wait

    def take_over(self, model: PreTrainedModel, weights: str) -> None:
        """Through the folder that the weights are called after, which the server reads and which is removed again.

        Raises:
            ValueError: the server was started with another policy.
        """
        folder = Path(weights)
        try:
            model.save_pretrained(folder)
            self._require_same_policy(folder)
            self._call("/update_weight_version", {"new_version": HALF_TAKEN_OVER})
            self._worker("take_over", weights=weights, weights_path=str(folder))
            if not self._call("/reset_prefix_cache", {})["success"]:
                raise EngineFailed("vLLM did not forget prompts read with the old weights: others may use the server")
            self._call("/update_weight_version", {"new_version": weights})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _require_same_policy(self, folder: Path) -> None:
        """Weights of the same shapes fit a model that computes something else with them."""
        differing = {key for keys in self._worker("differing_settings", policy=str(folder)) for key in keys}
        if differing:
            raise ValueError(
                f"the vLLM server at engine.address was started with another policy than is trained: their config.json "
                f"differ in {', '.join(sorted(differing))}. Start it again with the folder that data.policy names"
            )

    def held(self) -> set[str | None]:
        return set(self._worker("weights_held"))

    def _worker(self, method: str, **options: str) -> list[Any]:
        """What each process that holds a part of the weights answers."""
        answers: list[Any] = self._call("/collective_rpc", {"method": method, "kwargs": options})["results"]
        return answers

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        with ThreadPoolExecutor(self.max_rows) as threads:
            return list(threads.map(self._complete, requests))

    def _complete(self, request: Request) -> Completion:
        body = {"token_ids": request.prompt, "sampling_params": request.sampling}
        choice = self._call("/inference/v1/generate", body)["choices"][0]
        places = choice["logprobs"]["content"]
        return Completion(
            tuple(choice["token_ids"]),
            tuple(place["logprob"] for place in places),
            frozenset(span["version"] for span in choice["weight_versions"]),
        )

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """A GET without a body, else a POST of it as JSON; what came back, also from JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        try:
            return self._answer(request)
        except (OSError, HTTPException, ValueError) as error:  # the last from what is no JSON
            said = str(error) or type(error).__name__
            raise EngineFailed(f"vLLM's server at {self.address} does not answer {path}: {said}") from None

    def _answer(self, request: urllib.request.Request) -> Any:
        try:
            with self.opener.open(request, timeout=self.longest_wait) as answer:
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise EngineFailed(f"vLLM's server answers {request.selector} with status {error.code}: {said}") from None

    def close(self) -> None:
        """The server goes on: it is not this process's to end."""


@contextmanager
def threads_left_to_torch() -> Iterator[None]:
    """vLLM puts a function that does nothing in the place of the one that sets their number; taken back here."""
    set_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_threads


def saved_names(policy: Path) -> set[str]:
    """The names of the weights in a policy folder."""
    names: set[str] = set()
    for path in policy.glob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            names |= set(weights.keys())
    return names


def untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each weight once, by the first of its names, as a folder holds them."""
    kept: dict[int, tuple[str, Tensor]] = {}
    for name, weight in state.items():
        kept.setdefault(weight.data_ptr(), (name, weight.detach()))
    return dict(kept.values())
