"""The part of vLLM's HTTP protocol that TRL calls, answered by a model of transformers on a CPU."""

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest import mock

import requests
import torch
from torch import Tensor, nn
from trl.generation import vllm_client, vllm_generation

EOS = 1


class Handler(BaseHTTPRequestHandler):
    """Answers of vLLM 0.27: what a trainer may ask, and how its weights come."""

    server: "Server"

    def do_GET(self) -> None:
        modes = {"weight_transfer_config": {"backend": "nccl"}, "model_config": {"logprobs_mode": "processed_logprobs"}}
        self.answer({
            "/health": {},
            "/v1/models": {"data": [{"id": "llama"}]},
            "/server_info": {"vllm_config": modes},
            "/get_world_size": {"world_size": 1},
        }[self.path.partition("?")[0]])  # fmt: skip

    def do_POST(self) -> None:
        body, found = self.rfile.read(int(self.headers.get("Content-Length", 0))), {}
        if self.path == "/v1/completions":
            found = {"choices": list(self.server.complete(json.loads(body)))}
        elif self.path == "/tensor":
            self.server.tensors.put(body)
        elif self.path == "/update_weights":
            self.server.update(json.loads(body)["update_info"])
        else:
            self.server.calls.append(self.path)
        self.answer(found)

    def answer(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """A server of one model; ``calls`` has what began, moved and ended updates of its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.tensors, self.calls = model.eval(), queue.Queue[bytes](), list[str]()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def update(self, announced: dict[str, list]) -> None:
        """Take the tensors that were announced, in their order."""
        weights = {}
        for name, dtype, shape in zip(*(announced[field] for field in ("names", "dtype_names", "shapes")), strict=True):
            body = bytearray(self.tensors.get(timeout=60))
            weights[name] = torch.frombuffer(body, dtype=getattr(torch, dtype)).reshape(shape)
        self.model.load_state_dict(weights)
        self.calls.append("/update_weights")

    def complete(self, asked: dict) -> Iterator[dict]:
        """Yield n completions of each prompt: of the likeliest tokens, of the second likeliest, and so on."""
        for prompt in asked["prompt"]:
            for number in range(asked["n"]):
                ids, values = list[int](), list[float]()
                while len(ids) < asked["max_tokens"] and EOS not in ids:
                    with torch.no_grad():
                        logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
                    logits[asked.get("suppress_tokens", [])] = -torch.inf
                    best = logits.log_softmax(-1).topk(number + 1)
                    ids.append(int(best.indices[number]))
                    values.append(float(best.values[number]))
                tokens = [f"token_id:{token}" for token in ids]
                top = [{token: value} for token, value in zip(tokens, values, strict=True)]
                logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": top}
                yield {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}


@contextmanager
def serving(model: nn.Module) -> Iterator[Server]:
    """Serve a model by threads of this process."""
    with Server(model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def connect(client: vllm_client.VLLMClient, device: object) -> None:
    client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": {}})
    client.communicator = client.base_url


def send(iterator: Iterator[tuple[str, Tensor]], trainer_args: SimpleNamespace) -> None:
    for _, tensor in iterator:
        requests.post(f"{trainer_args.group}/tensor", data=tensor.detach().numpy().tobytes()).raise_for_status()


@contextmanager
def without_vllm() -> Iterator[None]:
    """Let TRL's client do without vLLM's package, whose NCCL needs GPUs: tensors are sent over HTTP."""
    with (
        mock.patch.object(vllm_generation, "is_vllm_available", lambda *_: True),
        mock.patch.object(vllm_client.VLLMClient, "init_communicator", connect),
        mock.patch.multiple(
            vllm_client,
            create=True,
            is_vllm_available=lambda *_: True,
            _HAS_STATEFUL_TRAINER_ENGINE=False,
            NCCLWeightTransferEngine=SimpleNamespace(trainer_send_weights=send),
            NCCLTrainerSendWeightsArgs=SimpleNamespace,
        ),
    ):
        yield
