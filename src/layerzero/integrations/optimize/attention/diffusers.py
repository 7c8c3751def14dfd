"""Models and pipelines of diffusers: which of their attentions ``lz.optimize`` takes, and what it leaves there."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import LayerNorm, Module
from torch.nn.functional import scaled_dot_product_attention

import layerzero as lz
from layerzero.core.errors import in_short
from layerzero.engine.scopes import holding
from layerzero.integrations.optimize.attention.transformers import Search, outermost, verdict
from layerzero.integrations.optimize.swaps.candidate import distance
from layerzero.integrations.optimize.swaps.swap import Together, trying
from layerzero.integrations.optimize.times.report import BY_CALL, NO_TIME, Left, Replaced
from layerzero.integrations.optimize.times.workload import RUN


class Pipeline:
    """A pipeline of diffusers with all its models as one module, called with the same noise each time.

    Attributes:
        model: the models, by their names in the pipeline.
    """

    def __init__(self, pipe: Any) -> None:
        from layerzero.integrations.diffusers import module_of

        self.pipe, self.model = pipe, module_of(pipe)
        names = inspect.signature(pipe.__call__).parameters
        self._draws = "generator" in names or any(each.kind is each.VAR_KEYWORD for each in names.values())

    def __call__(self, *given: Any, **named: Any) -> Any:
        if not self._draws:  # as FluxPriorRedux
            return self.pipe(*given, **named)
        generators: Any = named.get("generator") or torch.Generator().manual_seed(0)
        several = isinstance(generators, list)
        copies = [each.clone_state() for each in (generators if several else [generators])]
        return self.pipe(*given, **named | {"generator": copies if several else copies[0]})


def whole(model: Any) -> Any:
    """A pipeline of diffusers as what has one module; anything else as it is."""
    library = sys.modules.get("diffusers")
    return Pipeline(model) if library is not None and isinstance(model, library.DiffusionPipeline) else model


class AttentionOf(Together):
    """The attentions of one model, on or off together.

    Attributes:
        path, model: the model and where it lies.
        left: how many of its attentions are left, by the reason.
    """

    def __init__(self, path: str, model: Module) -> None:
        from layerzero.integrations.diffusers import ProcessorSwap, attentions_of, backend_of_diffusers

        self.path, self.model = path, model
        backend = backend_of_diffusers()
        self.left: Counter[str] = Counter()
        self._swaps: list[ProcessorSwap] = []
        for _, module, why in attentions_of(model):
            if why:
                self.left[why] += 1
            else:
                self._swaps.append(ProcessorSwap(module, backend))
        super().__init__(self._swaps)

    def examples(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Random queries, keys and values (2, H, 5 or 7, D) for each size of heads, a view of BSHD."""
        sizes = set()
        for swap in self._swaps:
            module: Any = swap.module
            heads, product = getattr(module, "heads", None), getattr(module, "to_q", None)
            if heads and isinstance(product, torch.nn.Linear):
                weight = product.weight
                sizes.add((heads, product.out_features // heads, weight.dtype, weight.device))
        generator = torch.Generator().manual_seed(0)
        for heads, size, dtype, device in sorted(sizes, key=str):
            made = (
                torch.randn((2, length, heads, size), generator=generator, dtype=torch.float32, device="cpu")
                for length in (5, 7, 7)
            )
            query, key, value = (each.to(device, dtype).transpose(1, 2) for each in made)
            yield query, key, value


def find_attention(search: Search) -> Iterator[Replaced | Left]:
    """The attentions that gave what torch's function gives, on the inputs or on random ones.

    Left are others, and the norms that no module of its own computes.
    """
    run = None if search.workload is None else search.workload.run
    for path, model in outermost(search.root, "diffusers", "ModelMixin"):
        name = type(model).__name__
        try:
            found = AttentionOf(path, model)
        except ImportError as untested:  # a version whose private registry was not tried
            yield Left(path, name, f"attention: {untested}")
            continue
        yield from (Left(path, name, f"{count} attentions: {why}") for why, count in found.left.items())
        yield from (Left(path, name, why) for why in _unserved(model))
        if not found:
            continue
        step = f"comparing the attention of {name}"
        if not search.time.allows(step, step if run is None else RUN):
            yield Left(path, name, f"attention: {NO_TIME}")
            continue
        error, why = _compared(found, run)
        if why:
            yield Left(path, name, f"attention: {why}")
        else:
            yield Replaced(path, name, "attention", "lz.attention", BY_CALL, error, found)


def _unserved(model: Module) -> Iterator[str]:
    """Why norms that are no module with weights are left."""
    bare = sum(isinstance(each, LayerNorm) and not any(True for _ in each.parameters()) for each in model.modules())
    if bare:
        yield f"{bare} layer norms without a weight, whose scale and shift come with the step: torch's kernel runs them"


def find_rotations(search: Search) -> Iterator[Replaced | Left]:
    """The rotations of processors that gave what their own functions give on random input."""
    from layerzero.integrations.diffusers_rotary import RotationOf

    for path, model in outermost(search.root, "diffusers", "ModelMixin"):
        name = type(model).__name__
        step = f"comparing the rotations of {name}"
        if not search.time.allows(step, step):
            yield Left(path, name, f"rotations: {NO_TIME}")
            continue
        found = RotationOf(path, model)
        for why, count in found.left.items():
            yield Left(path, name, f"rotations of {count} attentions: {why}")
        if found:
            yield Replaced(path, name, "rotation", "lz.rope_", found.kernel, found.error, found)


def _compared(found: AttentionOf, run: Callable[[], Any] | None) -> tuple[float | None, str]:
    """The largest difference from torch's function, and what is wrong, empty where nothing."""
    from layerzero.integrations.diffusers import COMPARED

    errors: list[tuple[float, torch.dtype, str]] = []

    def compare(ours: Tensor, theirs: Tensor) -> None:
        errors.append((distance(ours, theirs), theirs.dtype, "it"))

    if run is None:
        if any(each.is_meta for each in found.model.parameters()):
            return None, "its weights are on the meta device and have no values; it is compared with inputs="
        try:
            for query, key, value in found.examples():
                seen = torch.ones(2, 1, 5, 7, dtype=torch.bool, device=query.device)
                seen[0, :, :, 4:] = False
                for mask in (None, seen):
                    ours = lz.scaled_dot_product_attention(query, key, value, mask)
                    compare(ours, scaled_dot_product_attention(query, key, value, mask))
        except (RuntimeError, TypeError) as raised:  # weights in a dtype that nothing computes in, as float8
            return None, f"it could not be compared without inputs= ({in_short(raised)})"
    else:
        with holding(COMPARED, compare), trying(found):
            run()
        if not errors:
            return None, "no attention was computed on these inputs"
    return verdict(errors)
