"""A server that answers as vLLM's does, with a model of transformers: for tests without vLLM."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from common.sampling.vllm.weights import EXTENSION
from common.sampling.vllm.worker import unpacked

VLLM_CONFIG = {
    "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 1024},
    "parallel_config": {"worker_extension_cls": EXTENSION},
    "weight_transfer_config": {"backend": "ipc"},
}


class StandIn:
    """Samples with the weights that were sent.

    Attributes:
        calls: Paths of the calls so far, with the method that the workers were asked for.
        answers: By path: what makes the answer of its usual one.
        breaks_at: The request for completions, counted from 1, from which on none is answered.
    """

    def __init__(self, lm: Any) -> None:
        """Serve from a thread, with a model that is first made zero."""
        self.lm = lm
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.zero_()
        self.calls: list[str] = []
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.breaks_at = 0
        self.lock = threading.Lock()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with stand_in.lock:
                    reply = stand_in.answer(self.path.split("?")[0], json.loads(body or "{}"))
                if reply is None:
                    self.close_connection = True
                    return
                text = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Any) -> Any:
        self.calls.append(body["method"] if path == "/collective_rpc" else path)
        usual: Any = b""
        if path == "/inference/v1/generate":
            if self.breaks_at and self.calls.count(path) >= self.breaks_at:
                return None
            usual = {"choices": self.generate(body["token_ids"], body["sampling_params"])}
        elif path == "/collective_rpc" and body["method"] == "load_packed":
            with torch.no_grad():
                for name, weight in map(unpacked, body["kwargs"]["weights"]):
                    self.lm.get_parameter(name).copy_(weight)
        elif path == "/server_info":
            usual = {"vllm_config": VLLM_CONFIG}
        elif path == "/reset_prefix_cache":
            usual = {"success": True}
        return self.answers.get(path, lambda usual: usual)(usual)

    @torch.no_grad()
    def generate(self, prompt: list[int], wish: dict[str, Any]) -> list[dict[str, Any]]:
        """Completions of a prompt; unlike vLLM's, one token after the other."""
        choices, temperature = [], wish["temperature"]
        for index in range(wish["n"]):
            noise = torch.Generator().manual_seed(wish["seed"] + index)
            ids: list[int] = []
            logps: list[float] = []
            while len(ids) < wish["max_tokens"] and not set(ids) & set(wish["stop_token_ids"]):
                logits = self.lm(torch.tensor([prompt + ids])).logits[0, -1]
                scores = torch.log_softmax(logits / (temperature or 1.0), -1)
                drawn = scores.exp().multinomial(1, generator=noise)
                ids.append(int(drawn if temperature else scores.argmax()))
                logps.append(float(scores[ids[-1]]))
            content = [{"token": "", "logprob": logp} for logp in logps]
            choices.append({"index": index, "token_ids": ids, "logprobs": {"content": content}})
        return choices[::-1]  # in no order

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
