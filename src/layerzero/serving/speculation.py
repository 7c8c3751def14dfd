"""How drafts are made, one configuration for each algorithm: what the draft reads, and whether drafts branch.

Nothing here chooses a kernel. The matcher (:mod:`layerzero.serving.speculative_pairs`) reads the fields of the base
class alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError, refuse

_Limits = dict[str, tuple[object, int, int]]
"""By a field's name what it is, the least and the most that it may be."""


def _check(kind: str, numbers: _Limits) -> None:
    problems = [
        f"{name}: wanted a number from {least} to {most}, got {told(got)}"
        for name, (got, least, most) in numbers.items()
        if type(got) is not int or not least <= got <= most
    ]
    refuse(kind, problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSpeculation:
    """How many tokens are drafted by the sequences of a step: a full batch has no idle arithmetic for drafts.

    Attributes:
        off_from: sequences from which on nothing is drafted.
        few_from: sequences from which on only ``few_tokens`` are.
        few_tokens: these.
    Raises: InvalidCallError for other than ``1 <= few_from <= off_from``, and tokens from 1 to 10.
    """

    off_from: int = 32
    few_from: int = 16
    few_tokens: int = 2

    def __post_init__(self) -> None:
        _check(
            "AdaptiveSpeculation",
            {
                "off_from": (self.off_from, 1, 2**31),
                "few_from": (self.few_from, 1, 2**31),
                "few_tokens": (self.few_tokens, LEAST, MOST),
            },
        )
        if self.few_from > self.off_from:
            wanted = f"few_from: wanted at most off_from, {self.off_from}, got {self.few_from}"
            raise InvalidCallError("AdaptiveSpeculation", [wanted])


LEAST, MOST = 1, 10
"""Tokens of a draft, where there is one."""

_FLAGS = ("enabled", "adaptive_speculation", "share_kv_cache", "cache_kernel_pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """A draft model with a cache of its own, which drafts a chain.

    Attributes:
        enabled: whether anything is drafted.
        num_speculative_tokens: tokens of a draft, 1 to 10; of one that branches, its depth.
        adaptive_speculation: whether a large batch drafts fewer, as ``adaptive`` says.
        share_kv_cache: whether the draft reads and writes the target's cache.
        cache_kernel_pairs: whether a pair is kept for the steps after.
        draft_tp_size, max_draft_tp_size: ranks that share the draft's heads, and the most that there may be.
        target_tp_size: ranks that share the target's heads: pairs of another number are others.
        pipeline_parallel_size: stages that the target's layers are split into; drafts want 1.
        draft_model, target_model: names, for pairs of several models at once.
    Raises: InvalidCallError for a field that is none.
    Source: arXiv:2211.17192.
    """

    algorithm: ClassVar[str] = "generic"
    drafts_with_cache: ClassVar[bool] = True
    """Whether the draft attends over keys and values."""

    enabled: bool = True
    num_speculative_tokens: int = 5
    adaptive_speculation: bool = True
    adaptive: AdaptiveSpeculation = field(default_factory=AdaptiveSpeculation)
    share_kv_cache: bool = False
    cache_kernel_pairs: bool = True
    draft_tp_size: int = 1
    max_draft_tp_size: int = 1
    target_tp_size: int = 1
    pipeline_parallel_size: int = 1
    draft_model: str = ""
    target_model: str = ""

    def __post_init__(self) -> None:
        kind = type(self).__name__
        sizes = ("draft_tp_size", "max_draft_tp_size", "target_tp_size", "pipeline_parallel_size")
        numbers: _Limits = {"num_speculative_tokens": (self.num_speculative_tokens, LEAST, MOST)}
        _check(kind, numbers | {name: (getattr(self, name), 1, 2**20) for name in sizes})
        problems = [
            f"{name}: wanted True or False, got {told(getattr(self, name))}"
            for name in _FLAGS
            if not isinstance(getattr(self, name), bool)
        ]
        problems += [
            f"{name}: wanted a string, got {told(getattr(self, name))}"
            for name in ("draft_model", "target_model")
            if not isinstance(getattr(self, name), str)
        ]
        if self.share_kv_cache and not self.drafts_with_cache:
            problems.append("share_kv_cache: wanted False of drafts that attend to nothing, got True")
        lengths: object = self.adaptive
        if not isinstance(lengths, AdaptiveSpeculation):
            problems.append(f"adaptive: wanted an AdaptiveSpeculation, got {told(lengths)}")
        refuse(kind, problems)

    def tokens_for(self, batch: int) -> int:
        """How many tokens each sequence of a step of so many drafts; 0 where nothing is drafted."""
        if not self.enabled:
            return 0
        if not self.adaptive_speculation or batch < self.adaptive.few_from:
            return self.num_speculative_tokens
        few = min(self.adaptive.few_tokens, self.num_speculative_tokens)
        return 0 if batch >= self.adaptive.off_from else few

    @property
    def branches(self) -> bool:
        """Whether drafts are trees, which the target verifies by a mask."""
        return False

    def nodes_for(self, tokens: int) -> int:
        """Nodes of a draft of this depth."""
        return tokens

    def told(self) -> str:
        """The algorithm and the fields that are not as they are by default."""
        usual, given = asdict(type(self)()), asdict(self)
        own = [f"{name}={getattr(self, name)!r}" for name, each in given.items() if each != usual[name]]
        return f"{self.algorithm}({', '.join(own)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(SpeculativeConfig):
    """A draft of one layer that reads the target's last hidden states; with ``topk`` above 1 drafts branch.

    Attributes:
        topk: children of a node.
        nodes: nodes of a tree that are verified, with ``topk`` above 1; ``topk`` times the depth if None.
    Source: arXiv:2401.15077.
    """

    algorithm: ClassVar[str] = "eagle"
    topk: int = 1
    nodes: int | None = None

    def __post_init__(self) -> None:
        SpeculativeConfig.__post_init__(self)
        nodes = 1 if self.nodes is None else self.nodes
        _check(type(self).__name__, {"topk": (self.topk, 1, 64), "nodes": (nodes, 1, 1024)})
        if self.nodes is not None and not self.branches:
            wanted = f"nodes: wanted None with topk=1, whose drafts are chains, got {self.nodes}"
            raise InvalidCallError(type(self).__name__, [wanted])

    @property
    def branches(self) -> bool:
        return self.topk > 1

    def nodes_for(self, tokens: int) -> int:
        if not self.branches or not tokens:
            return tokens
        return tokens * self.topk if self.nodes is None else self.nodes

    def hidden_layers_of(self, layers: int) -> tuple[int, ...]:
        """The target's layers whose outputs the draft reads."""
        return (layers - 1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(EagleConfig):
    """EAGLE over hidden states of three layers, early, middle and late.

    Attributes:
        hidden_layers: the layers; 2, the middle one and the third last if None.
    Source: arXiv:2503.01840.
    """

    algorithm: ClassVar[str] = "eagle3"
    hidden_layers: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        EagleConfig.__post_init__(self)
        given = self.hidden_layers
        if given is not None and not (
            isinstance(given, tuple)
            and len(given) == 3
            and all(type(each) is int and each >= 0 for each in given)
            and len(set(given)) == 3
        ):
            raise InvalidCallError("Eagle3Config", [f"hidden_layers: wanted three layers or None, got {told(given)}"])

    def hidden_layers_of(self, layers: int) -> tuple[int, ...]:
        if self.hidden_layers is not None:
            return self.hidden_layers
        return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(SpeculativeConfig):
    """Heads on the target that say the tokens behind the next, without a cache of their own.

    Attributes:
        choices: paths of a tree: (0, 2) is the third choice of the second head behind the first choice of the first.
            The likeliest of each head, a chain, if empty.
    Source: arXiv:2401.10774.
    """

    algorithm: ClassVar[str] = "medusa"
    drafts_with_cache: ClassVar[bool] = False
    choices: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        SpeculativeConfig.__post_init__(self)
        most = self.num_speculative_tokens
        right = isinstance(self.choices, tuple) and all(
            isinstance(path, tuple) and 0 < len(path) <= most and all(type(each) is int and each >= 0 for each in path)
            for path in self.choices
        )
        if not right:
            wanted = f"choices: wanted paths of up to {most} numbers from 0 up, got {told(self.choices)}"
            raise InvalidCallError("MedusaConfig", [wanted])
        lost = [path for path in self.choices if len(path) > 1 and path[:-1] not in self.choices]
        if lost:
            raise InvalidCallError("MedusaConfig", [f"choices: wanted the path {lost[0][:-1]} as well, got {lost[0]}"])

    @property
    def branches(self) -> bool:
        return bool(self.choices)

    def nodes_for(self, tokens: int) -> int:
        return sum(len(path) <= tokens for path in self.choices) if self.choices else tokens

    def parents(self, tokens: int) -> list[int]:
        """The parent of each node, for ``lz.verify_speculative``: -1 for the root; nodes by depth."""
        paths = sorted((path for path in self.choices if len(path) <= tokens), key=lambda path: (len(path), path))
        place = {path: number for number, path in enumerate(paths)}
        return [place.get(path[:-1], -1) for path in paths] if paths else list(range(-1, tokens - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramConfig(SpeculativeConfig):
    """What followed the same last tokens earlier in the text, without any draft model.

    Attributes:
        most, least: how many last tokens are looked for, the most first.
    Source: prompt lookup decoding (Saxena, 2023).
    """

    algorithm: ClassVar[str] = "ngram"
    drafts_with_cache: ClassVar[bool] = False
    most: int = 3
    least: int = 1

    def __post_init__(self) -> None:
        SpeculativeConfig.__post_init__(self)
        _check("NGramConfig", {"most": (self.most, 1, 1024), "least": (self.least, 1, self.most)})

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Draft up to so many tokens: those behind the latest place where the text's last tokens stand already."""
        given = list(tokens)
        for size in range(min(self.most, len(given) - 1), self.least - 1, -1):
            last, first = given[-size:], given[-size]
            place = len(given) - size
            while place > 0:
                place -= 1
                if given[place] == first and given[place : place + size] == last:
                    return given[place + size : place + size + count]
        return []
