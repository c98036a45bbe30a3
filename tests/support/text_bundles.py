"""Model bundles for tests of the gateway: a small byte-level tokenizer with a chat template, and the demo model's."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = "<|im_end|>"


@cache
def small_bundle(
    *, chat_template: str = CHAT_TEMPLATE, generation_config: str = '{"eos_token_id": 2}'
) -> dict[str, bytes]:
    """A tokenizer of a few hundred tokens that covers every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    words = "the capital of France is Paris one two three four system user assistant count 歪 ไทย é"
    tokenizer.train_from_iterator([words] * 4, trainer)
    tokenizer.add_tokens(["</think>"])
    config = {"eos_token": EOS, "chat_template": chat_template}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": generation_config.encode(),
    }


@cache
def small_tokenizer() -> Tokenizer:
    """The tokenizer of `small_bundle`."""
    return Tokenizer.from_str(small_bundle()["tokenizer.json"].decode())


@cache
def demo_bundle() -> dict[str, bytes]:
    """The bundle of the demo model, as its workers hand it out."""
    from engine.loading.gguf_file import GgufFile
    from engine.loading.gguf_tokenizer import build_bundle
    from services.cli import demo_model

    return build_bundle(GgufFile(demo_model.path()))
