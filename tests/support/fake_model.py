"""What a fake engine says of its model: layout, identity, and a bundle with a tokenizer of a thousand words."""

from __future__ import annotations

import json

from core.kv_identity import GroupShape, KVIdentity
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat

LAYOUT = KVLayout(
    16, (KVGroup(GroupKind.FULL_ATTENTION, (0, 1), 2, SlotFormat("plain", "float32", 8)),)
)
IDENTITY = KVIdentity("fake", "float32", "float32", "", (GroupShape("full_attention", 2, 2, 8),))
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
BUNDLE = {
    "tokenizer.json": json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {f"t{number}": number for number in range(1000)},
                "unk_token": "t0",
            },
        }
    ).encode(),
    "tokenizer_config.json": json.dumps({"chat_template": CHAT_TEMPLATE}).encode(),
    "generation_config.json": b'{"eos_token_id": 2}',
    "large": bytes(1_400_000),
    "empty": b"",
}
