"""A denoising step of a diffusion transformer: attention by LayerZero, and everything else by one more line.

pip install -e ".[cpu,diffusers]"

The model has Flux's architecture, small and random. A pipeline takes its place as it is: ``lz.optimize(pipe)``.
"""

import time

import diffusers
import torch

import layerzero as lz

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 8}


def step_of(side: int, words: int) -> dict[str, torch.Tensor]:
    """Noise of side x side patches and a text's embedding."""
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(float(side)), torch.arange(float(side)))
    made = {
        "hidden_states": torch.randn(1, side * side, 16),
        "encoder_hidden_states": torch.randn(1, words, 64),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": places,
        "txt_ids": torch.zeros(words, 3),
    }
    return {name: each.to(DEVICE) for name, each in made.items()}


def seconds(model: torch.nn.Module, step: dict[str, torch.Tensor], times: int) -> float:
    """The least of a few runs."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        model(**step)[0].sum().item()
        found.append(time.perf_counter() - started)
    return min(found)


def main(side: int = 16, times: int = 3) -> None:
    """Stock, attention alone, everything."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        **SIZES,
        patch_size=1,
        in_channels=16,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
    )
    model, step = model.to(DEVICE).eval(), step_of(side, 32)
    with torch.no_grad():
        wanted = model(**step)[0]
        print(f"stock           {seconds(model, step, times) * 1e3:8.2f} ms")
        served = lz.register_with_diffusers(model)
        print(f"attention alone {seconds(model, step, times) * 1e3:8.2f} ms: {served}")
        served.undo()
        report = lz.optimize(model)
        print(f"lz.optimize     {seconds(model, step, times) * 1e3:8.2f} ms")
        print(f"off by {(model(**step)[0] - wanted).abs().max() / wanted.abs().max():.1e} of the largest value")
    print(report)


if __name__ == "__main__":
    main()
