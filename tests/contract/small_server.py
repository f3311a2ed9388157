"""A server of the test's own that speaks the part of OpenAI's and vLLM's protocol that the `http` engine uses.

`python small_server.py FOLDER PORT`. It knows nothing of rlmq; tokens come from transformers, one at a time.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = sys.argv[1]
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        pages = {"/v1/models": {"data": [{"id": FOLDER}]}, "/is_paused": {"is_paused": False}}
        self.answer(pages.get(self.path, {}), 200 if self.path in pages else 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        path = self.path.partition("?")[0]
        if path == "/v1/completions":
            self.complete(asked)
        elif path == "/collective_rpc" and asked["method"] == "reload_weights":
            with lock:  # tied names are in the file as well
                model.load_state_dict(load_file(f"{asked['kwargs']['weights_path']}/model.safetensors"))
            self.answer({"results": [None]})
        else:
            self.answer({"success": True}, 200 if path in ("/pause", "/resume", "/reset_prefix_cache") else 404)

    def complete(self, asked: dict[str, Any]) -> None:
        if not asked.get("stream"):
            logprobs = next_logprobs(asked["prompt"], asked["temperature"])
            top = logprobs.topk(asked["logprobs"])
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            self.answer({"choices": [{"logprobs": {"top_logprobs": [{str(t): v for t, v in pairs}]}}]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        generator = torch.Generator().manual_seed(asked["seed"])
        tokens: list[int] = []
        reason = None
        try:
            while reason is None:
                with lock:
                    logprobs = next_logprobs([*asked["prompt"], *tokens], asked["temperature"])
                greedy = asked["temperature"] == 0
                drawn = logprobs.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator)
                tokens.append(int(drawn))
                text = tokenizer.decode(tokens)
                stopped = tokens[-1] in asked["stop_token_ids"] or any(s in text for s in asked["stop"] or ())
                reason = "stop" if stopped else "length" if len(tokens) == asked["max_tokens"] else None
                told = {"token_logprobs": [float(logprobs[tokens[-1]])]}
                choice = {"index": 0, "token_ids": tokens[-1:], "logprobs": told, "finish_reason": reason}
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has enough
        self.close_connection = True


@torch.no_grad()
def next_logprobs(ids: list[int], temperature: float) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
    return (logits / (temperature or 1.0)).log_softmax(-1)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
