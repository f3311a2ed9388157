"""A Hugging Face model that is named now and built in the process that uses it first."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CHAT_TOKENS = 32


@dataclass(slots=True)
class HfModel:
    """What `load_hf_model` returns: a name until it is used.

    `folder` is where relative names are looked up; the node's worker sets it to the recipe's.
    """

    name: str
    device_map: str = "auto"
    folder: Path = field(default_factory=Path.cwd)
    _built: tuple[Any, Any] | None = field(default=None, init=False, repr=False)

    @property
    def built(self) -> bool:
        """Whether this process holds its weights."""
        return self._built is not None

    @property
    def model(self) -> Any:
        """The model, built at the first use. Raises UsageError: it is not there."""
        return self._parts()[0]

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._parts()[1]

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The model's forward, without gradients."""
        import torch

        with torch.inference_mode():
            return self.model(*args, **named)

    def chat(self, prompt: str, response: str | None = None, *, max_tokens: int = _CHAT_TOKENS) -> str:
        """What the model answers to a prompt, or to a prompt and its response, greedily.

        Without a chat template the texts are put together, a line each.
        """
        import torch

        tokenizer, model = self.tokenizer, self.model
        turns = [("user", prompt), *([("assistant", response)] if response is not None else [])]
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": role, "content": text} for role, text in turns]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode("\n".join(text for _, text in turns) + "\n")
        given = torch.tensor([ids], device=model.device)
        with torch.inference_mode():
            answer = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=max_tokens, do_sample=False
            )
        return str(tokenizer.decode(answer[0, len(ids) :], skip_special_tokens=True)).strip()

    def _parts(self) -> tuple[Any, Any]:
        if self._built is None:
            import torch

            from rlmq.common.models import load_model, load_tokenizer, resolve_model

            folder = resolve_model(self.name, self.folder)
            auto = "cuda" if torch.cuda.is_available() else "cpu"
            device = auto if self.device_map == "auto" else self.device_map
            model = load_model(folder, torch.bfloat16 if device.startswith("cuda") else torch.float32)
            self._built = model.to(device).eval(), load_tokenizer(folder)
        return self._built


def load_hf_model(name: str, device_map: str = "auto") -> HfModel:
    """Name a model; nothing is loaded before it is used, which nodes do in their own workers.

    Args:
        name: hub id, folder, or `file.py:function` returning a folder.
        device_map: `auto` (the GPU where there is one), or a device (`cpu`, `cuda:1`).
    """
    return HfModel(name, device_map)
