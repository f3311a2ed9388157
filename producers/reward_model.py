"""A reward model: a sequence classifier that reads prompt and response as text, with its own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmq.common.errors import UsageError
from rlmq.common.user_code import find_beside, is_spec, load_function
from rlmq.producers.reward_kinds import text_of
from rlmq.producers.reward_values import NoVerdict


class RewardModel:
    """Scores rows in batches of a token budget; torch is loaded here, in the scorer's own process.

    The text is the tokenizer's chat template over the prompt's messages and the response; without a template it is
    prompt and response in a row.

    Args:
        source: a Hugging Face folder or hub id, or `file.py:builder`, a function that returns `(model, tokenizer)`.
        label: which of the classifier's outputs counts.
        batch_tokens: most tokens of a batch, padding included.
        device: where it runs; default: the accelerator if there is one.
        dtype: its numbers, for a folder.

    Raises:
        UsageError: no such model, or a label that it does not have.
    """

    per_row = False

    def __init__(
        self,
        source: str,
        *,
        folder: Path,
        label: int = 0,
        batch_tokens: int = 16384,
        device: str | None = None,
        dtype: str = "float32",
    ) -> None:
        import torch

        self._subject = f"reward model {source}"
        if is_spec(source):
            self._model, self._tokenizer = load_function(source, folder, subject=self._subject)()
        else:
            self._model, self._tokenizer = self._load(source, folder, dtype)
        labels = int(getattr(self._model.config, "num_labels", 1))
        if not 0 <= label < labels:
            raise UsageError(f"{self._subject}, label", got=str(label), expected=f"0 to {labels - 1}")
        self._label, self._batch_tokens = label, batch_tokens
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model.to(self._device).eval()
        pad = self._tokenizer.pad_token_id
        self._pad: int = pad if pad is not None else self._tokenizer.eos_token_id or 0
        self._greatest = int(getattr(self._model.config, "max_position_embeddings", 0) or 0)

    def _load(self, source: str, folder: Path, dtype: str) -> tuple[Any, Any]:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        near = source.startswith((".", "/", "~")) or (folder / source).exists()
        place = str(find_beside(source, folder, subject=self._subject)) if near else source
        try:
            # A head that the folder lacks would be random: its scores would say nothing.
            model, told = AutoModelForSequenceClassification.from_pretrained(
                place, dtype=dtype, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError) as error:
            raise UsageError(
                self._subject, got=str(error), expected="a sequence classifier with tokenizer"
            ) from error
        if told["missing_keys"]:
            got = f"no weights for {', '.join(sorted(told['missing_keys']))}"
            raise UsageError(self._subject, got=got, expected="a sequence classifier that was trained")
        return model, tokenizer

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[Any]:
        """One score per row; a text longer than the model's positions has no verdict."""
        import torch

        texts = [
            self._ids(prompt, text_of(completion)) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        values: list[Any] = [
            NoVerdict(f"{self._subject}: {len(ids)} tokens, more than its {self._greatest} positions")
            for ids in texts
        ]
        fitting = [n for n, ids in enumerate(texts) if not self._greatest or len(ids) <= self._greatest]
        with torch.inference_mode():
            for batch in batches([len(texts[n]) for n in fitting], self._batch_tokens):
                members = [fitting[n] for n in batch]
                for member, score in zip(members, self._scores([texts[n] for n in members]), strict=True):
                    values[member] = score
        return values

    def _ids(self, prompt: Any, response: str) -> list[int]:
        if self._tokenizer.chat_template is None:
            told = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
            return [int(i) for i in self._tokenizer(told + response)["input_ids"]]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages = [*asked, {"role": "assistant", "content": response}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Padded on the right, where the mask hides it; the last token that is none of padding is what counts."""
        import torch

        width = max(map(len, texts))
        ids = torch.tensor([[*text, *[self._pad] * (width - len(text))] for text in texts], device=self._device)
        mask = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in texts], device=self._device)
        # A pad token that also ends texts must not be taken for padding: equal lengths need no pad id.
        self._model.config.pad_token_id = self._pad
        logits = self._model(input_ids=ids, attention_mask=mask).logits
        return [float(value) for value in logits[:, self._label].double().tolist()]


def batches(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Positions in batches of near lengths, each of at most `most_tokens` with padding, or of one text."""
    made: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda n: lengths[n]):
        if made and lengths[position] * (len(made[-1]) + 1) <= most_tokens:
            made[-1].append(position)
        else:
            made.append([position])
    return made
