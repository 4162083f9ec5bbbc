"""A stand-in for a vLLM server: the endpoints that TRL's async GRPO talks to, over a tiny model, on 127.0.0.1.

For tests and `treepack train-demo`. It lives in a thread of the trainer's process, so that weights are copied and not
sent. Requests that wait with equally long prompts are generated together; the prefix is computed again for every token,
which a tiny model can afford.
"""

import json
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POLL_S = 0.1
"""How often threads look whether the server is closing, in seconds."""

_UNSUPPORTED = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "n": 1}
"""Sampling options that must be left at these values."""


class HttpError(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, eq=False)
class Request:
    """One completion to generate.

    Attributes:
        model: the served model's name, or an adapter's.
        prompt: token ids.
        max_tokens: completion tokens at most.
        temperature: of the softmax.
        seed: of this completion's random numbers.
        answer: (token ids, their log-probabilities), set when it is done.
    """

    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    answer: Future[tuple[list[int], list[float]]] = field(default_factory=Future)

    def goes_with(self, other: "Request") -> bool:
        """Whether both can be generated as one batch."""
        return (self.model, len(self.prompt), self.temperature) == (other.model, len(other.prompt), other.temperature)


class LoopbackServer:
    """Serves a small causal language model; use as a context manager.

    Args:
        model: a model on the CPU; put in eval mode. Its `generation_config.eos_token_id` ends completions.
        name: the model's name in requests, as in vLLM the path it was loaded from.
        max_model_len: prompt and completion tokens of a request at most.
        max_lora_rank: the rank up to which adapters are served; None serves none.
        max_batch: completions generated together at most.

    Attributes:
        url: where it listens, an ephemeral port of 127.0.0.1.
        num_requests: requests so far by path.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        name: str,
        max_model_len: int = 512,
        max_lora_rank: int | None = None,
        max_batch: int = 32,
    ) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self.max_lora_rank = max_lora_rank
        self.max_batch = max_batch
        self.num_requests: Counter[str] = Counter()
        self._model = model.eval()
        stop = model.generation_config.eos_token_id if model.generation_config is not None else None
        self._stop_ids = frozenset(() if stop is None else [stop] if isinstance(stop, int) else stop)
        self._adapters: Any = None  # peft's wrapper of the model, from the first adapter on
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._set_aside: list[Request] = []  # taken from `_waiting`, but for another batch
        self._in_use = threading.Lock()  # held while the model generates or changes
        self._resumed = threading.Event()
        self._closing = threading.Event()
        self._resumed.set()
        self._http = _HttpServer(("127.0.0.1", 0), _Handler)
        self._http.loopback = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(POLL_S,), daemon=True, name="loopback-http"),
            threading.Thread(target=self._generate_forever, daemon=True, name="loopback-generate"),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()

    def pause(self) -> None:
        """Start no further batch, and wait until the one under way is done."""
        self._resumed.clear()
        with self._in_use:
            pass

    def resume(self) -> None:
        """Generate again."""
        self._resumed.set()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy (parameter name, value) pairs into the model."""
        with self._in_use, torch.no_grad():
            for name, value in weights:
                self._model.get_parameter(name).copy_(value)

    def complete(self, payload: dict[str, Any]) -> Any:
        """The answer to POST /v1/completions; returns once it is generated."""
        for name, default in _UNSUPPORTED.items():
            if payload.get(name, default) != default:
                raise HttpError(400, f"{name} must be {default}, got {payload[name]}")
        request = Request(
            model=payload["model"],
            prompt=tuple(payload["prompt"]),
            max_tokens=payload["max_tokens"],
            temperature=payload["temperature"],
            seed=payload["seed"],
        )
        if not request.temperature > 0:
            raise HttpError(400, f"temperature must be positive, got {request.temperature}")
        if request.max_tokens < 1:
            raise HttpError(400, f"max_tokens must be at least 1, got {request.max_tokens}")
        if len(request.prompt) + request.max_tokens > self.max_model_len:
            raise HttpError(
                400,
                f"prompt and max_tokens must fit in {self.max_model_len}, got {len(request.prompt)} + "
                f"{request.max_tokens}",
            )
        self._waiting.put(request)
        token_ids, log_probs = request.answer.result()
        finished = token_ids[-1] in self._stop_ids
        return {
            "choices": [
                {
                    "token_ids": token_ids,
                    "logprobs": {"token_logprobs": log_probs},
                    "finish_reason": "stop" if finished else "length",
                }
            ]
        }

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the LoRA adapter in the folder `path` as the model `name`."""
        from peft import PeftModel

        with self._in_use:
            if self._adapters is None:
                self._adapters = PeftModel.from_pretrained(self._model, path, adapter_name=name).eval()
            else:
                self._adapters.load_adapter(path, adapter_name=name)

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no longer."""
        with self._in_use:
            if self._serves_adapter(name):
                self._adapters.delete_adapter(name)

    def answer(self, method: str, path: str, payload: dict[str, Any]) -> Any:
        """What a request gets back, as JSON.

        Raises:
            HttpError: the status to answer with instead.
        """
        self.num_requests[path] += 1
        match method, path:
            case "GET", "/health":
                return {}
            case "GET", "/v1/models":
                return {"data": [{"id": self.name, "max_model_len": self.max_model_len}]}
            case "GET", "/server_info":
                return {"vllm_config": self._config()}
            case "POST", "/v1/completions":
                return self.complete(payload)
            case "POST", "/pause":
                self.pause()
            case "POST", "/resume":
                self.resume()
            case "POST", "/v1/load_lora_adapter":
                self.load_adapter(payload["lora_name"], payload["lora_path"])
            case "POST", "/v1/unload_lora_adapter":
                self.unload_adapter(payload["lora_name"])
            case _:
                raise HttpError(404, f"{method} {path} is not served")
        return {}

    def _config(self) -> dict[str, Any]:
        """The parts of vLLM's configuration that TRL reads."""
        lora = None if self.max_lora_rank is None else {"max_lora_rank": self.max_lora_rank, "max_loras": 64}
        return {
            "model_config": {"dtype": str(self._model.dtype)},
            "parallel_config": {"data_parallel_size": 1},
            "lora_config": lora,
        }

    def _serves_adapter(self, name: str) -> bool:
        return self._adapters is not None and name in self._adapters.peft_config

    def _generate_forever(self) -> None:
        batch: list[Request] = []
        while not self._closing.is_set():
            batch = batch or self._next_batch()
            if not self._resumed.wait(POLL_S):
                continue
            with self._in_use:
                if self._resumed.is_set():  # else paused just now
                    self._generate(batch)
                    batch = []
        while batch:
            _fail(batch, HttpError(503, "the server is closing"))
            batch = self._next_batch()

    def _next_batch(self) -> list[Request]:
        """The longest-waiting request and those that go with it; none when none comes for a while."""
        if not self._set_aside:
            try:
                self._set_aside.append(self._waiting.get(timeout=POLL_S))
            except queue.Empty:
                return []
        while not self._waiting.empty():
            self._set_aside.append(self._waiting.get())
        first = self._set_aside[0]
        batch = [request for request in self._set_aside if request.goes_with(first)][: self.max_batch]
        self._set_aside = [request for request in self._set_aside if request not in batch]
        return batch

    def _generate(self, batch: list[Request]) -> None:
        if not batch:
            return
        name = batch[0].model
        if name != self.name and not self._serves_adapter(name):
            _fail(batch, HttpError(404, f"the model {name} does not exist"))
            return
        model, mode = self._model_named(name)
        try:
            with torch.no_grad(), mode:
                answers = sample_completions(model, batch, self._stop_ids)
        except Exception as error:
            _fail(batch, HttpError(500, f"{type(error).__name__}: {error}"))
            return
        for request, answer in zip(batch, answers):
            request.answer.set_result(answer)

    def _model_named(self, name: str) -> tuple[Any, AbstractContextManager[Any]]:
        if self._adapters is None:
            return self._model, nullcontext()
        if name == self.name:
            return self._adapters, self._adapters.disable_adapter()
        self._adapters.set_adapter(name)
        return self._adapters, nullcontext()


def _fail(batch: list[Request], error: HttpError) -> None:
    for request in batch:
        request.answer.set_exception(error)


def sample_completions(
    model: Any, batch: list[Request], stop_ids: frozenset[int]
) -> list[tuple[list[int], list[float]]]:
    """Sample a completion for each request; a completion depends on its own seed alone, not on its batch.

    Args:
        model: a causal language model.
        batch: requests with prompts of one length and one temperature.
        stop_ids: the token ids that end a completion.
    """
    generators = [torch.Generator().manual_seed(request.seed) for request in batch]
    ids_BN = torch.tensor([request.prompt for request in batch])
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in batch]
    open_rows = set(range(len(batch)))
    while open_rows:
        logits_BV = model(input_ids=ids_BN, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        log_probs_BV = torch.log_softmax(logits_BV / batch[0].temperature, dim=-1)
        drawn = [torch.multinomial(row.exp(), 1, generator=g) for row, g in zip(log_probs_BV, generators)]
        ids_BN = torch.cat([ids_BN, torch.stack(drawn)], dim=1)
        for row in list(open_rows):
            token_ids, log_probs = answers[row]
            token_ids.append(int(drawn[row]))
            log_probs.append(float(log_probs_BV[row, token_ids[-1]]))
            if token_ids[-1] in stop_ids or len(token_ids) == batch[row].max_tokens:
                open_rows.remove(row)
    return answers


class LoopbackWeightTransfer:
    """The `weight_transfer` of a trainer in the server's process: each sync copies the trainer's parameters."""

    def __init__(self, server: LoopbackServer) -> None:
        self._server = server

    def init_weight_transfer(self) -> None:
        """Nothing needs to be set up."""

    def pause(self) -> None:
        """See `LoopbackServer.pause`."""
        self._server.pause()

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy (parameter name, value) pairs."""
        self._server.load_weights(iterator)

    def resume(self) -> None:
        """See `LoopbackServer.resume`."""
        self._server.resume()

    def destroy(self) -> None:
        """Nothing needs to be released."""


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that keeps its connection would hold the server open
    request_queue_size = 128
    loopback: LoopbackServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that are gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _HttpServer

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: stderr belongs to the trainer."""

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            answer = self.server.loopback.answer(method, self.path.partition("?")[0], json.loads(body or b"{}"))
            self._send(200, answer)
        except HttpError as error:
            self._send(error.status, {"error": str(error)})
        except (KeyError, TypeError, ValueError) as error:
            self._send(400, {"error": f"{type(error).__name__}: {error}"})

    def _send(self, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        with suppress(ConnectionError):  # the client may be gone
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
