"""``lz.verify_speculative``: its signature, the checks of a call, the route, random calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.draw import Draw
from layerzero.ops.sampling.declare import on_device
from layerzero.ops.sampling.verify import GREEDY, OPERATIONS, TREE, VERIFY, tree_of


def verify_speculative(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    parents: Tensor | None = None,
    *,
    greedy: bool = False,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Tell which drafted tokens stand, and draw the one behind them, so that tokens come as the target draws them.

    A node is tried if the one that it follows was the last to stand, in the order of the nodes. It stands with the
    probability ``min(1, p / q)`` of what target and draft gave its token; where it falls, ``max(p - q, 0)`` is left for
    those beside it, and for the next token. A draft that was drawn without putting back has rows of what was left.

    Shapes: draft_ids (B, N), target_probs (B, N + 1, V), draft_probs (B, N, V), parents (B, N) → ids (B, N + 1), the
        tokens that are said, and nodes (B, N), those that stood in their order; both -1 behind the last.
    Dtype: probabilities floating, the same for both, rows add up to 1 but for rounding; ids and parents int32 or int64;
        computes in float32 or wider; returns int64.
    Args:
        draft_ids: the drafted tokens, from 0 to V - 1.
        target_probs: what the target gives at the root, and behind each node.
        draft_probs: what each token was drawn from; None where the draft was certain.
        parents: the node that each one follows, which comes before it, -1 for the root; None for a chain. A node whose
            parent comes later is never tried.
        greedy: a token stands if it is the target's likeliest, the first of equals; logits do as well then.
        seed: gives the same tokens wherever the same kernel runs the same call; from 0.
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
    idle = [] if not greedy else [name for name in ("draft_probs", "seed", "generator") if arguments[name] is not None]
    problems = [f"{name}: wanted none where the draft is verified greedily, got one" for name in idle]
    if arguments["seed"] is not None and arguments["generator"] is not None:
        problems.append("seed: wanted a seed or a generator, got both")
    given = {name: arguments[name] for name in operation.schema.arguments}
    problems = problems or operation.schema.validate(**given) or _size_problems(given)
    if problems:
        raise InvalidCallError("verify_speculative", problems)
    return Routed(operation, given, varies=("batch", "vocab"))


def _size_problems(arguments: dict[str, Any]) -> list[str]:
    problems = []
    target, drafted = arguments["target_probs"], arguments["draft_ids"].shape[1]
    shape = tuple(target.shape)
    if shape[1] != drafted + 1:
        problems.append(f"target_probs: wanted a row more than the {drafted} of draft_ids, got shape {shape}")
    if shape[2] == 0:
        problems.append(f"target_probs: wanted at least one place in the last axis, got {shape}")
    generator = arguments.get("generator")
    if isinstance(generator, torch.Generator) and not on_device(generator, target):
        where = f"{target.device} like target_probs"
        problems.append(f"generator: wanted one on {where}, got one on {generator.device}")
    return problems


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
    if draw.chance(0.3):
        return arguments | {"greedy": True}
    if draw.chance(0.6):
        near = logits[:, :-1] + draw.normal((batch, drafted, vocab), torch.float32)
        arguments["draft_probs"] = draw.laid_out(near.softmax(-1).to(dtype), expand=False)
    if draw.chance(0.5):
        arguments["seed"] = draw.of((0, 1, 2**63 - 1))
    return arguments


FUNCTIONS = (Function("verify_speculative", verify_speculative, _route, OPERATIONS, draw=_drawn, weight=1),)
