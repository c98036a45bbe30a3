"""Hugging Face folders: shards, damage, precision, text files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ConfigError, ModelLoadError
from core.kv_layout import GroupKind
from engine.loading.load import LoadedModel, load_model
from engine.loading.sources import resolve_source
from tests.support.tiny_models import PagedRun, reference_logits, save_folder, tiny_model

IDS = list(range(3, 40))
INDEX = "model.safetensors.index.json"


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(resolve_source(str(folder)), dtype, "expanded")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_folder(tiny_model("llama"), folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


@pytest.fixture
def folder(sharded: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    path.write_text(json.dumps(values))


def logits(folder: Path) -> torch.Tensor:
    return PagedRun(load(folder)).chunked(0, IDS, 64)[0]


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert "\n" not in caught.value.message
    assert str(folder) in caught.value.message
    return caught.value.message


def test_shards_and_a_single_file_are_the_same_model(sharded: Path, tmp_path: Path) -> None:
    single = save_folder(tiny_model("llama"), tmp_path)
    assert len(shards(single)) == 1
    assert load(single).model_digest == load(sharded).model_digest
    expected = reference_logits(tiny_model("llama"), IDS)[-1]
    torch.testing.assert_close(logits(sharded), expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(logits(single), logits(sharded))


def test_digest_follows_content_and_config(folder: Path) -> None:
    before = load(folder).model_digest
    edit_json(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 2e4})
    theta = load(folder).model_digest
    values = load_file(shards(folder)[0])
    name = min(values)
    values[name].view(-1)[0] += 1
    save_file(values, shards(folder)[0], metadata={"format": "pt"})
    assert len({before, theta, load(folder).model_digest}) == 3


@pytest.mark.public_case("B43")
def test_a_missing_shard_is_named(folder: Path) -> None:
    missing = shards(folder)[1]
    missing.unlink()
    assert f"shard {missing.name} is missing" in refusal(folder)


@pytest.mark.public_case("B43")
def test_a_truncated_shard_is_named(folder: Path) -> None:
    shard = shards(folder)[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"{shard.name}: damaged safetensors file" in refusal(folder)


@pytest.mark.public_case("B43")
def test_an_index_that_leaves_the_folder_is_refused(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    shutil.copy(shards(folder)[0], folder.parent / "evil.safetensors")
    weight_map[min(weight_map)] = "../evil.safetensors"
    edit_json(folder / INDEX, weight_map=weight_map)
    assert "'../evil.safetensors' is not a file of the folder" in refusal(folder)


@pytest.mark.public_case("B43")
def test_tensors_come_from_the_file_that_the_index_names(folder: Path) -> None:
    """Junk under a right name in another shard, and a second full copy, change nothing."""
    intact = logits(folder)
    first, last = load_file(shards(folder)[0]), load_file(shards(folder)[-1])
    name = min(first)
    save_file(
        {**last, name: torch.zeros_like(first[name])},
        shards(folder)[-1],
        metadata={"format": "pt"},
    )
    copy = {
        name: torch.zeros_like(values)
        for file in shards(folder)
        for name, values in load_file(file).items()
    }
    save_file(copy, folder / "consolidated.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(folder), intact)


def test_a_shard_without_a_tensor_that_the_index_places_there(folder: Path) -> None:
    values = load_file(shards(folder)[0])
    name = min(values)
    del values[name]
    save_file(values, shards(folder)[0], metadata={"format": "pt"})
    assert f"lacks tensor {name}" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_text_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"{name} is missing" in refusal(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    for shard in shards(folder):
        shard.unlink()
    (folder / INDEX).unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is unknown; known: LlamaForC",
        ),
        ({"architectures": None}, "no architecture is unknown; known: LlamaForCausalLM"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number, got 'wide'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 4}, "num_heads (6) must be a multiple of num_kv_heads (4)"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"num_hidden_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_hidden_layers": 4}, "tensor model.layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 2}, "has no place in LlamaForCausalLM"),
        ({"intermediate_size": 81}, "has shape [80, 48], the config asks for [81, 48]"),
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq' cannot be loaded"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is unknown; known: silu"),
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            "'spiral' is unknown; known: default, linear",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor is missing"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "frequency factors given, 8"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "must be positive"),
    ],
)
def test_an_unusable_config_is_refused_in_one_sentence(
    folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    edit_json(folder / "config.json", **changes)
    assert sentence in refusal(folder)


def test_broken_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json: not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "holds list, not an object" in refusal(folder)


def test_the_spelling_of_transformers_4(folder: Path) -> None:
    """rope_theta beside rope_scaling with `type`, in place of rope_parameters."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    edit_json(
        folder / "config.json",
        rope_parameters=None,
        rope_theta=5000.0,
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    expected = reference_logits(tiny_model("llama", rope_parameters=rope), IDS)[-1]
    torch.testing.assert_close(logits(folder), expected, atol=2e-4, rtol=1e-4)


def test_bundle_holds_the_text_files_as_they_are(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w7"}')
    (folder / "pytorch_model.bin").write_text("never read")
    bundle = load(folder).bundle
    assert set(bundle) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    for name, content in bundle.items():
        assert content == (folder / name).read_bytes()


@pytest.mark.public_case("B45")
@pytest.mark.parametrize(
    ("generation", "tokenizer", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token": "w7"}, (5, 6, 7)),
        ({"eos_token_id": 5}, {"eos_token": {"content": "w5"}}, (5,)),
        ({}, {"eos_token": "w7"}, (2, 7)),
        ({}, {}, (2,)),
        (None, None, (2,)),
        ({"eos_token_id": [5]}, {"eos_token": "unheard of"}, (5,)),
    ],
)
def test_every_end_token_counts(
    folder: Path,
    generation: dict[str, Any] | None,
    tokenizer: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert load(folder).eos_token_ids == expected


def test_stored_precision_is_converted(tmp_path: Path) -> None:
    model = tiny_model("llama").bfloat16()
    loaded = load(save_folder(model, tmp_path))
    rounded = tiny_model("llama")
    rounded.load_state_dict({name: values.float() for name, values in model.state_dict().items()})
    result = PagedRun(loaded).chunked(0, IDS, 64)[0]
    torch.testing.assert_close(result, reference_logits(rounded, IDS)[-1], atol=2e-4, rtol=1e-4)


def test_integer_weights_are_refused(folder: Path) -> None:
    values = load_file(shards(folder)[0])
    name = min(values)
    save_file({**values, name: values[name].int()}, shards(folder)[0], metadata={"format": "pt"})
    assert f"tensor {name} has unsupported type torch.int32" in refusal(folder)


def test_unknown_weight_format_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'packed' is unknown; known: expanded, quantized"):
        load_model(resolve_source(str(folder)), "float32", "packed")


def test_windows_make_a_group_of_their_own_kind(tmp_path: Path) -> None:
    window = load(save_folder(tiny_model("mistral", sliding_window=20), tmp_path / "a")).config
    (group,) = window.kv_groups("float32")
    assert (group.kind, group.window, group.layers) == (GroupKind.SLIDING_WINDOW, 20, (0, 1, 2))
    assert window.group_shapes()[0].window == 20
    full = load(save_folder(tiny_model("llama"), tmp_path / "b")).config
    (group,) = full.kv_groups("bfloat16")
    assert (group.kind, group.window) == (GroupKind.FULL_ATTENTION, None)
    assert (group.num_kv_heads, group.slot.head_dim, group.slot.dtype) == (2, 16, "bfloat16")


def test_layers_of_mixed_windows_keep_everything(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    config = load(save_folder(tiny_model("qwen2", **changes), tmp_path)).config
    assert config.layer_windows == (None, 20, 20)
    (group,) = config.kv_groups("float32")
    assert (group.kind, group.window) == (GroupKind.FULL_ATTENTION, None)
