"""The GGUF container: values of every type, and each kind of damage refused in one sentence."""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ModelLoadError
from engine.loading.gguf_file import GgufFile


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def header(num_tensors: int, num_values: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)


def tensor_row(name: str, sizes: tuple[int, ...], type_id: int, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + dimensions + struct.pack("<IQ", type_id, offset)


def padded(content: bytes, alignment: int = 32) -> bytes:
    return content + bytes(-len(content) % alignment)


def small_file() -> bytes:
    """One value and two tensors: 4 floats, and one Q8_0 block of 32."""
    rows = tensor_row("a", (4,), 0, 0) + tensor_row("b", (32, 1), 8, 32)
    head = header(2, 1) + text("general.architecture") + struct.pack("<I", 8) + text("llama")
    data = padded(np.arange(4, dtype=np.float32).tobytes()) + bytes(34)
    return padded(head + rows) + data


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 1 << 60)
    writer.add_int64("i64", -(1 << 60))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 🙂")
    writer.add_array("strings", ["a", "", "ß"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, 2.0])
    values = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    writer.add_tensor("matrix", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        found = {key: value for key, value in file.metadata.items() if "." not in key}
        raw = file.raw("matrix").clone()
        assert file.tensors["matrix"].shape == (3, 5)
    assert found == {
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 4_000_000_000,
        "i32": -70000,
        "u64": 1 << 60,
        "i64": -(1 << 60),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "naïve 🙂",
        "strings": ["a", "", "ß"],
        "numbers": [1, 2, 3],
        "floats": [0.5, 2.0],
    }
    assert np.array_equal(raw.numpy().view(np.float32), values)


def test_tensor_data_outlives_the_closed_file(tmp_path: Path) -> None:
    with GgufFile(write(tmp_path / "m.gguf", small_file())) as file:
        raw = file.raw("a")
    assert raw.numpy().view(np.float32).tolist() == [[0.0, 1.0, 2.0, 3.0]]


def edited(position: int, replacement: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:position] + replacement + content[position + len(replacement) :]


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert content.count(old) == 1
        return content.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda content: b"", "it is empty"),
        (edited(0, b"GGML"), "it begins with b'GGML', not b'GGUF'"),
        (edited(4, struct.pack("<I", 9)), "GGUF version 9 is unknown; known: 2, 3"),
        (lambda content: content[:10], "truncated in the header"),
        (lambda content: content[:40], "truncated in a metadata key"),
        (lambda content: content[:-1], "truncated in tensor b: its data ends at"),
        (edited(24, struct.pack("<Q", 1 << 62)), "truncated in a metadata key"),
        (edited(8, struct.pack("<Q", 1 << 40)), "tensor '' has 0 dimensions"),
        (replaced(text("llama"), struct.pack("<Q", 5) + b"\xff\xfe\xff\xfe\xff"), "is not UTF-8"),
        (
            replaced(struct.pack("<I", 8) + text("llama"), struct.pack("<I", 77) + text("llama")),
            "general.architecture has unknown value type 77",
        ),
        (
            replaced(tensor_row("b", (32, 1), 8, 32), tensor_row("b", (32, 1), 29, 32)),
            "tensor b has unsupported type 29; supported: F32, F16",
        ),
        (
            replaced(tensor_row("b", (32, 1), 8, 32), tensor_row("b", (33, 1), 8, 32)),
            "tensor b of shape [1, 33] cannot hold Q8_0 blocks",
        ),
        (
            replaced(tensor_row("b", (32, 1), 8, 32), tensor_row("b", (32, 9), 8, 32)),
            "truncated in tensor b",
        ),
        (
            replaced(tensor_row("b", (32, 1), 8, 32), tensor_row("b", (32, 1), 8, 1 << 40)),
            "truncated in tensor b",
        ),
        (
            replaced(tensor_row("b", (32, 1), 8, 32), tensor_row("a", (32, 1), 8, 32)),
            "tensor a is listed twice",
        ),
        (replaced(tensor_row("a", (4,), 0, 0), tensor_row("a", (0,), 0, 0)), "cannot hold F32"),
    ],
)
def test_damage_is_named(damage: Callable[[bytes], bytes], sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", damage(small_file()))
    with pytest.raises(ModelLoadError) as caught:
        GgufFile(path)
    assert sentence in caught.value.message
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_too_many_dimensions(tmp_path: Path) -> None:
    content = padded(header(1, 0) + tensor_row("a", (1, 1, 1, 1, 1), 0, 0)) + bytes(4)
    with pytest.raises(ModelLoadError, match="tensor 'a' has 5 dimensions"):
        GgufFile(write(tmp_path / "m.gguf", content))


def test_a_string_array_longer_than_the_file(tmp_path: Path) -> None:
    value = text("k") + struct.pack("<IIQ", 9, 8, 5) + text("one") + text("two")
    with pytest.raises(ModelLoadError, match="truncated in k: entry 2 of 5"):
        GgufFile(write(tmp_path / "m.gguf", header(0, 1) + value))


def test_a_bad_alignment(tmp_path: Path) -> None:
    value = text("general.alignment") + struct.pack("<II", 4, 0)
    with pytest.raises(ModelLoadError, match=r"general\.alignment is 0"):
        GgufFile(write(tmp_path / "m.gguf", header(0, 1) + value))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read: No such file"):
        GgufFile(tmp_path / "none.gguf")


@settings(max_examples=200, deadline=None)
@given(
    cut=st.integers(0, len(small_file())),
    flips=st.lists(
        st.tuples(st.integers(0, len(small_file()) - 1), st.integers(1, 255)), max_size=4
    ),
)
def test_any_damage_is_read_or_refused(
    cut: int, flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the bytes, the answer is a file or a ModelLoadError: no other exception, no runaway allocation."""
    content = bytearray(small_file())
    for position, mask in flips:
        content[position] ^= mask
    path = write(tmp_path_factory.mktemp("damage") / "m.gguf", bytes(content[:cut]))
    with suppress(ModelLoadError), GgufFile(path) as file:
        for name in file.tensors:
            file.raw(name)
