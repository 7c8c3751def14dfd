"""Whole encoder layers of Transformers' models, as decoder layers are found: by their parts, and believed by values.

An encoder layer has one attention without cache and rotation, two products or three with an activation, and two norms,
wherever they lie within it: BERT's stand in submodules three deep, CLIP's and Whisper's in the layer itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Identity, Linear, Module

import layerzero as lz
from layerzero.core.arguments import signature_of
from layerzero.integrations.optimize.attention.transformers import NAME, AttentionSwap, Seen, seeing
from layerzero.integrations.optimize.layers.layer import Heads, Layer, forward, says_anything
from layerzero.integrations.optimize.modules.norms import Normed, normed
from layerzero.integrations.optimize.modules.products import Block, activations_of, orders
from layerzero.integrations.optimize.swaps.candidate import ADAPTERS, MORE, watching
from layerzero.integrations.optimize.swaps.joined_codes import following_weights
from layerzero.integrations.optimize.swaps.reads import code_of
from layerzero.integrations.optimize.swaps.swap import weight_of
from layerzero.integrations.optimize.swaps.weights import is_plain, wants_packed
from layerzero.integrations.optimize.times.workload import example_run
from layerzero.integrations.transformers_patches import ROW_ARGUMENTS

CALLS = "lz.qkv_linear, lz.attention, lz.linear, lz.mlp, lz.layer_norm"
"""What a layer calls, in short."""

TOKENS = 7
"""Of an example at most so many are tried: a picture of 224 x 224 has 197, and the first two of a row are hidden."""

_PLAIN = (bool, int, float, str)


class Between(Block):
    """A block whose activation may be a module.

    Attributes:
        function: the module; None for an activation that kernels know.
    """

    def __init__(
        self, names: tuple[str, ...], children: dict[str, Module], activation: str | Module, *, pack: bool
    ) -> None:
        named = activation if isinstance(activation, str) else type(activation).__name__
        super().__init__(names, children, named, pack=pack)
        self.function = activation if isinstance(activation, Module) else None

    @following_weights
    def compute(self, rows: Tensor) -> Any:
        if self.function is None:
            return super().compute(rows)
        packed, (up, down) = self.forms_for(rows), self.products
        wide = lz.linear(rows, weight_of(up), up._parameters["bias"], packed=packed[0])
        return lz.linear(self.function(wide), weight_of(down), down._parameters["bias"], packed=packed[1])


class Encoder(Layer):
    """An encoder layer.

    Attributes:
        block: its feed-forward block.
        after: whether a norm follows the sum of a part's input and output, as in BERT; else it comes before a part.
        scales: modules whose vector multiplies what attention and block give, or none.
        given: what a layer gets besides hidden states and mask, in every call.
    """

    block: Between

    def __init__(
        self,
        heads: Heads,
        block: Between,
        norms: tuple[Normed, Normed],
        scales: tuple[Module, ...],
        order: tuple[str, ...],
        given: Mapping[str, Any],
        *,
        after: bool,
    ) -> None:
        first, second = norms
        super().__init__(heads, block, (None, first, None, second) if after else (first, None, second, None), scales)
        self.after, self.pair, self.scales, self.order, self.given = after, norms, scales, order, dict(given)

    def takes(self, named: Mapping[str, Any]) -> bool:
        for name, value in self.given.items():
            if value is not None and (type(got := named.get(name)) is not type(value) or got != value):
                return False
        for name, value in named.items():
            if not says_anything(name, value) or (name == "attention_mask" and value.ndim == 4):
                continue
            if name in ROW_ARGUMENTS and self.heads.setting == NAME:  # other functions know no packed row
                continue
            if name not in self.given or type(value) not in _PLAIN:  # a mask was given, but of another shape
                return False
        return True

    def compute(self, hidden: Tensor, named: Mapping[str, Any]) -> Tensor:
        one, two = self.pair
        scales = self.scales
        rows = hidden if self.after else one.alone(hidden)
        added = self.heads.attend(rows, named)
        if self.after:
            rows = total = one.of_sum(hidden, added)
        elif scales:
            total = torch.addcmul(hidden, added, _scale(scales[0]))
            rows = two.alone(total)
        else:
            rows, total = two.of_sum(hidden, added), added
        output: Tensor = self.block.compute(rows)
        if self.after:
            return two.of_sum(total, output)
        return torch.addcmul(total, output, _scale(scales[1])) if scales else output.add_(total)


def _scale(module: Module) -> Tensor:
    (scale,) = module._parameters.values()
    assert scale is not None
    return scale


@dataclass
class Parts:
    """What an encoder layer is made of, by name.

    Attributes:
        module: the layer.
        products, norms, scales: its parts with weights.
        activation: of its block, by name or as a module of its own.
        order: names of the arguments of its forward, behind the hidden states.
    """

    module: Module
    products: dict[str, Linear]
    norms: dict[str, Normed]
    scales: dict[str, Module]
    activation: str | Module
    order: tuple[str, ...]

    calls = CALLS
    forward = staticmethod(forward)
    still = nullcontext

    def cache(self) -> None:
        """No cache of an encoder."""

    def forms(
        self, calls: Sequence[tuple[Tensor, Mapping[str, Any]]], seen: Mapping[int, Seen], of: str
    ) -> list[tuple[tuple[Any, ...], Callable[[], Layer]]] | str:
        """Every way in which a layer could compute with these parts, the likeliest first; or why there is none."""
        attending = {path: each for path, each in self.module.named_modules() if id(each) in seen}
        if len(attending) != 1 or not calls:
            return "the example did not run it with one attention"
        ((path, module),) = attending.items()
        given = _given(calls)
        if isinstance(given, str):
            return given
        if (
            weight_of(next(iter(self.products.values()))).dtype is torch.float16
            and "clamp" in code_of(type(self.module))[0]
        ):
            return "it clamps what it computes in float16"
        got = seen[id(module)]
        inner = [name for name in self.products if name.startswith(f"{path}." if path else "")]

        def made(
            names: tuple[str, ...], block: tuple[str, ...], norms: Any, scales: Any, after: bool, scaling: float
        ) -> Encoder:
            products = tuple(self.products[name] for name in names)
            pack = wants_packed(weight_of(products[-1]))
            told = {**got.told, "scaling": got.told["scaling"] * scaling} if scaling != 1.0 else got.told
            heads = Heads(module, products, got.sizes, None, told, of=of, pack=pack)
            between = Between(block, dict(self.products), self.activation, pack=pack)
            first, second = (self.norms[name] for name in norms)
            scaled = tuple(self.scales[name] for name in scales)
            return Encoder(heads, between, (first, second), scaled, self.order, given, after=after)

        found: list[tuple[tuple[Any, ...], Callable[[], Layer]]]
        found = [(key, functools.partial(made, *key)) for key in self._orders(inner, got)]
        return found or why_formless(self.module)

    def _orders(self, inner: list[str], got: Seen) -> Iterator[tuple[Any, ...]]:
        """Names of the products of attention and block, of norms and scales, and where norms stand."""
        heads, kv_heads, width = got.sizes
        apart = (heads * width, kv_heads * width, kv_heads * width)
        first: list[tuple[tuple[str, ...], tuple[int, ...]]]
        first = [(names, apart) for names in sorted(itertools.permutations(inner, 3), key=_unlike)]
        first += [((name,), (sum(apart),)) for name in inner]
        scalings = (1.0, width**-0.5) if got.told.get("scaling") == 1.0 else (1.0,)
        for names, sizes in first:
            if tuple(weight_of(self.products[name]).shape[0] for name in names) != sizes:
                continue
            within = [name for name in inner if name not in names]
            for last in within or [name for name in self.products if name not in names]:
                if weight_of(self.products[last]).shape[1] != heads * width or len(within) > 1:
                    continue
                rest = {name: each for name, each in self.products.items() if name not in {*names, last}}
                for block, norms, scales, after, scaling in itertools.product(
                    orders(rest) if len(rest) == 2 or isinstance(self.activation, str) else (),
                    itertools.permutations(self.norms),
                    itertools.permutations(self.scales),
                    (False, True) if not self.scales else (False,),
                    scalings,
                ):
                    yield (*names, last), block, norms, scales, after, scaling


def _unlike(names: tuple[str, ...]) -> int:
    """How many of three names do not begin as queries, keys and values are called: these orders are tried later."""
    return sum(name.rpartition(".")[2][0] != letter for name, letter in zip(names, "qkv", strict=True))


def _given(calls: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> dict[str, Any] | str:
    """What calls give a layer besides the mask; or why a form cannot know it."""
    found: dict[str, Any] = {}
    for _, named in calls:
        for name, value in named.items():
            if name == "attention_mask":
                found[name] = None  # how a layer is timed, if it takes one at all
            elif value is None or value is False:
                continue
            elif type(value) not in _PLAIN or found.setdefault(name, value) != value:
                return f"it is called with {name}, of which LayerZero does not know what it does"
    return found


def parts_of(module: Module) -> Parts | None:
    """The products, norms and activation of what may be an encoder layer."""
    leaves = {path: each for path, each in module.named_modules() if not each._modules}
    linears = {path: each for path, each in leaves.items() if isinstance(each, Linear)}
    if not 4 <= len(linears) <= 7 or not all(is_plain(each) for each in linears.values()):
        return None
    if any(each.is_meta for each in module.parameters()):
        return None
    norms: dict[str, Normed] = {}
    scales: dict[str, Module] = {}
    for path, each in leaves.items():
        if path in linears or not any(True for _ in (*each.parameters(), *each.buffers())):
            continue
        if _is_scale(each):
            scales[path] = each
        elif (made := normed(each)) is not None:
            norms[path] = made
        else:
            return None
    if len(norms) != 2 or len(scales) not in {0, 2}:
        return None
    holders = [each for each in module.modules() if each._modules]
    if any(True for each in holders for _ in each.parameters(recurse=False)):
        return None
    between: set[str | Module] = {name for each in holders for name, _, _ in activations_of(each)}
    if not between:  # CLIP's: what computes it stands between the products
        plain = (each for path, each in leaves.items() if path not in {*linears, *norms, *scales})
        between = {each for each in plain if not isinstance(each, (Dropout, Identity))}
    if len(between) != 1:
        return None
    known = signature_of(type(module).forward).parameters.values()
    order = [each.name for each in known if each.kind is each.POSITIONAL_OR_KEYWORD]
    return Parts(module, linears, norms, scales, between.pop(), tuple(order[2:]))


def why_formless(module: Module) -> str:
    """Why no form of a layer has the parts of this one."""
    for path, each in module.named_modules():
        if type(each).__module__.startswith(ADAPTERS):
            return f"{path} is an adapter ({type(each).__name__}); merge and unload that first"
    return "its products and norms have the sizes of no form of a layer that LayerZero computes"


def _is_scale(module: Module) -> bool:
    """Whether it is a vector that multiplies rows, as far as can be known without a run."""
    parameters = {name: each for name, each in module._parameters.items() if each is not None}
    return len(parameters) == 1 and "weight" not in parameters and all(each.ndim == 1 for each in parameters.values())


def _of_more_rows(hidden: Tensor, named: Mapping[str, Any]) -> tuple[Tensor, Mapping[str, Any]]:
    """A call with more rows of more tokens: a branch on sizes would take another way."""
    mask = named.get("attention_mask")
    if mask is not None:
        alone = {1} if mask.ndim == 4 else set()  # heads share it
        mask = mask.repeat(*[1 if size == 1 or axis in alone else MORE for axis, size in enumerate(mask.shape)])
        named = {**named, "attention_mask": mask}
    return hidden.repeat(MORE, MORE, *[1] * (hidden.ndim - 2)), named


def calls_of(
    model: Any, exchange: AttentionSwap, parts: Sequence[Parts]
) -> tuple[dict[int, list[tuple[Tensor, Mapping[str, Any]]]], Mapping[int, Seen]]:
    """What the model hands to each layer on Transformers' own example, a few tokens of it; and what attention got."""
    calls: dict[int, list[tuple[Tensor, Mapping[str, Any]]]] = {}
    order = {id(each.module): each.order for each in parts}

    def keep(module: Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        told = {**dict(zip(order[id(module)], given[1:], strict=False)), **named}
        hidden = given[0] if given else told.pop("hidden_states")
        if (mask := told.get("attention_mask")) is not None:
            told["attention_mask"] = mask[:2, ..., :TOKENS, :TOKENS] if mask.ndim == 4 else mask
        calls.setdefault(id(module), []).append((hidden[:2, :TOKENS], told))
        if len(calls[id(module)]) == 1:
            calls[id(module)].append(_of_more_rows(*calls[id(module)][0]))

    with watching([each.module for each in parts], keep), seeing(exchange) as seen:
        example_run(model)()
    return calls, seen
