"""One token of a decoder as one CUDA graph: the model's own forward, captured for a number of places, and replayed.

A call is a step if it brings one token for each sequence and a cache with tokens, and nothing else that a graph could
not follow. Any other call runs the model as it is, and the report counts why. On a CPU steps run without a graph: the
cache lies in memory that stays where it is there, too, and attention reads as much of it as is used.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.core.errors import CudaGraphUnsafeError, InvalidCallError, LayerZeroWarning, NoKernelFoundError, in_short
from layerzero.core.graph_capture import capturing
from layerzero.core.system import warn
from layerzero.engine.failures import says_out_of_memory
from layerzero.engine.scopes import holding
from layerzero.integrations.optimize.attention import dynamic_cache
from layerzero.integrations.optimize.attention.transformers import NAME, Search
from layerzero.integrations.optimize.models.generation import DRAWING, Drawing, Numbers, why_not_by_place
from layerzero.integrations.optimize.models.step_cache import (
    OF_TOKENS,
    PAGE,
    Held,
    Memory,
    attend_pages,
    attend_view,
    bucket,
    seen,
    step_cache,
    why_not,
)
from layerzero.integrations.optimize.swaps.stamp import Stamp
from layerzero.integrations.optimize.swaps.swap import MARK, State, Swap, as_forward, has_own_forward, stock_forward
from layerzero.integrations.optimize.times.report import BY_CALL, Left, Replaced
from layerzero.integrations.transformers import ONE_TOKEN

ON_HOST = frozenset({"cpu"})
"""Devices where the length is no secret of the device, and whose attention takes views of what is used."""

MOST = 4
"""Numbers of sequences for which memory is kept."""

_READ = frozenset({"input_ids", "attention_mask", *OF_TOKENS}) | dynamic_cache.NAMES
_TOLD = frozenset({"use_cache", "return_dict", "cache_position"})

_MORE = "output_hidden_states", "output_attentions", "output_router_logits"

_UNCAPTURABLE = InvalidCallError, NoKernelFoundError, CudaGraphUnsafeError
"""What says that a model's steps cannot be captured, and not that this call was wrong or the device was full."""


@dataclass
class _Graph:
    """A captured step: it leaves logits, and the tokens that were drawn of them where that was wanted."""

    graph: Any
    output: Any
    ids: Tensor | None
    step: lz.StepMetadata
    state: list[tuple[int, int]]


class Steps(State):
    """What the steps of one model need.

    Attributes:
        left: why calls with one token ran without a graph, and how many.
        refused: why none is captured any more; empty while they are.
    """

    keeps = "keys and values in steps"

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.left: Counter[str] = Counter()
        self.refused = ""
        self._turns = dynamic_cache.Turns()
        self._memories: dict[int, Memory] = {}
        self._graphs: dict[tuple[int, int, str], _Graph] = {}
        self._numbers: dict[int, Numbers] = {}
        self._told: set[str] = set()
        self._pool: Any = None
        self._stream: Any = None
        self._model: Any = model
        self._config: Any = None
        self._kinds: list[tuple[bool, int | None]] = []
        self._stamp: Stamp | None = None
        self._tensors: list[Tensor] = []
        self._counts: str | None = None
        self._unread: set[str] = set()

    def _look(self) -> None:
        """Note what a captured step is made of."""
        self._graphs.clear()
        self._kinds, self._config = dynamic_cache.kinds_of(self._model), _of_decoder(self._model)
        self._stamp = Stamp(self._model, whole=False)
        self._tensors = [*self._model.parameters(), *self._model.buffers()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Steps:
        model = memo.get(id(self._model))
        return Steps(self._model if model is None else model)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in list(self._memories.values()))

    @property
    def graphs(self) -> int:
        return len(self._graphs)

    def _why_not(self, named: Mapping[str, Any]) -> str:
        """Say why a call with one token is no step; empty where it is one."""
        last = None if self._stamp is None else self._stamp.last  # 100 us of 450 modules: one glance a step
        if last is None or not last.same:
            self._look()
            assert self._stamp is not None
            last = self._stamp.last
        changed = last.why
        if torch.is_grad_enabled() and any(each.requires_grad for each in self._tensors):
            return "gradients are on"
        if torch._C._is_any_autocast_enabled():
            return "autocast is on"
        if changed:
            return changed
        for name, value in named.items():
            known = name in _TOLD or name in _READ - self._unread or (name == "logits_to_keep" and type(value) is int)
            if not known and value is not None and value is not False:
                return f"it got {name}"
        if named.get("return_dict") is False:
            return "the call wants a tuple"
        if self._config._attn_implementation != NAME:
            return "its attention is not LayerZero's"
        if self._tensors[0].is_inference():
            return "its weights were made in inference mode, and do not tell of writes"
        config = self._model.config
        configs = config, getattr(config, "text_config", None)
        if any(getattr(each, name, False) for each in configs for name in _MORE if named.get(name) is None):
            return "its configuration asks for hidden states, attention weights or logits of routers"
        cache, mask = dynamic_cache.cache_in(named), named.get("attention_mask")
        if self._has(cache) is None:
            why = why_not(cache)
            if not why and dynamic_cache.windows_of(cache) != self._kinds:
                why = "its cache has other windows than the model"
            if why:
                return why
        if mask is not None and (mask.ndim != 2 or mask.shape[1] <= cache.get_seq_length() or not bool(mask.all())):
            return "tokens are hidden (padding), or the mask is not (B, length)"
        for name in OF_TOKENS:
            value = named.get(name)
            if value is not None and (value.ndim not in {1, 2, 3} or value.shape[-1] != 1):
                return f"its {name} are {tuple(value.shape)}, wanted (1,), (B, 1) or (A, B, 1)"
        if named.get("position_ids") is not None:
            return ""
        if self._counts is None or says_out_of_memory(self._counts):
            self._counts = why_not_by_place(self._model, self._tensors[0].device)
        return self._counts

    def _other_batch(self, ids: Tensor, cache: Any) -> str:
        """Say that ids and cache are of different numbers of sequences: the model's own code raises then."""
        batch = seen(cache.layers[0], "keys").shape[0]
        return "" if ids.shape[0] == batch else f"it got {ids.shape[0]} sequences, and a cache of {batch}"

    def _has(self, cache: Any) -> Held | None:
        """The cache as it lies in memory, where it does and has a place for one token more."""
        for each in list(self._memories.values()):
            held = each.held
            if held is not None and held.is_of(cache) and held.length < each.capacity:
                return held
        return None

    def attempt(self, ids: Tensor, named: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """One step; its logits, and the caller's cache with one token more. ``run`` where it is none.

        What fails is run as it is, too: if that raises, the call is at fault. A model that gave a call which cannot be
        captured gets no steps any more; a device without memory, or whatever else happened, counts for this step.
        """
        with self._turns.turn(ids.device):
            if self.refused:  # no step will read them
                self._forget_unheld()
            why = self.refused or self._why_not(named) or self._other_batch(ids, dynamic_cache.cache_in(named))
            if not why:
                try:
                    return self._run(ids, named)
                except Exception as error:  # noqa: BLE001  # whatever a model's code raises of a cache that is another
                    failed = error.with_traceback(None)  # whose frames hold what was computed so far
        if why:
            self.left[why] += 1
            return run()
        output = run()
        kinds = [name for name in OF_TOKENS[1:] if named.get(name) is not None]
        with self._turns.turn(ids.device):
            if kinds and isinstance(failed, _UNCAPTURABLE):  # Gemma 3 makes a mask of them; steps without are captured
                self._unread.update(kinds)
                self.left[f"it got {kinds[0]}"] += 1
            else:
                self._failed(failed)
        return output

    def _failed(self, error: Exception, *, captured: bool = True) -> None:
        """Note why a step ran as it is, tell it once, and capture no more where that has no sense."""
        text = in_short(error)
        if any(isinstance(each, torch.OutOfMemoryError) for each in _chain(error)):
            why = f"the device had no memory for it: {text}"
            self._forget_unheld()
        elif not captured or isinstance(error, _UNCAPTURABLE):
            self.refused = why = f"it could not be captured: {text}"
        else:
            why = f"it failed, and the model's own code did not: {text}"
        self.left[why] += 1
        if why not in self._told:
            self._told.add(why)
            warn(f"lz.optimize(graph=True): {why}; steps run as they are", LayerZeroWarning, stacklevel=4)

    def _run(self, ids: Tensor, named: Mapping[str, Any]) -> Any:
        cache = dynamic_cache.cache_in(named)
        with torch.inference_mode(False), torch.no_grad():  # what inference mode makes is not written later
            held = self._held(cache)
            held.stream = dynamic_cache.stream_of(ids.device)
            memory = held.memory
            memory.ids.copy_(ids)
            memory.place(held.length, named)
            output = self._on_host(held) if ids.device.type in ON_HOST else self._on_device(held)
            held.length += 1
        return type(output)(logits=output.logits, **{dynamic_cache.name_of(self._model): cache})

    def _held(self, cache: Any) -> Held:
        found = self._has(cache)
        if found is not None:
            return found
        batch = seen(cache.layers[0], "keys").shape[0]
        memory = self._memories.get(batch)
        length = cache.get_seq_length() + 1
        if memory is None or memory.capacity < length or not memory.serves(cache):
            kept = [each for each in self._memories if each != batch]
            for gone in (batch, *kept[: max(0, len(kept) - MOST + 1)]):
                self._forget(gone, unless=cache)
            memory = self._memories[batch] = Memory(cache, bucket(length + PAGE // 2), self._turns)
        return memory.take(cache)

    def _forget_unheld(self) -> None:
        for batch, memory in list(self._memories.items()):
            if memory.held is None or not memory.held.layers:  # others would be copied
                self._forget(batch)

    def _forget(self, batch: int, unless: Any = None) -> None:
        memory = self._memories.pop(batch, None)
        self._graphs = {key: each for key, each in self._graphs.items() if key[0] != batch}
        if memory is not None:
            dynamic_cache.used_here((*memory.keys, *memory.values))
            if memory.held is not None and not memory.held.is_of(unless):
                memory.held.release()

    def _call(self, held: Held, places: int, attend: Callable[..., Tensor]) -> Any:
        memory = held.memory
        with holding(ONE_TOKEN, attend):
            return stock_forward(self._model)(
                input_ids=memory.ids,
                use_cache=True,
                **memory.given,
                **{dynamic_cache.name_of(self._model): step_cache(memory, held, places)},
            )

    def _on_host(self, held: Held) -> Any:
        """As much of the memory as is used, as a view."""
        output = self._call(held, held.length + 1, functools.partial(attend_view, held))
        drawing = DRAWING.get()
        if drawing is not None:
            drawing.draw(output.logits[:, -1], held.length)
        return output

    def _on_device(self, held: Held) -> Any:
        memory, drawing = held.memory, DRAWING.get()
        places = min(bucket(held.length + 1), memory.capacity)
        given = [id(each) for each in memory.given.values()]  # they live as long as the memory, with which graphs go
        key = memory.batch, places, f"{'' if drawing is None else drawing.kind} {given}"
        state = [(each.data_ptr(), each._version) for each in self._tensors]
        numbers = self._told_to_device(memory, drawing)
        found = self._graphs.get(key)
        if found is None or found.state != state:
            table = memory.table[:, : places // PAGE]
            step = lz.StepMetadata(table, memory.lengths, max_context_len=places, capturable=True)
            attend = functools.partial(attend_pages, held, step)
            run = functools.partial(self._drawn, held, places, attend, drawing, numbers)
            output, ids = run()
            made = None
            try:
                graph, (kept, drawn) = self._captured(run, memory.index.device)
                made = self._graphs[key] = _Graph(graph, kept, drawn, step, state)
            except Exception as error:  # noqa: BLE001  # the step itself was computed
                self._failed(error, captured=False)
            if made is None or drawing is None or not drawing.is_random:
                if drawing is not None:
                    drawing.ids = ids
                return output
            found = made
        # a graph may draw by another kernel than a step without: the same seed must give the same at every step
        found.step.advance()
        if drawing is None:
            found.graph.replay()
        else:
            with drawing.seeded(memory.index.device, held.length):
                found.graph.replay()
            assert found.ids is not None
            drawing.ids = found.ids.clone()
        output = found.output
        return type(output)(logits=output.logits.clone())

    def _told_to_device(self, memory: Memory, drawing: Drawing | None) -> Numbers | None:
        """The numbers of a draw in memory that stays where it is."""
        if drawing is None:
            return None
        numbers = self._numbers.get(memory.batch)
        if numbers is None or numbers.device != memory.index.device:
            numbers = self._numbers[memory.batch] = Numbers(memory.batch, memory.index.device)
        numbers.set(drawing)
        return numbers

    def _drawn(
        self, held: Held, places: int, attend: Callable[..., Tensor], drawing: Drawing | None, numbers: Numbers | None
    ) -> tuple[Any, Tensor | None]:
        output = self._call(held, places, attend)
        if drawing is None or numbers is None:
            return output, None
        return output, drawing.of_rows(output.logits[:, -1], numbers)

    def _captured(self, run: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
        """Capture a step that has just run: all that is chosen, compiled and planned on the way is there."""
        if not self._graphs:  # torch refuses a pool whose graphs are all gone (2.11: "use_count > 0", H200, 2026-11-27)
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None or self._stream.device != device:  # the same one: graphs share the memory of their pool
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # libraries keep workspaces for each stream
        torch.cuda.current_stream(device).wait_stream(stream)
        with capturing(graph, pool=self._pool, stream=stream):
            output = run()
        return graph, output


def _of_decoder(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@as_forward
def forward(self: Module, *given: Any, **named: Any) -> Any:
    """The forward of a model whose steps are captured."""
    ids: Any = given[0] if given else named.get("input_ids")
    state: Steps | None = self.__dict__.get(MARK)  # None once another thread has undone it
    if torch.compiler.is_compiling() or len(given) > 1 or state is None or not _is_step(ids, named):
        return type(self).forward(self, *given, **named)  # Dynamo makes no bound method
    run = functools.partial(stock_forward(self), *given, **named)
    return state.attempt(ids, named, run)


def _is_step(ids: Any, named: Mapping[str, Any]) -> bool:
    """Whether a call brings one token for each sequence, and a cache that has some."""
    if type(ids) is not Tensor or ids.ndim != 2 or ids.shape[1] != 1:
        return False
    cache = dynamic_cache.cache_in(named)
    return cache is not None and bool(getattr(cache, "layers", None)) and int(cache.get_seq_length()) > 0


def find_steps(search: Search) -> Iterator[Replaced | Left]:
    """Decoders whose steps may be captured: their attention is LayerZero's, and they generate."""
    if not search.models:
        yield Left("", "", "graph: no model of Transformers whose attention may be exchanged")
    for path, exchange, ours in search.models:
        model, why = exchange.model, ""
        if not ours or _of_decoder(model)._attn_implementation != NAME:
            why = "its attention is not LayerZero's, and so does not read a cache by its length"
        elif not hasattr(model, "prepare_inputs_for_generation") or not model.can_generate():
            why = "it does not generate"
        elif model.config.is_encoder_decoder:
            why = "it has an encoder, too"
        elif has_own_forward(model):
            why = "its forward was exchanged on the instance"
        if why:
            yield Left(path, type(model).__name__, f"graph: {why}")
            continue
        on_host = all(each.device.type in ON_HOST for each in model.parameters())
        how = "keys and values in memory that stays" if on_host else "a CUDA graph a length"
        swap = Swap(model, forward, Steps(model))
        yield Replaced(path, type(model).__name__, "step", how, BY_CALL, None, swap)
