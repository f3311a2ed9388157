"""Small random language models that read and write bytes: made on the spot, in about a second, and cached.

Too small to know anything, large enough to learn a habit: 2 layers, hidden size 64 (or 576), one token per byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rlmq.common.model_cache import make_once

SEED = 0
# Ids 0 to 255 are the bytes, in the order of ByteLevel's symbols; these follow.
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def folder() -> str:
    """Path of the model's folder; another version of this file makes another folder."""
    return _made("tiny", hidden=64, intermediate=128, heads=4, kv_heads=2)


def wide() -> str:
    """The same with hidden size 576 and SmolLM2-135M's heads: wide enough that the order of sums changes bits."""
    return _made("wide", hidden=576, intermediate=1536, heads=9, kv_heads=3)


def long() -> str:
    """The tiny one with room for 2048 tokens."""
    return _made("long", hidden=64, intermediate=128, heads=4, kv_heads=2, context=2048)


def _made(name: str, **shape: int) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return str(make_once(f"{name}-{digest}", partial(_write, shape=shape)))


def _write(target: Path, *, shape: Mapping[str, int]) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    transformers.logging.disable_progress_bar()
    pieces = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=2,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=shape.get("context", 512),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    # A generator of its own: the caller's random state is not touched.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
