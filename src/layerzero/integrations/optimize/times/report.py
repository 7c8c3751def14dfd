"""What ``lz.optimize`` did: what was replaced by what, what was left and why; and the way back."""

from __future__ import annotations

import copy
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from layerzero.core.errors import refuse
from layerzero.integrations.optimize.swaps.candidate import Candidate
from layerzero.integrations.optimize.swaps.codes import Requested, compared, fell_back
from layerzero.integrations.optimize.swaps.swap import SIZES, Exchange, State, Swap
from layerzero.integrations.optimize.swaps.weights import Joined, Packs
from layerzero.integrations.optimize.times.module_times import COMPILED, Spent, is_compiled_with, table
from layerzero.integrations.optimize.times.timing import Paced
from layerzero.integrations.optimize.times.workload import TimeLeft, Workload, perplexity
from layerzero.tuning.measurement.tune import Tuned

NO_TIME = "no time was left to check it (budget_s)"
"""Why a module stays that was not looked at."""

BY_CALL = "by call"
"""The kernel of what no few rows can say."""

BUSY = 0.9  # of its time a thread has a core on an idle machine; with less, gains are noise
NOISE = 0.2  # by which even and odd rounds of random rows differ where other programs compute, 0.02 where none does

PADDING = (
    "padded batches: positions behind a row's last real token give zeros, where they gave what nothing should read; "
    "lz.optimize(model, padding=False) leaves them"
)


@dataclass
class Replaced:
    """One module with another forward.

    Attributes:
        path: its name in the model; empty for the model itself.
        module: the name of its class.
        kind: those of one kind were timed together.
        calls: the function of LayerZero that computes it.
        kernel: the kernels that the inputs' calls get, or the one that a few rows get; each call gets its own.
        error: its largest difference from the original on random input, in units of the largest value; None for
            attention, which is compared as a part of the whole model, where inputs are given.
        exchange: puts it on or off.
        candidate: the example by which a single module is timed; None for others.
        mends: whether it stays whatever its time, as the module's own code is wrong on this CPU.
    """

    path: str
    module: str
    kind: str
    calls: str
    kernel: str | None
    error: float | None
    exchange: Exchange | None = field(default=None, repr=False, compare=False)
    candidate: Candidate | None = field(default=None, repr=False, compare=False)
    mends: bool = False

    @classmethod
    def of(cls, path: str, found: Candidate) -> Replaced:
        """A module that a candidate was checked for."""
        module, timed = type(found.swap.module).__name__, found if found.timed else None
        told = found.kind, found.calls, found.kernel, found.error
        return cls(path, module, *told, found.swap, timed, found.mends)

    @property
    def swap(self) -> Swap:
        """The exchange of what is one module."""
        assert isinstance(self.exchange, Swap)
        return self.exchange


def switch_all(found: Iterable[Replaced], on: bool) -> None:
    """Put them all on, or off."""
    for each in found:
        if each.exchange is not None:
            each.exchange.on() if on else each.exchange.off()


def _take_off(each: Replaced) -> None:
    """Take it off for good: its state is gone with it, and no cycle keeps packed forms."""
    if each.exchange is not None:
        each.exchange.off()
        if isinstance(each.exchange, Swap):
            each.exchange.state.stamp = None  # which has the state in a module's attributes


@dataclass
class Left:
    """One module as it was.

    Attributes:
        path, module: as for what was replaced.
        why: the reason.
    """

    path: str
    module: str
    why: str


@dataclass
class Timed:
    """What the rounds of a whole model said.

    Attributes:
        stock_s, after_s: a run before, and with what was kept; medians.
        gains: of each kind, how much longer a run takes without it, in parts of a run with everything.
        dropped: kinds that were taken out again.
        rounds: how many rounds the model before and after was timed in.
        speedup: how many times as fast, the median of the rounds' ratios.
        together: whether there was no time to time kinds apart; each then has the gain of all.
        core_share: how much of that time the thread had a core.
    """

    stock_s: float
    after_s: float
    gains: dict[str, float] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    rounds: int = 0
    speedup: float = 1.0
    together: bool = False
    core_share: float = 1.0

    def __str__(self) -> str:
        lines = [f"a run takes {self.stock_s * 1e3:.2f} ms; nothing was kept, so it is as before"]
        if len(self.dropped) < len(self.gains):
            times = f"before {self.stock_s * 1e3:.2f} ms, after {self.after_s * 1e3:.2f} ms"
            how = f"median of the ratios of {self.rounds} rounds, in each of which both ran"
            lines = [f"{times}: {self.speedup:.2f} times as fast ({how})"]
        if self.core_share < BUSY:
            lines.append(f"its thread had a core {self.core_share:.0%} of the time: optimize again on an idle machine")
        if self.together:
            kinds = ", ".join(self.gains)
            verdict = "taken out again" if self.dropped else "kept"
            return "\n".join((*lines, f"  {kinds}: {verdict} together; there was no time to time each apart"))
        for kind, gain in self.gains.items():
            kept = "taken out again" if kind in self.dropped else "kept"
            lines.append(f"  {kind}: {gain:+.1%} for the whole model, {kept}")
        return "\n".join(lines)


@dataclass
class Optimized:
    """The report of :func:`layerzero.optimize`; print it.

    Attributes:
        replaced: the modules that LayerZero computes.
        left: those that are as they were.
        timed: the whole model before and after, and by kind; None where no inputs were given.
        tune: what to do next.
        error: largest difference of the model's own output, in units of its largest value; None without inputs.
        distance: where weights were quantised: how far the model's output is from its own, relative to its size, and
            the cosine of both. None without inputs.
        perplexity: there, of the inputs' tokens, before and after; None where inputs have none, or outputs no logits.
        weight_bytes: memory of parameters and buffers, each once.
        memory_limit: what packed forms may take together; None without a bound.
        spent: time by modules before and after; None without inputs.
        tuned: what was measured for the inputs' calls; None without inputs.
        refused: why known times of what was measured do not count here, and how many: another device, other versions.
        paced: what was timed on random input, by shapes of modules; empty with inputs.
        large_pages: bytes of the weights that lie in pages of 2 MiB since, also after undo().
        emulated: a line on the model's dtypes whose products its CPU emulates, and what is done; empty for none.
        stock: what the times before are of: libraries, their versions, and the machine; empty without inputs.
        time: what was left of the time, and what was left out to keep it.
        seconds: what all of it took.
        kept_sizes: of quantised products, which sizes of calls run the module's own code, and why.
    """

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    timed: Timed | None = None
    tune: list[str] = field(default_factory=list)
    error: float | None = None
    distance: tuple[float, float] | None = None
    perplexity: tuple[float, float] | None = None
    weight_bytes: int = 0
    memory_limit: int | None = None
    spent: Spent | None = None
    tuned: Tuned | None = None
    refused: Mapping[str, int] = field(default_factory=dict)
    paced: list[Paced] = field(default_factory=list)
    large_pages: int = 0
    emulated: str = ""
    stock: str = ""
    time: TimeLeft = field(default_factory=lambda: TimeLeft(None))
    seconds: float = 0.0
    kept_sizes: list[str] = field(default_factory=list)
    _joined: list[Joined] = field(default_factory=list, repr=False)
    _text: str = field(default="", repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has what is text and numbers: the modules that it speaks of lie in the model."""
        replaced = [replace(each, exchange=None, candidate=None) for each in self.replaced]
        return object.__new__, (type(self),), vars(self) | {"replaced": replaced, "_joined": [], "_text": str(self)}

    def __copy__(self) -> Optimized:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        """One of the copied modules, where it is copied along with the model."""
        memo[id(self)] = twin = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def sort(self, found: Iterable[Replaced | Left], compiled: Sequence[str] = ()) -> Iterator[Replaced]:
        """What may be put on; what is left is kept here, and so are forwards that torch.compile has no use for."""
        for each in found:
            if isinstance(each, Left):
                self.left.append(each)
            elif isinstance(each.exchange, Swap) and is_compiled_with(each.path, compiled):
                self.left.append(Left(each.path, each.module, f"{each.kind}: {COMPILED}"))
            else:
                yield each

    def put_on(self, found: Replaced) -> None:
        assert found.exchange is not None
        found.exchange.on()
        self.replaced.append(found)

    @property
    def states(self) -> list[State]:
        """What the new forwards of modules keep."""
        return [each.exchange.state for each in self.replaced if isinstance(each.exchange, Swap)]

    @property
    def extra_bytes(self) -> int:
        """Memory that the replaced modules keep now besides the model's weights: packed forms are made when used."""
        return sum(each.bytes for each in self._states_on)

    @property
    def packs(self) -> list[Packs]:
        """All that keeps packed forms now."""
        return [part for state in self._states_on for part in state.parts if isinstance(part, Packs)]

    @property
    def made(self) -> list[Requested]:
        """What was quantised because the caller wanted it."""
        return [each for each in self._states_on if isinstance(each, Requested)]

    def compare(self, pairs: Sequence[tuple[Tensor, ...]], workload: Workload) -> None:
        """Note how far outputs with quantised weights are from the model's own, pair by pair."""
        if not pairs or not any(each.loss for each in self.made):
            return
        self.distance = compared(*zip(*pairs, strict=True))
        if workload.tokens is not None:
            found = [[perplexity(each, workload.tokens) for each in pair] for pair in pairs]
            self.perplexity = next(((was, now) for now, was in found if now is not None and was is not None), None)

    def _quantised(self) -> list[str]:
        """What was quantised, and what it loses."""
        made = self.made
        if not made:
            return []
        codes, own = sum(each.code_bytes for each in made), sum(each.own_bytes for each in made)
        to = ", ".join(dict.fromkeys(each.kind for each in made))
        lines = [f"{len(made)} weights in {to}: {codes / 1e6:.1f} MB beside {own / 1e6:.1f} MB of theirs, which stay"]
        lines += fell_back(made)
        losses: dict[str, list[float]] = defaultdict(list)
        for each in self.replaced:
            if isinstance(state := getattr(each.exchange, "state", None), Requested):
                losses[each.path.rpartition(".")[2] or "(model)"].append(state.loss)
        for name, of in losses.items():
            lines.append(f"  {name}: {len(of)} lose {statistics.median(of):.2%} of their output, {max(of):.2%} at most")
        if self.distance is not None:
            relative, cosine = self.distance
            lines.append(f"  the model's output is {relative:.2g} of its size from its own, cosine {cosine:.6f}")
        if self.perplexity is not None:
            was, now = self.perplexity
            lines.append(
                f"  perplexity of the inputs' tokens: {was:.4g} before, {now:.4g} after ({now / was - 1:+.2%})"
            )
        return lines

    @property
    def _states_on(self) -> list[State]:
        swaps = [each.exchange for each in self.replaced if isinstance(each.exchange, Swap)]
        return [each.state for each in swaps if each.is_on]

    def _memory(self) -> str:
        """What weights take, what comes of which forms, and what had no room."""
        weights, others = self.weight_bytes, Counter[str]()
        for state in self._states_on:
            others[state.keeps] += state.bytes  # what is no packed form has a name
        extra = others.pop("", 0)
        text = f"memory: {weights / 1e6:.1f} MB of weights before, {(weights + extra) / 1e6:.1f} MB with packed forms"
        packs = self.packs
        text += ", which are made when a kernel first wants one" if packs and not extra else ""
        counts = Counter(count for each in packs for count in each.forms if count)
        kept = [f"{weights} weights in {forms} form{'s' * (forms > 1)}" for forms, weights in sorted(counts.items())]
        text += f" ({', '.join(kept)}, besides the weights)" if kept else ""
        barred = sum(each.barred for each in packs)
        if self.memory_limit is not None:
            text += f"; at most {self.memory_limit / 1e6:.1f} MB of forms, {barred} more had no room"
        elif barred:
            text += f"; {barred} more had no room in half of the memory that was free"
        text += "".join(f"; {each / 1e6:.1f} MB of {told}" for told, each in others.items() if each)
        if self.large_pages:
            text += f"; {self.large_pages / 1e6:.1f} MB of the weights lie in pages of 2 MiB"
        return text

    @property
    def is_on(self) -> bool:
        """Whether anything of it is in place."""
        return any(each.exchange is not None and each.exchange.is_on for each in self.replaced)

    def _forget(self) -> None:
        """Let go of packed forms that kernels left which were only tried."""
        for state in self.states:
            state.forget()

    def take_out(self, found: Iterable[Replaced], why: str | Callable[[Replaced], str]) -> None:
        """Give modules their own code back, and say why."""
        for each in list(found):
            _take_off(each)
            self.replaced[:] = [other for other in self.replaced if other is not each]
            self.left.append(Left(each.path, each.module, why if isinstance(why, str) else why(each)))

    def undo(self) -> None:
        """Give every module its own forward back, and every weight memory of its own. Values stay as they are now.

        Raises: InvalidCallError for a report that came from a pickle.
        """
        if self._text:
            wanted = "wanted the report that lz.optimize returned, or its copy.deepcopy with the model"
            refuse("undo", [f"{wanted}; got a pickle's, without modules: a model that was pickled runs its own code"])
        for each in reversed(self.replaced):
            _take_off(each)
            each.exchange = each.candidate = None
        for joined in self._joined:
            joined.part()
        self._joined = []

    def __str__(self) -> str:
        lines: list[str] = []
        if self._text:
            return self._text
        if self.replaced:
            rows = [((each.module, each.calls, each.kernel or "none"), each.path, each.error) for each in self.replaced]
            lines += table(("replaced", "module", "by", "kernel", "error"), rows)
        else:
            lines.append("nothing was replaced")
        if self.left:
            reasons = [((each.module, each.why), each.path, None) for each in self.left]
            lines += ["", *table(("left", "module", "why"), reasons)]
        lines += ["", self._memory(), *filter(None, [self.emulated]), *self._quantised(), *self.kept_sizes]
        late = sum(each.late for each in self.packs)
        if late:
            lines.append(f"{late} writes into weights were seen late: some calls computed with what was packed before")
        gone = sum(each.asks and each.stamp is not None and not each.stamp.last.same for each in self._states_on)
        if gone:
            lines.append(f"{gone} run their own code now: what their proof rests on changed; undo() and optimize again")
        for state in self.states:
            lines += [f"{count} steps ran as they are: {why}" for why, count in getattr(state, "left", {}).items()]
        if any(each.kind == "padding" for each in self.replaced):
            lines.append(PADDING)
        if self.error is not None:
            lines.append(
                "the model's output holds other whole numbers, such as tokens"
                if self.error == float("inf")
                else f"the model's output differs by {self.error:.2g} of its largest value"
            )
        if self.timed is not None:
            lines += ["", *str(self.timed).splitlines()]
            lines += [f"before is {self.stock}"] if self.stock else []
        if self.spent is not None:
            lines += ["", *self.spent.lines()]
        if self.tuned is not None:
            lines += ["", f"measured: {self.tuned}"]
            lines += [f"{count} known times do not count here: {why}" for why, count in self.refused.items()]
        if self.paced:
            seconds = sum(each.sizes.seconds for each in self.paced)
            counts = f"{', '.join(map(str, SIZES[:-1]))} and {SIZES[-1]} tokens"
            lines += ["", f"timed on random rows, {counts}, in {seconds:.1f} s; a share of the model's own time:"]
            shares = [((each.module, each.text), path, None) for each in self.paced for path in each.paths]
            lines += table(("timed", "module", "takes"), shares)
            noise = max(at[way] for each in self.paced for at, way in zip(each.sizes.noise, each.ways, strict=True))
            if noise > NOISE:
                lines.append(
                    f"a share of ± {noise:.2f} says little: optimize again in a new process on an idle machine"
                )
        if self.time.lines():
            lines += ["", f"it took {self.seconds:.1f} s", *self.time.lines()]
        lines += [f"next: {each}" for each in self.tune]
        return "\n".join(lines)
