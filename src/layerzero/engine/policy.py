"""A policy: what the operator wants, as one immutable value that selection reads."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.errors import PolicyError
from layerzero.core.facts import FACT_ALIASES, Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Candidate, Term
from layerzero.engine.settings import SETTINGS, nearest
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, OPERATIONS, PLAIN_FUNCTIONS, PLAIN_OPERATIONS, current_name

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARISON = re.compile(r"^\s*(>=|<=|!=|==|>|<)\s*(-?\d+(?:\.\d+)?)\s*$")


@dataclass(frozen=True, slots=True)
class Condition:
    """A fact and what it must be: any of some texts, each a comparison (``>=90``), a glob, or a plain value."""

    fact: str
    texts: tuple[str, ...]

    def holds(self, facts: Facts) -> bool:
        """Whether the call satisfies it; a fact that the call lacks satisfies nothing."""
        got = facts.layout if self.fact == "layout" else facts.get(self.fact)
        return got is not None and any(_holds(text, got) for text in self.texts)


def _holds(text: str, got: object) -> bool:
    comparison = _COMPARISON.match(text)
    if comparison:
        return isinstance(got, (int, float)) and _COMPARISONS[comparison[1]](got, float(comparison[2]))
    plain = dtype_name(got) if isinstance(got, torch.dtype) else str(got)
    return fnmatch.fnmatchcase(plain.lower(), text.lower())


def _condition(fact: str, wanted: object, where: str) -> Condition:
    """Parse what a rule says about a fact. Raises: PolicyError for what could never match."""
    texts = []
    for each in wanted if isinstance(wanted, list) else [wanted]:
        if not isinstance(each, (str, int, float)):
            raise PolicyError(f"{where}: {fact}: wanted a value, a comparison or a glob, got {each!r}")
        text = str(each).strip()
        if text[:1] in "<>=!" and not _COMPARISON.match(text):
            raise PolicyError(f"{where}: {fact}: wanted a comparison with a number such as '>=90', got {each!r}")
        if fact == "dtype" and not any(mark in text for mark in "*?["):
            try:
                text = dtype_name(dtype_named(text))
            except ValueError as error:
                raise PolicyError(f"{where}: {error}") from None
        texts.append(text)
    return Condition(fact, tuple(texts))


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """Preferences that hold where every condition holds."""

    conditions: tuple[Condition, ...]
    operation: str = "*"
    prefer: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def matches(self, facts: Facts) -> bool:
        """Whether the rule applies to this call."""
        return covers(self.operation, facts) and all(condition.holds(facts) for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class Lock:
    """An operation pattern bound to one kernel.

    Attributes:
        operation: operation, alias, function (all operations below its name, too) or glob.
        kernel: kernel id, alias, library or glob.
        otherwise: ``error`` if that kernel is not legal, or ``select`` as if there were no lock, with a warning.
    """

    operation: str
    kernel: str
    otherwise: str = "error"


@dataclass(frozen=True)
class Policy:
    """Every effective setting. Equal policies are one object, so a table of plans belongs to each.

    Attributes:
        values: effective settings by key, as sorted pairs.
        locks: bound operations, the one that wins first.
        rules: conditional preferences.
    """

    values: tuple[tuple[str, object], ...]
    locks: tuple[Lock, ...] = ()
    rules: tuple[PolicyRule, ...] = ()
    _by_name: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._by_name.update(self.values)
        # Read once for each refused candidate or hit; attributes are cheaper than the mapping.
        for name in _ATTRIBUTES:
            object.__setattr__(self, name.replace(".", "_"), self._by_name[name])
        object.__setattr__(self, "invariant", self.batch_invariant or self.require_tp_invariant)
        named = self.backend_isolation != "in_process" and (self.isolate or self["backend_containers"])
        object.__setattr__(self, "isolating", bool(named or self["isolation.pythons"]))
        if self.jit == "inline":
            object.__setattr__(self, "allow_jit_compile", True)
        object.__setattr__(self, "_hash", hash((self.values, self.locks, self.rules)))

    enabled: bool = field(init=False, compare=False, repr=False)
    fallback_enabled: bool = field(init=False, compare=False, repr=False)
    strict_mode: bool = field(init=False, compare=False, repr=False)
    allow_adaptation: bool = field(init=False, compare=False, repr=False)
    allow_jit_compile: bool = field(init=False, compare=False, repr=False)
    jit: str = field(init=False, compare=False, repr=False)
    deterministic: bool = field(init=False, compare=False, repr=False)
    batch_invariant: bool = field(init=False, compare=False, repr=False)
    require_tp_invariant: bool = field(init=False, compare=False, repr=False)
    invariant: bool = field(init=False, compare=False, repr=False)
    """Whether bits must depend on nothing else (:mod:`layerzero.engine.proofs`), so that times decide nothing."""
    require_vetting: bool = field(init=False, compare=False, repr=False)
    log_selections: bool = field(init=False, compare=False, repr=False)
    debug: bool = field(init=False, compare=False, repr=False)
    layout: str | None = field(init=False, compare=False, repr=False)
    backend_isolation: str = field(init=False, compare=False, repr=False)
    isolate: tuple[str, ...] = field(init=False, compare=False, repr=False)
    isolating: bool = field(init=False, compare=False, repr=False)
    """Whether any kernel runs in a process of its own (:mod:`layerzero.engine.isolation`)."""
    memory_headroom_mb: int = field(init=False, compare=False, repr=False)
    prefer_sources: tuple[str, ...] = field(init=False, compare=False, repr=False)
    avoid_sources: tuple[str, ...] = field(init=False, compare=False, repr=False)
    allow: tuple[str, ...] = field(init=False, compare=False, repr=False)
    deny: tuple[str, ...] = field(init=False, compare=False, repr=False)
    sampling_rate: float = field(init=False, compare=False, repr=False)
    vet_in_background: bool = field(init=False, compare=False, repr=False)
    cache_enabled: bool = field(init=False, compare=False, repr=False)
    cache_max_size: int = field(init=False, compare=False, repr=False)
    descriptors: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def lock_for(self, facts: Facts, kernels: Iterable[Kernel]) -> Lock | None:
        """The first lock on one of a call's kernels that covers it: of the latest source, then of fewest operations.

        A function's name covers all operations below it, too: its kernel is locked wherever it serves.
        """
        if not self.locks:
            return None
        name, own = str(facts["operation"]), tuple(kernels)
        for lock in self.locks:
            covering = covers(lock.operation, facts) or is_above(lock.operation, name)
            if covering and any(names_kernel(lock.kernel, kernel) for kernel in own):
                return lock
        return None


_ATTRIBUTES = (
    *("enabled", "fallback_enabled", "strict_mode", "allow_adaptation", "allow_jit_compile", "deterministic"),
    *("batch_invariant", "require_tp_invariant"),
    *("jit", "require_vetting", "log_selections", "debug", "layout", "memory_headroom_mb"),
    *("prefer_sources", "avoid_sources", "allow", "deny"),
    *("sampling_rate", "vet_in_background", "cache.enabled", "cache.max_size", "descriptors"),
    *("backend_isolation", "isolate"),
)


def covers(pattern: str, facts: Facts) -> bool:
    """Whether an operation, alias, function name or glob covers this call; an operation's name means itself alone."""
    if not _means(pattern, str(facts["operation"])):
        return False
    implied = OPERATION_ALIASES[pattern][1] if pattern in OPERATION_ALIASES else {}
    return all(facts.get(fact) == value for fact, value in implied.items())


def _means(pattern: str, operation: str) -> bool:
    if pattern in OPERATION_ALIASES:
        return operation in OPERATION_ALIASES[pattern][0]
    function = FUNCTIONS.get(pattern) or PLAIN_FUNCTIONS.get(pattern)
    if function is not None:
        return any(each.name == operation for each in function.operations)
    return fnmatch.fnmatchcase(operation, pattern)


def narrowest_last(locks: Mapping[str, Any]) -> dict[str, Any]:
    """The locks of one source so that the later one wins: an operation's own name last, those of most operations first.

    Those of as many operations stay as they are said.
    """

    def breadth(said: str) -> int:
        pattern = current_name(said)
        others = (name for name in (*OPERATIONS, *PLAIN_OPERATIONS) if name != pattern)
        return sum(_means(pattern, name) or is_above(pattern, name) for name in others)

    return dict(sorted(locks.items(), key=lambda each: -breadth(each[0]))) if len(locks) > 1 else dict(locks)


def is_above(pattern: str, operation: str) -> bool:
    """Whether a function's name is the beginning of an operation's: ``attention`` of ``attention.gqa.decode.paged``."""
    return pattern in FUNCTIONS and operation.startswith(f"{pattern}.")


def meant(pattern: str, known: Iterable[str]) -> str:
    """What a name of no operation may have meant, as the end of an error message: all below it, or the nearest."""
    names = list(known)
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"; did you mean {pattern + '.*'!r}, all below it?"
    return nearest(pattern, names)


def names_kernel(pattern: str, kernel: Kernel) -> bool:
    """Whether a kernel id, alias, library name or glob means this kernel."""
    if pattern == kernel.source:
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for name in (kernel.id, *kernel.aliases))


def names_any(patterns: Iterable[str], kernel: Kernel) -> bool:
    """Whether any of these means this kernel."""
    return any(names_kernel(pattern, kernel) for pattern in patterns)


def bound_by(lock: Lock | None, judged: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that a lock leaves: those that it names; all where it names none, or may be passed over."""
    every = list(judged)
    if lock is None or lock.otherwise == "select":
        return every
    return [each for each in every if names_kernel(lock.kernel, each.kernel)] or every


def parse_policy(values: Mapping[str, Any]) -> Policy:
    """Make a policy from effective settings. :mod:`layerzero.engine.setting_names` checks the names in it.

    Raises: PolicyError for locks or rules that could never hold.
    """
    policy, problems = read_policy(values)
    if problems:
        raise PolicyError(*problems)
    return policy


def read_policy(values: Mapping[str, Any]) -> tuple[Policy, list[str]]:
    """The same, with what is wrong in place of an error; the policy has what is right of each lock and rule."""
    problems: list[str] = []
    locks = [_lock(pattern, target, problems) for pattern, target in values["locks"].items()]
    rules = tuple([_rule(index, rule, problems) for index, rule in enumerate(values["rules"])])
    frozen = tuple(sorted((name, _frozen(values[name])) for name in SETTINGS if name not in ("locks", "rules")))
    return Policy(frozen, tuple(lock for lock in locks[::-1] if lock is not None), rules), problems


def _frozen(value: object) -> object:
    if isinstance(value, Mapping):
        return tuple(sorted((name, _frozen(each)) for name, each in value.items()))
    return tuple(value) if isinstance(value, list) else value


def _lock(pattern: str, target: object, problems: list[str]) -> Lock | None:
    now = current_name(pattern)
    if isinstance(target, str):
        return Lock(now, target)
    if isinstance(target, Mapping) and isinstance(target.get("kernel"), str) and set(target) <= {"kernel", "otherwise"}:
        otherwise = target.get("otherwise", "error")
        if otherwise in ("error", "select"):
            return Lock(now, target["kernel"], otherwise)
    wanted = f"locks: {pattern}: wanted a kernel id, or {{kernel: id, otherwise: error|select}}"
    problems.append(f"{wanted}, got {target!r}")
    return None


_RULE_ACTIONS = {"prefer": "prefer", "avoid": "avoid", "avoid_sources": "avoid", "deny": "deny"}


def _rule(index: int, rule: Mapping[str, Any], problems: list[str]) -> PolicyRule:
    where = f"rules[{index}]"
    known = ("match", *_RULE_ACTIONS)
    problems += [f"{where}: unknown key {key!r}{nearest(key, known)}" for key in rule if key not in known]
    match = rule.get("match")
    if not isinstance(match, Mapping) or not match:
        problems.append(f"{where}: wanted `match:` with at least one fact, got {match!r}")
        match = {}
    actions: dict[str, tuple[str, ...]] = {}
    for key, value in rule.items():
        if key not in _RULE_ACTIONS:
            continue
        named = [value] if isinstance(value, str) else value
        if isinstance(named, list) and all(isinstance(each, str) for each in named):
            actions[_RULE_ACTIONS[key]] = tuple(named)
        else:
            problems.append(f"{where}: {key}: wanted libraries or kernel globs, got {value!r}")
    if rule.keys() <= {"match"}:
        problems.append(f"{where}: wanted prefer, avoid or deny, got only `match:`")
    operation = "*"
    conditions = []
    for fact, wanted in match.items():
        if FACT_ALIASES.get(fact, fact) == "operation":
            operation = current_name(str(wanted))
        elif fact not in known_facts():
            problems.append(f"{where}: unknown fact {fact!r}{nearest(fact, known_facts())}")
        else:
            try:
                conditions.append(_condition(fact, wanted, where))
            except PolicyError as error:
                problems += error.problems
    return PolicyRule(tuple(conditions), operation, **actions)


def known_facts() -> frozenset[str]:
    """Every fact name that a rule may match."""
    known = (*OPERATIONS.values(), *PLAIN_OPERATIONS.values())
    return frozenset(FACT_ALIASES).union(*({*each.facts, *each.aliases} for each in known))


PREFER_POINTS = 20.0
AVOID_POINTS = -50.0

Named = tuple[Sequence[str], Sequence[str]]
"""What policy prefers and avoids for a call."""


def may_come_first(kernel: Kernel, facts: Facts, policy: Policy) -> bool:
    """Whether a priority alone may put no kernel of another library before it.

    That is what torch's own function runs, and what the user wants: what a program itself registers, and what policy
    prefers.
    """
    if policy["unmeasured"] != "stock":
        return False
    return kernel.is_stock(facts) or _is_wanted(kernel, named(facts, policy)[0])


def kept_first(
    legal: Sequence[Candidate], facts: Facts, policy: Policy, asked: Named, priority: Mapping[str, int]
) -> tuple[str | None, frozenset[str]]:
    """The kernel that torch's own function would take, and with it those that it does not hold back.

    Of several of torch's that is the one of the highest priority, unless the user avoids it; without one, none is kept.
    """
    if policy["unmeasured"] != "stock":
        return None, frozenset()
    prefer, avoid = asked
    stock = [
        (-priority[each.kernel.id], each.kernel.id)
        for each in legal
        if each.kernel.is_stock(facts) and not (avoid and names_any(avoid, each.kernel))
    ]
    if not stock:
        return None, frozenset()
    taken = min(stock)[1]
    return taken, frozenset([taken, *[each.kernel.id for each in legal if _is_wanted(each.kernel, prefer)]])


def _is_wanted(kernel: Kernel, preferred: Sequence[str]) -> bool:
    return kernel.backend.origin in ("code", "decorator") or (bool(preferred) and names_any(preferred, kernel))


def named(facts: Facts, policy: Policy) -> Named:
    """What policy prefers and avoids for a call, its rules included."""
    prefer, avoid = policy.prefer_sources, policy.avoid_sources
    for rule in policy.rules:
        if (rule.prefer or rule.avoid) and rule.matches(facts):
            prefer, avoid = (*prefer, *rule.prefer), (*avoid, *rule.avoid)
    return prefer, avoid


def policy_terms(kernel: Kernel, prefer: Sequence[str], avoid: Sequence[str]) -> Sequence[Term]:
    """What the user's preference is worth."""
    terms = [Term("prefer", PREFER_POINTS)] if prefer and names_any(prefer, kernel) else []
    if avoid and names_any(avoid, kernel):
        terms.append(Term("avoid", AVOID_POINTS))
    return terms
