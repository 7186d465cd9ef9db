"""What stands at a server's address, or does not; and what an engine in the process leaves behind. Without vLLM."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures_policy import random_llama

from grpo.rollouts import vllm_engines
from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.vllm_engines import InProcess, Server
from grpo.rollouts.vllm_sampling import EngineFailed
from grpo.rollouts.vllm_worker import TakesOverWeights, differing

REFUSED = r"engine\.address is http://127\.0\.0\.1:\d+, and no vLLM server .* launch/vllm_server\.sh.*"


@contextmanager
def speaking(say: Callable[[str], bytes | None]) -> Iterator[str]:
    """The address of something that says this to a request of a path; for None it says nothing until the end."""
    over = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            said = say(self.path)
            over.wait() if said is None else self.wfile.write(said)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            over.set()
            server.shutdown()
            thread.join()


def answer(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


MODEL = {"logprobs_mode": "processed_logprobs", "max_model_len": 64, "dtype": "torch.float32"}
DRAWN = {"token_ids": [0], "logprobs": {"content": [{"logprob": -1.0}]}, "weight_versions": [{"version": "default"}]}
# As vLLM 0.32 answers what is asked of it first.
FACTS = {"version": "0.32.0", "vllm_config": {"model_config": MODEL}, "choices": [DRAWN]}


def workers_answer(results: list[Any] | None) -> Callable[[str], bytes | None]:
    """A server of vLLM whose workers answer this, or never."""
    said = None if results is None else answer({"results": results})
    return lambda path: said if path == "/collective_rpc" else answer(FACTS)


def test_an_address_where_nobody_answers_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=REFUSED):
        Server("http://127.0.0.1:9", max_rows=4)


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 50\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b"HTTP/1.0 200 OK\r\n\r\n\xff",
        b"HTTP/1.0 404 Not Found\r\n\r\n",
        b"",
        answer([]),
        answer({}),
        answer(None),
        answer(FACTS | {"choices": []}),
    ],
)
def test_what_is_no_server_of_vllm_is_refused_by_name(said: bytes) -> None:
    with speaking(lambda _: said) as address, pytest.raises(ValueError, match=REFUSED):
        Server(address, max_rows=4)


def test_a_server_that_never_answers_is_refused_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engines, "SECONDS_TO_ANSWER", 0.2)
    start = time.monotonic()
    with speaking(lambda _: None) as address, pytest.raises(ValueError, match=f"{REFUSED}timed out"):
        Server(address, max_rows=4)
    assert time.monotonic() - start < 10


def test_a_server_that_stops_answering_is_waited_for_as_long_as_is_said() -> None:
    with speaking(workers_answer(None)) as address:
        server = Server(address, max_rows=4, longest_wait=0.5)
        with pytest.raises(EngineFailed, match=r"does not answer /collective_rpc: timed out\. Run the training again"):
            server.held()
    assert server.name == "vllm 0.32.0 float32"


def test_a_server_of_another_policy_is_not_handed_weights(tmp_path: Path) -> None:
    differs = workers_answer([["rope_parameters"], ["rms_norm_eps", "rope_parameters"]])
    with speaking(differs) as address, pytest.raises(ValueError, match="in rms_norm_eps, rope_parameters"):
        Server(address, max_rows=4).take_over(random_llama(), str(tmp_path / "weights"))
    assert not list(tmp_path.iterdir())


def test_what_a_config_says_differs_where_it_has_an_effect() -> None:
    config = random_llama().config.to_dict()
    assert differing(config | {"added_by_vllm": 1}, config) == []
    assert differing(config, config | {"transformers_version": "1", "dtype": "bfloat16", "_name_or_path": "x"}) == []
    others = {"rms_norm_eps": 0.5, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}, "sliding_window": 8}
    assert differing(config, config | others) == sorted(others)


class Worker(TakesOverWeights):
    """Of vLLM, as far as it is needed; given no weights, it fails."""

    def reload_weights(self, weights_path: str | None, weights_iterator: Iterator[Any] | None) -> None:
        assert self.weights_held() is None  # while they change
        if weights_path is None:
            raise OSError("no weights")

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)


def test_a_worker_tells_whose_weights_it_loaded_last(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = SimpleNamespace(ParallelLMHead=torch.nn.Embedding)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.vocab_parallel_embedding", layers)
    worker = Worker()
    assert worker.weights_held() is None
    for name in ("one/update-0", "other/update-0"):
        worker.take_over(name, weights_path="somewhere")
        assert worker.weights_held() == name
    with pytest.raises(OSError, match="no weights"):
        worker.take_over("one/update-1")
    assert worker.weights_held() is None


def test_threads_are_the_training_s_where_vllm_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    set_threads = torch.set_num_threads

    def fails(**_: object) -> None:
        torch.set_num_threads = lambda _: None
        raise RuntimeError("no memory")

    monkeypatch.setattr(vllm_engines, "ENVIRONMENT", {})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=fails))
    with pytest.raises(RuntimeError, match="no memory"):
        InProcess(Path("nowhere"), EngineSettings("vllm"), max_rows=4)
    assert torch.set_num_threads is set_threads
