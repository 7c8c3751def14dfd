"""What choosing kernels together gains over choosing each for itself, over the layers of models.

    python benchmarks/together.py --dtype bfloat16 --budget-s 120
    python benchmarks/together.py --device cuda llama vit

Two layers of models of ``benchmarks/optimize.py``, after ``lz.optimize``. ``lz.solve`` with ``plan_mode`` measures each
call, then runs of the model with other kernels in one place and in two. A row gives the last comparison, in turn in one
process: a run with each kernel chosen for itself over one with the plan's; 1 where they are the same. *Conversions*
are pairs of kernels that take more or less together, in all rounds, than next to the first choice.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from typing import Any

import optimize
import torch
import transformers
from torch.utils import _pytree as pytree

import layerzero as lz
from layerzero.serving import joint_times

MODELS = {
    "minilm": "8x64", "llama": "prompt 256", "gpt2": "prompt 256", "vit": "224", "dit": "32x32", "whisper": "30 s",
}  # fmt: skip
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")


def small(name: str, dtype: torch.dtype, device: str) -> Any:
    """A model of two layers."""
    torch.manual_seed(0)
    model = optimize.WORKLOADS[name].make().eval().to(device, dtype)
    for module in model.modules():
        for child, layers in module._modules.items():
            if isinstance(layers, torch.nn.ModuleList) and len({type(each) for each in layers}) == 1:
                module._modules[child] = layers[:2]
    for count in COUNTS:
        if getattr(model.config, count, 0) and not hasattr(model.config, "num_embeds_ada_norm"):
            setattr(model.config, count, 2)
    return model


class There:
    """A model whose inputs are moved to where it is."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        given, named = pytree.tree_map_only(torch.Tensor, lambda each: each.to(self.model.device), (given, named))
        return self.model(*given, **named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget-s", type=float, default=120.0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    lz.configure(plan_mode=True)
    converted: list[int] = []
    found = joint_times.shortest

    def counting(steps: Any) -> Any:
        pairs = [us for step in steps for each in step.conversions_us.values() for us in each.values()]
        converted.append(sum(us != 0 for us in pairs))
        return found(steps)

    joint_times.shortest = counting
    ratios = []
    for name in asked.models:
        model = small(name, getattr(torch, asked.dtype), asked.device)
        run, there = optimize.WORKLOADS[name].runs[MODELS[name]], There(model)
        with torch.no_grad():
            lz.optimize(model)
            plan = lz.solve(model, lambda run=run, model=there: run.call(run.prepare(model)), budget_s=asked.budget_s)
        (joint,) = plan.solved.joint
        ratio = joint.alone_us / joint.together_us if joint.together_us else 1.0
        ratios.append(ratio)
        taken = f"{joint.alone_us / 1e3:8.1f} {joint.together_us / 1e3:8.1f} ms {ratio:6.3f}"
        print(f"{name:8} {taken}  {sum(converted)} conversions  {joint.note}", flush=True)
        for changed in joint.changed:
            choice = plan.choices[changed]
            print(f"    {changed.partition(' ')[0]} -> {choice.kernel}: {choice.why}", flush=True)
        converted.clear()
    mean = statistics.geometric_mean(ratios)
    print(f"{len(ratios)} models: {mean:.3f} in the geometric mean, {min(ratios):.3f} at worst")


if __name__ == "__main__":
    main()
