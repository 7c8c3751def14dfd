"""One layer in few calls: each residual with its norm, one product for queries, keys and values, attention.

What a layer adds last goes into the norm with which the next one begins: it lies on the tensor that is handed on, so
that code which changes that tensor on its way, or calls layers in another order, gets what each computes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.integrations.optimize.attention.dynamic_cache import NAMES, appended, cache_in
from layerzero.integrations.optimize.attention.transformers import COMPARED, NAME, comparing
from layerzero.integrations.optimize.layers.inner import Inner, Table, table_for
from layerzero.integrations.optimize.modules.norms import Normed
from layerzero.integrations.optimize.modules.products import Block
from layerzero.integrations.optimize.swaps.joined_codes import CodedParts, following_weights
from layerzero.integrations.optimize.swaps.stamp import may_write
from layerzero.integrations.optimize.swaps.swap import (
    ABSENT,
    FROM_MANY,
    MARK,
    State,
    Way,
    as_forward,
    by_name,
    serves,
    size_of,
    weight_of,
)
from layerzero.integrations.optimize.swaps.weights import Joined, Packs, why_apart
from layerzero.integrations.transformers import ALONE, ONE_TOKEN, attend_one, attention_forward, theirs_of
from layerzero.integrations.transformers_patches import ROW_ARGUMENTS

_TOLD = frozenset({"position_ids", "use_cache", "cache_position", "return_dict", "output_hidden_states"})
"""Arguments of a layer that change nothing of what it computes, besides those that it reads."""

_READ = frozenset({"attention_mask", "position_embeddings"}) | NAMES


_NORMED = "_layerzero_normed"
"""On the tensor between layers: it, normalised for the next, by which weight, and versions, which ``.data`` keeps."""


def says_anything(name: str, value: object) -> bool:
    """Whether an argument may change what a layer computes."""
    return value is not None and (value is not False or name == "is_causal")


def own_of(module: Module, told: Mapping[str, Any]) -> dict[str, str]:
    """Names of arguments that are parameters of a module, with the names that these have there."""
    names = {id(each): name for name, each in module._parameters.items() if each is not None}
    return {name: names[id(each)] for name, each in told.items() if id(each) in names}


class Heads(CodedParts):
    """The attention of a layer: its products, norms of its heads, and what it tells the function that attends.

    Attributes:
        module: the module of Transformers.
        products: of queries, keys, values and what attended; or of a joined product and what attended.
        sizes: heads, heads of keys and values, entries of a head.
        norms: of queries and keys, or none; ``wide`` where each spans all heads.
        told: arguments by name that are the same in every call, as scaling.
        own: names of those that are parameters of the module (sinks), and the parameters' names, read at each call.
        settings: of attention, for which the layer was proved.
        turned_once: whether cosines and sines have one entry for each pair, as gpt-oss's, not the same for both of it.
        joined, biases: weights and biases of the products as one tensor, of which theirs are parts.
    """

    def __init__(
        self,
        module: Module,
        products: tuple[Module, ...],
        sizes: tuple[int, int, int],
        norms: tuple[Normed, Normed] | None,
        told: Mapping[str, Any],
        *,
        of: str,
        pack: bool,
        turned_once: bool = False,
    ) -> None:
        super().__init__([weight_of(each) for each in products], pack=pack)
        self.module, self.products, self.sizes, self.norms, self.told = module, products, sizes, norms, dict(told)
        self.own = own_of(module, told)
        self.settings, self.turned_once = frozenset({NAME, COMPARED, of}), turned_once
        self.wide = norms is not None and norms[0].weight.shape[0] != sizes[2]
        self.joined: Joined | None = None
        self.biases: Joined | None = None
        self._told_little = ALONE.issuperset(self.told)
        self._window: int | None = self.told.get("sliding_window")

    def join(self, holders: Mapping[int, int], joined: list[Joined]) -> str:
        first = self.products[:-1]
        if len(first) == 1 or self.by_module:
            return ""
        given = [each for product in first if (each := product._parameters["bias"]) is not None]
        if len(given) not in {0, len(first)}:
            return "some have biases"
        weights = [weight_of(each) for each in first]
        why = why_apart(weights, holders) or (why_apart(given, holders) if given else "")
        if not why:
            self.joined = Joined(*weights)
            self.biases = Joined(*given) if given else None
            joined += [each for each in (self.joined, self.biases) if each is not None]
        return why

    @property
    def weights(self) -> list[Tensor]:
        return [weight_of(each) for each in self.products]

    def _one_weight(self) -> tuple[Tensor, Tensor | None] | None:
        """The weight and bias of the joined product, where there is one."""
        first = self.products[:-1]
        if len(first) == 1:
            return weight_of(first[0]), first[0]._parameters["bias"]
        joined, biases = self.joined, self.biases
        if joined is None:
            return None
        if joined.holds(*[each._parameters["weight"] for each in first]):
            now = [each._parameters["bias"] for each in first]
            if biases is None and all(each is None for each in now):
                return joined.weight, None
            if biases is not None and biases.holds(*now):
                return joined.weight, biases.weight
        self.joined = self.biases = None  # moved or cast since; what is left of it is not used
        return None

    def project(self, rows: Tensor, table: Table | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, S, heads, D), normalised where heads are, and rotated where there is a table."""
        heads, kv_heads, width = self.sizes
        product = self._in_one(rows)
        if product is None:
            query, key, value = self._three(rows)
        else:
            if self.norms is not None and table is not None and not self.wide:
                first, second = self.norms
                return lz.split_qkv_norm_rope(
                    product,
                    heads,
                    kv_heads,
                    table.cos,
                    table.sin,
                    table.positions,
                    q_weight=first.weight,
                    k_weight=second.weight,
                    eps=first.norm.eps_for(rows),
                    plus_one=first.form == "one_plus",
                )
            parts = product.view(*rows.shape[:2], heads + 2 * kv_heads, width)
            query, key, value = parts.split_with_sizes([heads, kv_heads, kv_heads], -2)  # torch.split asks 2 us more
        if self.wide and self.norms is not None:
            pairs = zip(self.norms, (query, key), strict=True)
            query, key = (norm.alone(each.flatten(2)).view(each.shape) for norm, each in pairs)
        if table is None:
            return query, key, value
        cos, sin, positions = table.cos, table.sin, table.positions
        if self.norms is None or self.wide:
            lz.rope_(query, key, cos, sin, positions, layout="BSHD")
            return query, key, value
        first, second = self.norms
        plus_one, eps = first.form == "one_plus", first.norm.eps_for(rows)
        pair = first.weight, second.weight
        query, key = lz.qk_norm_rope(query, key, *pair, cos, sin, positions, eps=eps, plus_one=plus_one, layout="BSHD")
        return query, key, value

    @following_weights
    def _in_one(self, rows: Tensor) -> Tensor | None:
        """Queries, keys and values of one product, where there is one."""
        if self.by_module:
            if len(self.products) > 2:
                return self.coded.product(self.products[:-1], rows, self.budget)
            product: Tensor = self.products[0](rows)
            return product
        one = self._one_weight()
        if one is None:
            return None
        return lz.linear(rows, *one, packed=self.forms_for(rows)[0] if len(self.products) == 2 else None)

    @following_weights
    def _three(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of three weights."""
        heads, kv_heads, width = self.sizes
        if self.by_module:
            query, key, value = [each(rows) for each in self.products[:3]]
        else:
            biases, packed = [each._parameters["bias"] for each in self.products], self.forms_for(rows)
            query, key, value = lz.qkv_linear(
                rows,
                *self.weights[:3],
                q_bias=biases[0],
                k_bias=biases[1],
                v_bias=biases[2],
                packed_q=packed[0],
                packed_k=packed[1],
                packed_v=packed[2],
            )
        before = rows.shape[:2]
        return (
            query.reshape(*before, heads, width),
            key.reshape(*before, kv_heads, width),
            value.reshape(*before, kv_heads, width),
        )

    @property
    def setting(self) -> str:
        """The attention that is set, past Transformers' own look-up of a configuration, which takes 2 us."""
        config: Any = self.module.config
        found: str = object.__getattribute__(config, "_attn_implementation_internal")
        return found

    def _function(self) -> Callable[..., Any]:
        """What attends: LayerZero's function, or Transformers' where that is set."""
        setting = self.setting
        if setting == NAME:
            return attention_forward
        return comparing if setting == COMPARED else theirs_of(self.module)

    def _is_alone(self, rows: Tensor, key: Tensor) -> bool:
        """Whether one query without a mask is all that there is to attend to: nothing compares, captures or adds."""
        if not self._told_little or self.setting != NAME or ONE_TOKEN.get() is not None:
            return False
        if self._window is not None and key.shape[2] > self._window:  # attention_forward says what it hides
            return False
        return key.shape[0] == rows.shape[0]

    def _given(self) -> dict[str, Any]:
        """What the module tells the function that attends, its own parameters as they are now."""
        if not self.own:
            return self.told
        return {**self.told, **{name: self.module._parameters[each] for name, each in self.own.items()}}

    def _table(self, turned: tuple[Tensor, Tensor] | None, rows: Tensor) -> Table | None:
        return None if turned is None else table_for(*turned, *rows.shape[:2], once=self.turned_once)

    def attend(self, rows: Tensor, named: Mapping[str, Any]) -> Tensor:
        """What the module gives for normalised rows, in memory of its own."""
        module: Any = self.module
        turned = named.get("position_embeddings")
        query, key, value = self.project(rows, self._table(turned, rows))
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        cache, mask = cache_in(named), named.get("attention_mask")
        if cache is not None:
            key, value = appended(cache, key, value, module.layer_idx)
        if mask is None and rows.shape[1] == 1 and self._is_alone(rows, key):
            attended = attend_one(query, key.transpose(1, 2), value.transpose(1, 2), **self._given())
        else:
            told = self._given()
            if ROW_ARGUMENTS[0] in named:
                told = {**told, **{name: named[name] for name in ROW_ARGUMENTS}}
            attended = self._function()(module, query.transpose(1, 2), key, value, mask, **told)[0]
        return self._last(attended.reshape(*rows.shape[:2], -1))

    @following_weights
    def _last(self, attended: Tensor) -> Tensor:
        """What leaves the module of what attended (B, S, heads * D)."""
        last = self.products[-1]
        if self.by_module:
            output: Tensor = last(attended)
            return output
        return lz.linear(attended, weight_of(last), last._parameters["bias"], packed=self.forms_for(attended)[-1])


class Layer(State):
    """A decoder layer, or what an encoder's layer has in common with it.

    Attributes:
        heads: its attention.
        block: its feed-forward block.
        norms: before attention, behind it, before the block, behind it; None where there is none.
        others: further modules with weights.
        following: the norm with which the next layer begins.
        order: names of the arguments behind the hidden states that may come by place.
    """

    order: tuple[str, ...] = ()

    def __init__(
        self, heads: Heads, block: Block | Inner, norms: tuple[Normed | None, ...], others: tuple[Module, ...] = ()
    ) -> None:
        super().__init__()
        self.heads, self.block, self.norms = heads, block, norms
        self.called = block.module if isinstance(block, Inner) else None
        self.following: Normed | None = None
        normed = [each.module for each in (*norms, *(heads.norms or ())) if each is not None]
        modules = (*heads.products, *block.products, *normed, *others)
        self._learned = [(each, name) for each in modules for name in each._parameters]
        self._learned += [(heads.module, name) for name in heads.own.values()]
        self._rows = weight_of(heads.products[0]).shape[0]

    @property
    def learned(self) -> list[Tensor | None]:
        """Weights and biases of all products and norms, as they are now. Raises: KeyError where some are computed."""
        return [each._parameters[name] for each, name in self._learned]

    @property
    def bytes(self) -> int:
        made = sum(each.bytes for each in self.norms if each is not None)
        return self.heads.bytes + self.block.bytes + made

    @property
    def parts(self) -> tuple[Packs, ...]:
        return self.heads, self.block

    def forget(self) -> None:
        self.heads.forget()
        self.block.forget()

    @property
    def may_pack(self) -> bool:
        """Whether kernels may want another form of a weight."""
        return self.heads.may_pack or self.block.may_pack

    def take(self, ways: Sequence[Way], many: int = FROM_MANY) -> None:
        super().take(ways, many)
        for each in self.parts:
            each.take(ways, many)

    def is_proved(self, hidden: Tensor) -> bool:
        """Whether rows, weights and settings are those of the proof, and nothing wants the module's own code."""
        try:
            learned = self.learned
        except KeyError:  # pruned or parametrised since: the modules compute them
            return False
        weight = self.heads.products[0]._parameters["weight"]
        if weight is None or not serves(self, hidden, *learned) or hidden.ndim != 3:
            return False
        if hidden.dtype is torch.float64:  # cast since: its norms may compute in float32 there
            return False
        return (
            hidden.dtype == weight.dtype
            and hidden.device == weight.device
            and weight.shape[0] == self._rows  # heads were pruned since
            and self.heads.setting in self.heads.settings
        )

    def takes(self, named: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments was proved."""
        for name, value in named.items():
            if name not in _READ and name not in _TOLD and says_anything(name, value):
                return False
        return isinstance(named.get("position_embeddings"), tuple)

    def compute(self, hidden: Tensor, named: Mapping[str, Any]) -> Tensor:
        before, behind, before_block, behind_block = self.norms
        ours = ONE_TOKEN.get() is not None and _NORMED in hidden.__dict__  # the layer before made it, and nothing looks
        rows = hidden if before is None else _begun(hidden, before)
        attended = self.heads.attend(rows, named)
        if behind is not None:
            attended = behind.alone(attended)
        if before_block is None:
            rows = total = attended.add_(hidden)
        elif ours:
            rows, total = before_block.over_both(hidden, attended)
        else:
            rows, total = before_block.of_sum(hidden, attended), attended
        output: Tensor = self.block.compute(rows)
        if behind_block is not None:
            output = behind_block.alone(output)
        following = self.following
        # in inference mode a write in between would show nowhere
        if following is None or following.is_computed or output.is_inference() or following.weight.is_inference():
            return output.add_(total)
        normed, output = following.over_both(total, output)  # both are this layer's own
        setattr(output, _NORMED, (normed, following.weight, output._version, following.weight._version))
        return output


@as_forward
def forward(self: Module, hidden_states: Tensor = ABSENT, /, *others: Any, **named: Any) -> Any:
    """The forward of a layer; arguments of Transformers' layers."""
    if hidden_states is ABSENT:
        return by_name(forward, self, named)
    state: Layer | None = self.__dict__.get(MARK)  # None once another thread has undone it
    if state is None or len(others) > len(state.order):
        return type(self).forward(self, hidden_states, *others, **named)
    if state.own_at and state.own_at[size_of(hidden_states, state.many)]:
        return type(self).forward(self, hidden_states, *others, **named)
    told = {**dict(zip(state.order, others, strict=False)), **named} if others else named
    if not state.is_proved(hidden_states) or not state.takes(told):
        return type(self).forward(self, hidden_states, *others, **named)
    if self._forward_pre_hooks and may_write(self._forward_pre_hooks):
        vars(hidden_states).pop(_NORMED, None)
    output = state.compute(hidden_states, told)
    if self._forward_hooks and may_write(self._forward_hooks):
        vars(output).pop(_NORMED, None)
    return output


def _begun(hidden: Tensor, norm: Normed) -> Tensor:
    """The norm with which a layer begins, computed already by the one before where nothing came between."""
    kept: tuple[Tensor, Tensor, int, int] | None = hidden.__dict__.pop(_NORMED, None)
    if kept is not None and kept[1] is norm.weight and kept[2:] == (hidden._version, norm.weight._version):
        return kept[0]
    return norm.alone(hidden)
