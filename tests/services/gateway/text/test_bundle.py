"""A bundle's files become tokenizer, template and defaults; what is wrong with them is named."""

import json

import pytest

from core.errors import ContextTooLong, InvalidRequest, ModelLoadError
from services.gateway.text.bundle import TextBundle
from tests.support.text_bundles import CHAT_TEMPLATE, demo_bundle, small_bundle


def changed(**files: object) -> dict[str, bytes]:
    named = {name.replace("__", "."): json.dumps(value).encode() for name, value in files.items()}
    return small_bundle() | named


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "tokenizer.json"),
        (small_bundle() | {"tokenizer.json": b"{"}, "tokenizer.json"),
        (small_bundle() | {"tokenizer.json": b'{"model": 1}'}, "tokenizer.json"),
        (small_bundle() | {"tokenizer_config.json": b"[]"}, "tokenizer_config.json"),
        (small_bundle() | {"generation_config.json": b"nan"}, "generation_config.json"),
    ],
)
def test_a_bad_file_is_named(files, named):
    with pytest.raises(ModelLoadError, match=named):
        TextBundle(files)


def test_generation_defaults_are_read():
    bundle = TextBundle(changed(generation_config__json={"temperature": 0.6, "top_k": 20}))
    assert (bundle.defaults.temperature, bundle.defaults.top_k) == (0.6, 20)
    assert bundle.defaults.top_p is None


def test_a_template_file_wins_over_the_config():
    bundle = TextBundle(small_bundle() | {"chat_template.jinja": b"{{ messages[0].content }}"})
    ids = bundle.encode_chat([{"role": "user", "content": "hi"}])
    assert bundle.decode(ids) == "hi"


def test_of_named_templates_the_default_is_taken():
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": CHAT_TEMPLATE},
    ]
    bundle = TextBundle(changed(tokenizer_config__json={"chat_template": named}))
    assert "<|im_start|>" in bundle.decode(bundle.encode_chat([{"role": "user", "content": "x"}]))


def test_a_model_without_a_template_refuses_chat():
    bundle = TextBundle(changed(tokenizer_config__json={}))
    with pytest.raises(InvalidRequest, match="no chat template"):
        bundle.encode_chat([{"role": "user", "content": "hi"}])


def test_bos_is_added_where_the_model_wants_it():
    config = {"add_bos_token": True, "bos_token": {"content": "<|im_start|>"}}
    bundle = TextBundle(changed(tokenizer_config__json=config))
    bos = bundle.tokenizer.token_to_id("<|im_start|>")
    assert bundle.encode("one", add_special_tokens=True)[0] == bos
    assert bundle.encode("<|im_start|>one", add_special_tokens=True).count(bos) == 1
    assert bundle.encode("one", add_special_tokens=False)[0] != bos
    assert bundle.encode("", add_special_tokens=True) == [bos]


def test_a_text_that_cannot_fit_is_refused_without_being_tokenised():
    bundle = TextBundle(small_bundle())
    longest = bundle.vocabulary.longest_token_bytes
    bundle.refuse_if_too_long("x" * (10 * longest), 10)
    with pytest.raises(ContextTooLong, match="at least 11 input tokens"):
        bundle.refuse_if_too_long("x" * (11 * longest), 10)


def test_the_demo_model_speaks_chatml():
    bundle = TextBundle(demo_bundle())
    ids = bundle.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    text = bundle.decode(ids)
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert bundle.encode(text, add_special_tokens=False) == ids
