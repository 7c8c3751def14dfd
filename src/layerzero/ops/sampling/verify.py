"""Verifying drafted tokens: those that stand, and one of the target's own behind them, and the function that does so.

sampling.verify          a chain, each token after the one before it
sampling.verify.tree     a tree, whose nodes say which of them they follow
sampling.verify.greedy   either of them, where a token stands if it is the target's likeliest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema, told
from layerzero.core.dtypes import FLOATING
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.judge import Exact
from layerzero.core.judges import Distribution
from layerzero.core.operation import Case, Function, Operation, OpKind, Random, Routed, Work
from layerzero.core.values import Check
from layerzero.ops.declaration import check_dense, operation
from layerzero.ops.draw import Draw
from layerzero.ops.sampling import declare, stock
from layerzero.ops.sampling.checks import NEAR, check_draft, check_target, drafted_problem, drawable, rows_read
from layerzero.ops.sampling.formulas import chain_of, chances, generator_of, probabilities, walked, walked_greedily

AXES = (
    Axis("batch", scales=True, live=True, apart=True),
    Axis("drafted", scales=True, live=True),
    Axis("verified", scales=True, live=True, implied=True),
    Axis("vocab", scales=True),
)
REASON = "each place is as often which token as the walk over the draft says, by its arithmetic in float64"

_TARGET_PROBS = TensorSchema("target_probs", ("batch", "verified", "vocab"), FLOATING)
_DRAFT_IDS = TensorSchema("draft_ids", ("batch", "drafted"), declare.COUNTS, same_dtype=False, indexes=("vocab",))
_DRAFT_PROBS = TensorSchema("draft_probs", ("batch", "drafted", "vocab"), FLOATING, required=False)
_DRAFT_LENS = TensorSchema(
    "draft_lens", ("batch",), declare.COUNTS, required=False, same_dtype=False, counts=("drafted",)
)
_OUTPUTS = (
    TensorSchema("ids", ("batch", "verified"), declare.IDS),
    TensorSchema("nodes", ("batch", "drafted"), declare.IDS),
)
_SIZES = {"small": (33, 2, 8), "odd": (3, 5, 1003), "llama2_batch": (8, 4, 32000), "llama3_decode": (1, 5, 128256)}


def _parents(*, required: bool) -> TensorSchema:
    axes = ("batch", "drafted")
    return TensorSchema("parents", axes, declare.COUNTS, required, same_dtype=False, indexes=("drafted",), holes=True)


def _complete(sizes: Mapping[str, int]) -> dict[str, int]:
    return {"verified": sizes["drafted"] + 1}


def _work(facts: Mapping[str, Any]) -> Work:
    """A row of the target's read, and one of the draft's: most of both is never looked at."""
    elements = facts["batch"] * facts["vocab"]
    return Work(4.0 * elements, float(2 * elements * facts["dtype"].itemsize))


def _fake(target: Tensor, draft_ids: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    batch, drafted = draft_ids.shape
    made = (target.new_empty((batch, drafted + more), dtype=torch.int64) for more in (1, 0))
    return next(made), next(made)


def _reference(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def reference(
        target_probs: Tensor,
        draft_ids: Tensor,
        parents: Tensor | None = None,
        *,
        draft_probs: Tensor | None = None,
        draft_lens: Tensor | None = None,
        seed: int | None = None,
        seed_by_row: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        target = probabilities(target_probs.detach(), logits=False)
        drafted = None if draft_probs is None else probabilities(draft_probs.detach(), logits=False)
        if target.device.type == "cpu":
            check_target(target, name, draft_lens)
            check_draft(drafted, name, draft_lens)
        above, own = chain_of(draft_ids) if parents is None else parents, generator_of(seed, generator, target.device)
        return walked(draft_ids, target, drafted, above, own, draft_lens, seed_by_row)

    reference.__doc__ = "The walk over the draft, node by node. Dtype: computes in float32 or wider; returns int64."
    return reference


def _check_values(layout: str | None = None, **arguments: Any) -> list[Check]:
    drafted, lens = arguments.get("draft_probs"), arguments.get("draft_lens")
    probs = rows_read(arguments["target_probs"], None if lens is None else lens + 1)
    target = drawable(probs, "probs", "target_probs")
    return [target] if drafted is None else [target, drafted_problem(rows_read(drafted, lens))]


def _judge(place: int) -> Distribution:
    def basis(arguments: Mapping[str, Any], near: float = 0.0) -> Tensor:
        drafted, parents = arguments.get("draft_probs"), arguments.get("parents")
        above = chain_of(arguments["draft_ids"]) if parents is None else parents
        lens = arguments.get("draft_lens")
        return chances(arguments["draft_ids"], arguments["target_probs"], drafted, above, near, lens)[place]

    def support(arguments: Mapping[str, Any]) -> Tensor:
        # near is not all: where exactly nothing is left of a row, its own probabilities stand, near it what is left
        return (basis(arguments, NEAR) > 0) | (basis(arguments) > 0)

    return Distribution(basis, REASON, support=support, nothing=True)


def _cases(*given: str) -> tuple[Case, ...]:
    return tuple(
        Case(name, {"batch": batch, "drafted": drafted, "vocab": vocab}, given=given)
        for name, (batch, drafted, vocab) in _SIZES.items()
    )


def tree_of(batch: int, drafted: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """A random tree for each: a node follows any before it, or the root. Shapes: → (B, N)."""
    below = torch.arange(1, drafted + 1, device=device)
    marks = torch.rand((batch, drafted), generator=generator, device=device)
    return (marks * below).long().clamp(max=below - 1) - 1


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """Distributions, the draft near the target; and trees."""
    batch, drafted, vocab = (case.sizes[name] for name in ("batch", "drafted", "vocab"))
    if device.type == "meta":
        return {}
    where = device if generator is None else generator.device
    logits = torch.randn((batch, drafted + 1, vocab), generator=generator, device=where) * 2
    made = {"target_probs": logits.softmax(-1).to(device, dtype)}
    if "draft_probs" in case.given:
        near = logits[:, :-1] + torch.randn((batch, drafted, vocab), generator=generator, device=where)
        made["draft_probs"] = near.softmax(-1).to(device, dtype)
    if "parents" in case.given:
        made["parents"] = tree_of(batch, drafted, generator, where).to(device, torch.int32)  # as without data
    if "draft_lens" in case.given:
        made["draft_lens"] = (torch.arange(batch, device=device) % (drafted + 1)).to(torch.int32)
    return made


_COMMON: dict[str, Any] = {
    "outputs": _OUTPUTS,
    "axes": AXES,
    "fake": _fake,
    "complete": _complete,
    "examples": _examples,
    "work": _work,
    "stock": stock.verify,
}


def _operation(name: str, summary: str, *more: TensorSchema) -> Operation:
    return operation(
        name,
        summary,
        _reference(name),
        inputs=(_TARGET_PROBS, _DRAFT_IDS, *more, _DRAFT_PROBS, _DRAFT_LENS, declare.seeds_of_rows("batch")),
        params=(declare.SEED, declare.generator_param("target_probs")),
        cases=_cases("draft_probs", *(each.name for each in more)),
        judge={"ids": _judge(0), "nodes": _judge(1)},
        properties=declare.seeded("target_probs"),
        kind=OpKind.SAMPLING,
        fixed={"greedy": False},
        check_values=_check_values,
        **_COMMON,
    )


VERIFY = _operation("sampling.verify", "The tokens of a drafted chain that stand, and the next")
TREE = _operation(
    "sampling.verify.tree", "The tokens of a drafted tree that stand, and the next", _parents(required=True)
)


def _greedy_reference(
    target_probs: Tensor, draft_ids: Tensor, *, parents: Tensor | None = None, draft_lens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The walk where the likeliest token alone stands. Dtype: computes none; returns int64."""
    above = chain_of(draft_ids) if parents is None else parents
    return walked_greedily(draft_ids, target_probs.detach().argmax(-1), above, draft_lens)


GREEDY = operation(
    "sampling.verify.greedy",
    "The drafted tokens that are the target's likeliest, and the next",
    _greedy_reference,
    inputs=(_TARGET_PROBS, _DRAFT_IDS, _parents(required=False), _DRAFT_LENS),
    cases=_cases("parents"),
    judge=Exact("it compares numbers and computes none; the first of equals is the one"),
    fixed={"greedy": True},
    **_COMMON,
)

OPERATIONS = (VERIFY, TREE, GREEDY)


def verify_speculative(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    parents: Tensor | None = None,
    *,
    draft_lens: Tensor | None = None,
    greedy: bool = False,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept or reject drafted tokens, and draw the next one, so that tokens are distributed as the target's.

    A node is tried if the one that it follows was the last accepted, in the order of the nodes. It is accepted with the
    probability ``min(1, p / q)``, of target and draft for its token. Where it is rejected, ``max(p - q, 0)`` is left
    for its siblings, and for the next token. A draft that was drawn without replacement has rows of what was left.

    One call serves chains, trees and rows without a draft. A chain's parents are -1, 0, 1, ..., and ``draft_lens`` says
    how many nodes each row has.

    Shapes: draft_ids (B, N), target_probs (B, N + 1, V), draft_probs (B, N, V), parents (B, N), draft_lens (B,)
        → ids (B, N + 1), the accepted tokens and the next one, and nodes (B, N), the accepted ones in order; both -1
        behind the last.
    Dtype: probabilities floating, the same for both, rows add up to 1 but for rounding; integers int32 or int64;
        computes in float32 or wider; returns int64.
    Args:
        draft_ids: the drafted tokens, from 0 to V - 1.
        target_probs: what the target gives at the root, and behind each node.
        draft_probs: what each token was drawn from; None where the draft was certain.
        parents: the node that each one follows, which comes before it, -1 for the root; None for a chain. A node whose
            parent comes later is never tried.
        draft_lens: how many nodes each row has, from 0 to N; N if None. What is behind them is not read: any token and
            any probabilities may be there, as rows of another request.
        greedy: a token is accepted if it is the target's likeliest, the first of equals; logits do as well then.
        seed: gives the same tokens wherever the same kernel runs the same call; from 0. Or an int64 tensor (B,) with
            one for each row, whose tokens then depend on that row alone. ``lz.sample`` draws by the same seed apart
            from this, so that a draft may have been drawn by it.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None.
    Raises: InvalidCallError for what does not fit, and on a CPU for ids beyond the vocabulary, for rows of the target
        that nothing can be drawn of, and for draft_probs with NaN, infinity or numbers below 0 (rows of zeros may be).
        On a GPU, where looking means waiting, such a row gives some token.
    Source: arXiv:2211.17192, arXiv:2302.01318; of trees arXiv:2305.09781.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("verify_speculative", arguments)
    greedy = arguments["greedy"]
    if not isinstance(greedy, bool):
        raise InvalidCallError("verify_speculative", [f"greedy: wanted bool, got {told(greedy)}"])
    operation = GREEDY if greedy else VERIFY if arguments["parents"] is None else TREE
    seeds = [name for name in ("seed", "seed_by_row", "generator") if arguments[name] is not None]
    idle = [name for name in ("draft_probs", *seeds) if greedy and arguments[name] is not None]
    idle = list(dict.fromkeys(name.removesuffix("_by_row") for name in idle))
    problems = [f"{name}: wanted none where the draft is verified greedily, got one" for name in idle]
    if len(seeds) > 1 and not greedy:
        problems.append("seed: wanted a seed or a generator, got both")
    given = {name: arguments[name] for name in operation.schema.arguments}
    problems = problems or operation.schema.validate(**given) or _size_problems(given)
    refuse("verify_speculative", problems)
    return Routed(operation, given, varies=("batch", "vocab"))


def _size_problems(arguments: dict[str, Any]) -> list[str]:
    problems, drafted = [], arguments["draft_ids"].shape[1]
    shape = tuple(arguments["target_probs"].shape)
    if shape[1] != drafted + 1:
        problems.append(f"target_probs: wanted a row more than the {drafted} of draft_ids, got shape {shape}")
    if shape[2] == 0:
        problems.append(f"target_probs: wanted at least one place in the last axis, got {shape}")
    return problems + declare.generator_problems(arguments, "target_probs")


def _drawn(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    batch, drafted, vocab = draw.of((0, 1, 2, 5), (1, 8, 8, 8)), draw.of((0, 1, 2, 4, 7)), draw.of((1, 2, 7, 33, 200))
    logits = draw.normal((batch, drafted + 1, vocab), torch.float32) * draw.of((1.0, 3.0))
    kind = draw.of((torch.int64, torch.int32))
    arguments: dict[str, Any] = {
        "draft_ids": draw.laid_out(draw.integers((batch, drafted), vocab - 1, kind)),
        "target_probs": draw.laid_out(logits.softmax(-1).to(dtype), expand=False),
    }
    tree = draw.chance(0.5)
    if tree:
        parents = tree_of(batch, drafted, draw.data, torch.device("cpu")).to(draw.device, kind)
        arguments["parents"] = draw.laid_out(parents, expand=False)
    arguments |= draw.maybe(0.4, draft_lens=lambda: draw.laid_out(draw.integers((batch,), drafted, kind)))
    if draw.chance(0.3):
        return arguments | {"greedy": True}
    if draw.chance(0.6):
        near = logits[:, :-1] + draw.normal((batch, drafted, vocab), torch.float32)
        arguments["draft_probs"] = draw.laid_out(near.softmax(-1).to(dtype), expand=False)
    if draw.chance(0.3):
        arguments["seed_by_row"] = draw.laid_out(draw.integers((batch,), 2**40, torch.int64))
    elif draw.chance(0.5):
        arguments["seed"] = draw.of((0, 1, 2**63 - 1))
    return arguments


FUNCTIONS = (Function("verify_speculative", verify_speculative, _route, OPERATIONS, draw=_drawn, weight=1),)
