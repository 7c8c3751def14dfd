"""One token of a Llama with GGUF's weights on a CPU by one run of ggml, as llama.cpp computes it.

The products alone leave a step to the host: what lies between them takes about as long as they do. A call is a step if
it brings one token of one sequence in float32, a DynamicCache with tokens, and nothing hidden. Any other call runs the
stack's own code, with the products that LayerZero computes.

The parts of a stack are known by the names that Llama, Mistral and Qwen2 have, and believed by what they give.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

import layerzero as lz
from layerzero.backends import ggml
from layerzero.backends.ggml_decoder import Decoder, Layer, Norm, Product, Step
from layerzero.core.errors import InvalidCallError, in_short
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.integrations.optimize.attention import dynamic_cache
from layerzero.integrations.optimize.attention.transformers import NAME, Search
from layerzero.integrations.optimize.modules.norms import normed
from layerzero.integrations.optimize.modules.products import activation_named
from layerzero.integrations.optimize.swaps.candidate import quiet
from layerzero.integrations.optimize.swaps.codes import CodedProduct, bias_of
from layerzero.integrations.optimize.swaps.swap import MARK, State, Swap, as_forward, serves, stock_forward, trying
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Replaced

KIND = "decoder"

KERNEL = "ggml.gguf_linear"

PROMPT, TOKENS = 5, 4
"""Tokens that come first, and tokens that are compared."""

TURNS, SECONDS = 12, 1.5
"""Rounds in which a step is timed, and the time after which there are no more than two."""

_PARTS = {
    "": {"embed_tokens", "layers", "norm", "rotary_emb"},
    "layer": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}

_READ = frozenset({"input_ids", "attention_mask", "position_ids"}) | dynamic_cache.NAMES
_TOLD = frozenset({"use_cache", "return_dict", "cache_position"})

_ATTENTION = frozenset({NAME, "sdpa", "eager"})
"""Settings that attend to all tokens of a cache by the softmax of products, and look at nothing else."""


_UNASKED: tuple[int, object, bool] = (-1, None, False)


class _UnlikeError(Exception):
    """Why a stack is none that ggml computes."""


class GgufSteps(State):
    """What the steps of one stack of layers are computed with.

    Attributes:
        output: the class of what the stack gives.
        left: how many steps ran the stack's own code since ggml could not read its weights, by why.
    """

    output: Callable[..., Any]

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self._stack, self._here, self._chosen = stack, threading.local(), _UNASKED
        self._read: _Reading | None = _Reading(stack)
        self.left: Counter[str] = Counter()
        self._over = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        if id(self._stack) not in memo:
            return State()
        # what a copy finds anew; the rest, and what its proof rests on, is copied with the stack
        memo.update({id(self._here): threading.local(), id(self._read): None, id(self._chosen): _UNASKED})
        return super().__deepcopy__(memo)

    def is_ggmls(self) -> bool:
        """Whether ggml computes each product by itself, too, as settings and times are now."""
        (epoch, before, chosen), policy = self._chosen, current_policy()
        if epoch != ENGINE.epoch or before is not policy:
            epoch = ENGINE.epoch  # first: what comes between starts another
            try:
                chosen = not policy.invariant and all(map(_is_ggmls, _products_of(self._stack)))
            except InvalidCallError:  # a weight was written into, or is exchanged now: its own code takes the new one
                return False
            self._chosen = epoch, policy, chosen
        return chosen

    def _reading(self) -> _Reading | None:
        """Where the weights lie, looked at anew where they moved; None once ggml did not compute them."""
        read = self._read
        if self._over:
            self.left[self._over] += 1
        if self._over or (read is not None and read.lies_still()):
            return None if self._over else read
        try:
            self._chosen = _UNASKED
            self._read = read = _Reading(self._stack)
        except _UnlikeError as error:  # to look costs more than a step gains
            self._over, self._read = f"ggml reads other weights, {error}", None
            return self._reading()
        return read

    def step(self, named: Mapping[str, Any]) -> Any:
        """What the stack gives for one token; None for a call that is none."""
        ids, mask, cache = named.get("input_ids"), named.get("attention_mask"), dynamic_cache.cache_in(named)
        if type(ids) is not Tensor or ids.shape != (1, 1) or named.get("return_dict") is False:
            return None
        for name, value in named.items():
            if name not in _READ and name not in _TOLD and value is not None and value is not False:
                return None
        config, read = self._stack.config, self._reading()
        if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
            return None
        asked = named.get("use_cache")
        if asked is False or (asked is None and not getattr(config, "use_cache", True)):
            return None  # some stacks give no cache back then
        if read is None or not serves(self, ids, *read.tensors) or not self.is_ggmls():
            return None
        decoder = read.decoder
        (_, heads, width), count = decoder.sizes, len(decoder.layers)
        if config.num_hidden_layers != count or config._attn_implementation not in _ATTENTION:
            return None
        room = dynamic_cache.reserved(cache, heads, width)
        if room is None or len(room[2]) != count:
            return None
        length, places, layers = room
        if (place := named.get("cache_position")) is not None and place.tolist() != [length]:
            return None  # stacks of Transformers 5.0 turn and hide tokens by it
        if mask is not None and (type(mask) is not Tensor or mask.shape != (1, length + 1) or not bool(mask.all())):
            return None
        hidden = self._stack.embed_tokens(ids)
        positions = named.get("position_ids")
        if positions is None:
            positions = torch.full((1, 1), length, dtype=torch.int64, device="cpu")
        cos, sin = self._stack.rotary_emb(hidden, positions)
        for tensor, size in ((hidden, decoder.layers[0].products[0].inputs), (cos, width), (sin, width)):
            if tensor.dtype is not torch.float32 or tensor.shape != (1, 1, size) or not tensor.is_contiguous():
                return None
        kept: Step | None = getattr(self._here, "step", None)
        if kept is None or kept.of is not decoder or kept.places != places:
            kept = self._here.step = Step(decoder, places)
        output = kept.run(hidden, cos, sin, length, [each.addresses for _, each in layers])
        dynamic_cache.grow(layers, length + 1)
        return self.output(last_hidden_state=output, **{dynamic_cache.name_of(self._stack): cache})


class _Reading:
    """Addresses of what a stack is made of, and the tensors that lie there.

    Raises: _UnlikeError naming what is another.
    """

    def __init__(self, stack: Any) -> None:
        self._held: list[tuple[Mapping[str, Tensor | None], str, Tensor, int, int]] = []
        self._memory: list[torch.UntypedStorage] = []  # a thread that is in a step reads it after `weight.data = ...`
        self.decoder = self._decoder(stack)
        self.tensors = [each[2] for each in self._held]

    def lies_still(self) -> bool:
        """Whether all lie where they did, and take as much."""
        for parameters, name, tensor, address, count in self._held:  # a loop: each step comes here
            if parameters.get(name) is not tensor or tensor.data_ptr() != address or tensor.nbytes != count:
                return False
        return True

    def _decoder(self, stack: Any) -> Decoder:
        _only(stack, "", _PARTS[""])
        if any(slides for slides, _ in dynamic_cache.kinds_of(stack)):
            raise _UnlikeError("its attention has a window")
        if (getattr(stack.config, "rope_parameters", None) or {}).get("llama_4_scaling_beta"):  # Ministral 3's
            raise _UnlikeError("its queries grow with their distance from the first token, which no example shows")
        self._tensor(stack.embed_tokens, "weight")
        layers = tuple([self._layer(each) for each in stack.layers])
        shapes = {tuple([product[1:3] for product in each.products]) for each in layers}
        heads = stack.layers[0].self_attn
        if len(shapes) != 1:
            raise _UnlikeError("its layers differ in size")
        width = getattr(heads, "head_dim", 0)
        query, key, value, last, *_ = layers[0].products
        sizes = query.outputs // max(width, 1), key.outputs // max(width, 1), width
        fits = width and query.outputs == sizes[0] * width == last.inputs and key.outputs == value.outputs
        if not fits or key.outputs != sizes[1] * width or width % 2 or sizes[0] % max(sizes[1], 1):
            raise _UnlikeError("its heads are of another form")
        scaling = getattr(heads, "scaling", None)
        if not isinstance(scaling, float) or any(each.self_attn.scaling != scaling for each in stack.layers):
            raise _UnlikeError("its attention tells no scale, or several")
        return Decoder(layers, self._norm(stack.norm), sizes, scaling)

    def _layer(self, layer: Any) -> Layer:
        heads, block = layer.self_attn, layer.mlp
        for each, name in ((layer, "layer"), (heads, "self_attn"), (block, "mlp")):
            _only(each, name, _PARTS[name])
        if activation_named(block.act_fn) != "silu":
            raise _UnlikeError("its gate is no silu")
        norms = self._norm(layer.input_layernorm), self._norm(layer.post_attention_layernorm)
        return Layer(tuple(map(self._product, _of_layer(layer))), norms)

    def _norm(self, module: Module) -> Norm:
        found = normed(module)
        if found is None or found.form != "rms" or found.norm.eps is None:
            raise _UnlikeError(f"{type(module).__name__} is no norm by the root mean square")
        return Norm(self._tensor(module, "weight", torch.float32), found.norm.eps)

    def _product(self, module: Module) -> Product:
        state = _coded(module)
        read = None if state is None else state.read(module)
        if state is None or read is None or not state.follow(read) or not isinstance(state.weight, lz.QuantizedWeight):
            raise _UnlikeError(f"{type(module).__name__} has no blocks of GGUF whose rows may be rounded")
        if state.own_at and state.own_at[0]:
            raise _UnlikeError(f"{type(module).__name__} multiplies one row faster by its own code")
        (outputs, inputs), bias = state.weight.shape, bias_of(module)
        address = self._tensor(module, "weight")
        held = 0 if bias is None else self._tensor(module, "bias", torch.float32)
        return Product(ggml.NUMBERS_OF[state.weight.format.kind], outputs, inputs, address, held)

    def _tensor(self, module: Module, name: str, dtype: torch.dtype | None = None) -> int:
        held: Mapping[str, Tensor | None] = module._parameters
        held = module._buffers if held.get(name) is None else held
        tensor = held.get(name)
        if tensor is None or not tensor.is_cpu or not tensor.is_contiguous() or (dtype or tensor.dtype) != tensor.dtype:
            wanted = f"{name} of {type(module).__name__}: wanted a contiguous tensor on the CPU"
            raise _UnlikeError(f"{wanted}{f' in {dtype}' if dtype else ''}")
        address = tensor.data_ptr()
        if address % 2:
            raise _UnlikeError(f"{name} of {type(module).__name__} begins at an odd address")
        self._held.append((held, name, tensor, address, tensor.nbytes))
        self._memory.append(tensor.untyped_storage())
        return address


def _only(module: Module, name: str, parts: set[str]) -> None:
    """Raises: _UnlikeError where a module has tensors of its own, or of other submodules than these."""
    known = {part for part, each in module._modules.items() if each is not None}
    more = {part for part in known - parts if any(True for _ in module._modules[part].parameters())}  # type: ignore[union-attr]
    if not parts <= known or more or any(True for _ in module.parameters(recurse=False)):
        raise _UnlikeError(f"{type(module).__name__} has other parts than {name or 'a stack'} of a Llama")


def _of_layer(layer: Any) -> tuple[Module, ...]:
    """Queries, keys, values, what attended, gate, up and down."""
    heads, block = layer.self_attn, layer.mlp
    return heads.q_proj, heads.k_proj, heads.v_proj, heads.o_proj, block.gate_proj, block.up_proj, block.down_proj


def _coded(module: Module) -> CodedProduct | None:
    """What serves a product with blocks of GGUF and rounded rows; None for any other."""
    state = module.__dict__.get(MARK)
    known = isinstance(state, CodedProduct) and state.activations == "int8" and state.kind == "gguf"
    return state if known else None


def _products_of(stack: Any) -> Iterator[Module]:
    """One product of each type and size."""
    found: dict[object, Module] = {}
    for each in (product for layer in stack.layers for product in _of_layer(layer)):
        state = _coded(each)
        found[None if state is None else (str(state.named["weight_format"]), state.pair[0].shape)] = each
    yield from found.values()


def _is_ggmls(module: Module) -> bool:
    state = _coded(module)
    if state is None or not isinstance(state.weight, lz.QuantizedWeight):
        return False
    rows = torch.empty(1, 1, state.weight.shape[1], dtype=torch.float32, device="cpu")
    asked = lz.explain("quantized_linear", rows, *state.pair, bias_of(module), packed=state.packed[0], **state.named)
    return asked.kernel_id == KERNEL


@as_forward
def forward(self: Module, *given: Any, **named: Any) -> Any:
    """The forward of a stack whose steps ggml computes."""
    state: Any = self.__dict__.get(MARK)  # None once another thread has undone it
    mine = isinstance(state, GgufSteps) and not given and not torch.compiler.is_compiling()
    if mine and (output := state.step(named)) is not None:
        return output
    return type(self).forward(self, *given, **named)  # Dynamo makes no bound method


def find(search: Search) -> Iterator[Replaced | Left]:
    """Stacks whose products with GGUF's blocks ggml computes, and whose steps it computes faster as a whole."""
    for prefix, exchange, _ in search.models if search.rounding is not None else ():
        for path, stack in exchange.model.named_modules():
            if isinstance(stack._modules.get("layers"), ModuleList) and any(map(_coded, stack.modules())):
                yield _tried(f"{prefix}.{path}".strip("."), stack, search)
                break


def _tried(path: str, stack: Any, search: Search) -> Replaced | Left:
    name, step = type(stack).__name__, "a step of a decoder by ggml"
    if not search.time.allows(step, step):
        return Left(path, name, f"{step}: {NO_TIME}")
    try:
        with search.time.taking(step), quiet(stack):
            state = GgufSteps(stack)
            if not state.is_ggmls():
                raise _UnlikeError(f"{KERNEL} is not what computes its products with one row")  # noqa: TRY301
            swap = Swap(stack, forward, state)
            error, share = _compared(stack, swap, search.time.deadline.passed)
    except Exception as raised:  # noqa: BLE001  # what a model raises on an example that was made for another
        return Left(path, name, f"{step}: {raised if isinstance(raised, _UnlikeError) else in_short(raised)}")
    limit = float(search.rounding or 0.0) * math.sqrt(len(stack.layers))  # of a walk, a layer a step
    if not error <= limit:
        return Left(
            path, name, f"{step}: its output is {error:.2g} of its size from its own code's, wanted {limit:.2g}"
        )
    if share > 1 - timing.LEAST:
        return Left(path, name, f"{step}: it took {share:.2f} of its own code's time")
    calls = f"one run of ggml a token, {share:.2f} of its own code's time"
    return Replaced(path, name, KIND, calls, KERNEL, error, swap)


def _compared(stack: Any, swap: Swap, passed: Callable[[], bool]) -> tuple[float, float]:
    """How far steps are from the stack's own, in units of their size; and what they take in units of its time."""
    from transformers import DynamicCache

    words = stack.embed_tokens.weight.shape[0]
    ids = torch.randint(words, (1, PROMPT + TOKENS), generator=torch.Generator().manual_seed(0), device="cpu")
    caches = {way: DynamicCache(config=stack.config) for way in (False, True)}
    cached = dynamic_cache.name_of(stack)

    def run(ids: Tensor, *, ours: bool) -> Any:
        swap.on() if ours else swap.off()
        return stack(input_ids=ids, use_cache=True, **{cached: caches[ours]})

    with trying(swap):
        for ours in caches:
            swap.state.output = type(run(ids[:, :PROMPT], ours=ours))  # type: ignore[attr-defined]
        errors = []
        for number in range(PROMPT, PROMPT + TOKENS):
            ours = number < PROMPT + TOKENS - 1  # the last one reads what ours left
            swap.on() if ours else swap.off()
            state: Any = swap.state
            now = ids[:, number : number + 1]
            got = state.step({"input_ids": now, "use_cache": True, cached: caches[True]}) if ours else None
            if ours and got is None:
                raise _UnlikeError("a step of the example is none that ggml computes")
            got = got or stock_forward(stack)(input_ids=now, use_cache=True, **{cached: caches[True]})
            own = run(now, ours=False)
            own, got = own.last_hidden_state.double(), got.last_hidden_state.double()
            errors.append(((got - own).norm() / own.norm()).item())
        token = ids[:, :1]

        def sample(ours: bool) -> float:
            run(token, ours=ours)  # looks anew at what its proof rests on
            return timing.taken(lambda: stack(input_ids=token, use_cache=True, **{cached: caches[ours]}))

        def undecided(times: Mapping[bool, Sequence[float]], turn: int) -> Sequence[bool]:
            over = turn == TURNS or (turn > 1 and (sum(map(sum, times.values())) > SECONDS or passed()))
            return () if over else (False, True)

        times = timing.race((False, True), sample, undecided)
    pairs = [(theirs, ours) for theirs, ours in zip(times[False], times[True], strict=True) if ours]
    worst = max(errors, key=lambda each: math.inf if math.isnan(each) else each)
    return worst, 1 / (1 + timing.gain(pairs)) if pairs else 1.0
