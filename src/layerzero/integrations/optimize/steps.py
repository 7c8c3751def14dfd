"""One token of a decoder as one CUDA graph: the model's own forward, captured for a number of places, and replayed.

A call is a step if it brings one token for each sequence and a cache with tokens, and nothing else that a graph could
not follow. Any other call runs the model as it is, and the report counts why. On a CPU steps run without a graph: the
cache lies in memory that stays where it is there, too, and attention reads as much of it as is used.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as torchs

import layerzero as lz
from layerzero.core import forking
from layerzero.core.errors import InvalidCallError, LayerZeroError, LayerZeroWarning
from layerzero.integrations.optimize.attending import NAME
from layerzero.integrations.optimize.held import PAGE, Held, Memory, bucket, step_cache, why_not
from layerzero.integrations.optimize.swapping import State, is_recorder, stock_forward
from layerzero.integrations.transformers import ONE_TOKEN

ON_HOST = frozenset({"cpu"})
"""Devices where the length is no secret of the device, and whose attention takes views of what is used."""

MOST = 4
"""Numbers of sequences for which memory is kept."""

_READ = frozenset({"input_ids", "past_key_values", "attention_mask", "position_ids"})
_TOLD = frozenset({"use_cache", "return_dict", "logits_to_keep", "cache_position"})


@dataclass
class _Graph:
    """A captured step."""

    graph: Any
    output: Any
    step: lz.StepMetadata
    state: list[tuple[int, int]]


class Steps(State):
    """What the steps of one model need.

    Attributes:
        left: why calls with one token ran without a graph, and how many.
        refused: why none is captured any more; empty while they are.
    """

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.left: Counter[str] = Counter()
        self.refused = ""
        self._lock = forking.rlock()
        self._memories: dict[int, Memory] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None
        self._model: Any = model
        self._kinds: list[tuple[bool, int | None]] = []
        self._hooks: list[Any] = []
        self._places: list[tuple[Any, str, Any]] = []
        self._tensors: list[Tensor] = []

    def _look(self) -> None:
        """Note what a captured step is made of."""
        self._graphs.clear()
        self._kinds = kinds_of(self._model)
        modules = list(self._model.modules())
        self._hooks = [each for one in modules for each in (one._forward_hooks, one._forward_pre_hooks)]
        self._hooks += [torchs._global_forward_hooks, torchs._global_forward_pre_hooks]
        dicts = [each for one in modules for each in (one._modules, one._parameters, one._buffers)]  # as they are now
        self._places = [(each, name, one) for each in dicts for name, one in each.items()]
        self._tensors = [one for each in dicts for one in each.values() if isinstance(one, Tensor)]

    def _is_as_it_was(self) -> bool:
        """Whether modules and parameters are those that were noted."""
        for each, name, one in self._places:  # half the time of any(): it is asked at every step
            if each.get(name) is not one:
                return False
        return bool(self._places)

    def __deepcopy__(self, memo: dict[int, Any]) -> Steps:
        model = memo.get(id(self._model))
        return Steps(self._model if model is None else model)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self._memories.values())

    @property
    def graphs(self) -> int:
        """Captured steps."""
        return len(self._graphs)

    def why_not(self, named: Mapping[str, Any]) -> str:
        """Say why a call with one token is no step; empty where it is one."""
        if not self._is_as_it_was():
            self._look()
        if torch.is_grad_enabled() and any(each.requires_grad for each in self._tensors):
            return "gradients are on"
        if self._model.training or torch._C._is_any_autocast_enabled():
            return "autocast or training mode is on"
        for name, value in named.items():
            if name not in _READ and name not in _TOLD and value is not None and value is not False:
                return f"it got {name}"
        if named.get("return_dict") is False:
            return "it is asked for a tuple"
        if getattr(self._model.config, "_attn_implementation", None) != NAME:
            return "its attention is not LayerZero's"
        if any(self._hooks) and any(not is_recorder(hook) for each in self._hooks for hook in each.values()):
            return "it has hooks"
        if self._tensors[0].is_inference():
            return "its weights were made in inference mode, and do not tell of writes"
        config = self._model.config
        if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
            return "its configuration asks for hidden states or attention weights"
        cache, mask = named["past_key_values"], named.get("attention_mask")
        if self._has(cache) is None:
            why = why_not(cache)
            if not why and _kinds(cache) != self._kinds:
                why = "its cache has other windows than the model"
            if why:
                return why
        if mask is not None and (mask.ndim != 2 or not bool(mask.all())):
            return "tokens are hidden (padding), or the mask is not (B, length)"
        return ""

    def other_batch(self, ids: Tensor, cache: Any) -> str:
        """Say that ids and cache are of different numbers of sequences: the model's own code raises then."""
        held = self._has(cache)
        batch = cache.layers[0].keys.shape[0] if held is None else held.memory.batch
        return "" if ids.shape[0] == batch else f"it got {ids.shape[0]} sequences, and a cache of {batch}"

    def _has(self, cache: Any) -> Held | None:
        """The cache as it lies in memory, where it does and has a place for one token more."""
        for each in tuple(self._memories.values()):
            held = each.held
            if held is not None and held.is_of(cache) and held.length < each.capacity:
                return held
        return None

    def run(self, ids: Tensor, named: Mapping[str, Any]) -> Any:
        """One step; its logits, and the caller's cache with one token more."""
        cache = named["past_key_values"]
        with self._lock, torch.inference_mode(False), torch.no_grad():  # what inference mode makes is not written later
            held = self._held(cache)
            memory = held.memory
            memory.ids.copy_(ids)
            positions = named.get("position_ids")
            if positions is None:
                memory.positions.fill_(held.length)
            else:
                memory.positions.copy_(positions.expand(memory.batch, 1))
            memory.index.fill_(held.length)
            memory.lengths.fill_(held.length + 1)
            output = self._on_host(held) if ids.device.type in ON_HOST else self._on_device(held)
            held.length += 1
        return type(output)(logits=output.logits, past_key_values=cache)

    def _held(self, cache: Any) -> Held:
        found = self._has(cache)
        if found is not None:
            return found
        batch = cache.layers[0].keys.shape[0]
        memory = self._memories.get(batch)
        length = cache.get_seq_length() + 1
        if memory is None or memory.capacity < length or not memory.serves(cache):
            kept = [each for each in self._memories if each != batch]
            for gone in (batch, *kept[: max(0, len(kept) - MOST + 1)]):
                self._forget(gone, unless=cache)
            memory = self._memories[batch] = Memory(cache, bucket(length + PAGE // 2))
        return memory.take(cache)

    def _forget(self, batch: int, unless: Any = None) -> None:
        memory = self._memories.pop(batch, None)
        self._graphs = {key: each for key, each in self._graphs.items() if key[0] != batch}
        if memory is not None and memory.held is not None and not memory.held.is_of(unless):
            memory.held.release()

    def _call(self, held: Held, places: int, attend: Callable[..., Tensor]) -> Any:
        memory = held.memory
        token = ONE_TOKEN.set(attend)
        try:
            return stock_forward(self._model)(
                input_ids=memory.ids,
                position_ids=memory.positions,
                past_key_values=step_cache(memory, held, places),
                use_cache=True,
            )
        finally:
            ONE_TOKEN.reset(token)

    def _on_host(self, held: Held) -> Any:
        """As much of the memory as is used, as a view."""
        return self._call(held, held.length + 1, functools.partial(_attend_view, held))

    def _on_device(self, held: Held) -> Any:
        memory = held.memory
        places = min(bucket(held.length + 1), memory.capacity)
        key = memory.batch, places
        state = [(each.data_ptr(), each._version) for each in self._tensors]
        found = self._graphs.get(key)
        if found is None or found.state != state:
            table = memory.table[:, : places // PAGE]
            step = lz.StepMetadata(table, memory.lengths, max_context_len=places, capturable=True)
            attend = functools.partial(_attend_pages, held, step)
            output = self._call(held, places, attend)
            run = functools.partial(self._call, held, places, attend)
            graph, kept = self._captured(run, memory.index.device)
            self._graphs[key] = _Graph(graph, kept, step, state)
            return output
        found.step.advance()
        found.graph.replay()
        output = found.output
        return type(output)(logits=output.logits.clone())

    def _captured(self, run: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
        """Capture a step that has just run: all that is chosen, compiled and planned on the way is there."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # libraries keep workspaces for each stream
        torch.cuda.current_stream(device).wait_stream(stream)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = run()
        return graph, output


def kinds_of(model: Any) -> list[tuple[bool, int | None]]:
    """Of each layer of a model's cache, whether it has a window, and which."""
    from transformers import DynamicCache

    return _kinds(DynamicCache(config=model.config))


def _kinds(cache: Any) -> list[tuple[bool, int | None]]:
    return [(bool(each.is_sliding), getattr(each, "sliding_window", None)) for each in cache.layers]


def _told(held: Held, key: Tensor, named: Mapping[str, Any]) -> dict[str, Any]:
    """What attention was told, for LayerZero's functions; whose keys these are says which window is meant."""
    window, (slides, own) = named["sliding_window"], held.windows[_number(held.memory, key)]
    if slides and own != window:
        wanted = f"wanted attention that is told its window of {own}, got {window}"
        raise InvalidCallError("lz.optimize(graph=True)", [wanted])
    return {"window": None if window is None else (window - 1, 0), "softcap": named["softcap"]}


def _number(memory: Memory, key: Tensor) -> int:
    """The layer whose keys these are."""
    start = key.data_ptr()
    return next(number for number, keys in enumerate(memory.keys) if keys.data_ptr() == start)


def _attend_view(
    held: Held, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, named: Mapping[str, Any]
) -> Tensor:
    """(B, 1, H, D) of a query (B, H, 1, D) and the used part of a memory."""
    told = _told(held, key, named)
    if told["window"] is not None and key.shape[2] <= told["window"][0] + 1:
        told["window"] = None
    output = lz.attention(query, key, value, True, scaling, layout="BHSD", sinks=named["s_aux"], **told)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2)


def _attend_pages(
    held: Held,
    step: lz.StepMetadata,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    named: Mapping[str, Any],
) -> Tensor:
    """The same by lengths that only the device knows."""
    if named["s_aux"] is not None:
        raise InvalidCallError("lz.optimize(graph=True)", ["wanted attention without sinks, which pages do not serve"])
    memory, number, told = held.memory, _number(held.memory, key), _told(held, key, named)
    keys, values = (each.view(-1, PAGE, *each.shape[2:]) for each in (memory.keys[number], memory.values[number]))
    output = lz.paged_attention(
        query.transpose(1, 2), keys, values, step.block_tables, step.context_lens, scaling, step=step, **told
    )
    assert isinstance(output, Tensor)
    return output


def stepping(model: Module) -> Callable[..., Any]:
    """The forward of a model whose steps are captured; it has the signature of the model's own."""

    @functools.wraps(type(model).forward)
    def forward(self: Module, *given: Any, **named: Any) -> Any:
        ids: Any = given[0] if given else named.get("input_ids")
        if torch.compiler.is_compiling() or len(given) > 1 or not _is_step(ids, named):
            return stock_forward(self)(*given, **named)
        state: Steps = self.__dict__["_layerzero"]
        why = state.refused or state.why_not(named) or state.other_batch(ids, named["past_key_values"])
        if not why:
            try:
                return state.run(ids, named)
            except (LayerZeroError, RuntimeError) as error:
                state.refused = why = f"it could not be captured: {type(error).__name__}: {str(error)[:160]}"
                warnings.warn(f"lz.optimize(graph=True): {why}; steps run as they are", LayerZeroWarning, stacklevel=2)
        state.left[why] += 1
        return stock_forward(self)(*given, **named)

    forward.__name__ = "forward"
    return forward


def _is_step(ids: Any, named: Mapping[str, Any]) -> bool:
    """Whether a call brings one token for each sequence, and a cache that has some."""
    if type(ids) is not Tensor or ids.ndim != 2 or ids.shape[1] != 1:
        return False
    cache = named.get("past_key_values")
    return cache is not None and bool(getattr(cache, "layers", None)) and int(cache.get_seq_length()) > 0
