"""The demo model in the formats that peers prefer, made from the one file that Baton serves, once each.

`llama-quantize` requantises the file, so every format holds the same (dequantised) weights as near as it can. For
peers that read Hugging Face folders the weights are written out in full precision.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.peers.install import PEERS, llama_cpp

DEMO_FORMAT = "Q4_1"
FOLDER = PEERS / "models"


def gguf(file_format: str) -> Path:
    """A GGUF file in a format; `Q4_1` is the demo file itself."""
    from tests.support.oracle import demo_model_path

    if file_format == DEMO_FORMAT:
        return demo_model_path()
    path = FOLDER / f"demo.{file_format}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        quantise = [str(llama_cpp() / "llama-quantize"), "--allow-requantize"]
        quantise += [str(demo_model_path()), str(partial), file_format, "2"]
        done = subprocess.run(quantise, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(quantise)} failed: {done.stderr[-1000:]}")
        partial.rename(path)
    return path


def hf_folder() -> Path:
    """A Hugging Face folder with the file's weights in fp32, its config and its tokenizer."""
    folder = FOLDER / "hf"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_folder(folder)
    return folder


def _write_folder(folder: Path) -> None:
    from safetensors.torch import save_file

    from engine.loading.gguf_file import GgufFile
    from engine.loading.gguf_tokenizer import build_bundle
    from tests.support.oracle import demo_model_path, load_oracle

    oracle = load_oracle()
    with GgufFile(demo_model_path()) as file:
        for name, content in build_bundle(file).items():
            (folder / name).write_bytes(content)
    config = {**oracle.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # The head is tied to the embedding: one tensor serves both.
    state = {n: t.contiguous() for n, t in oracle.state_dict().items() if n != "lm_head.weight"}
    save_file(state, str(folder / "model.safetensors.partial"), metadata={"format": "pt"})
    (folder / "model.safetensors.partial").rename(folder / "model.safetensors")
