"""``lz.optimize``: find modules, check candidates against them, put the new forwards on, and time the whole."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from layerzero.asking.trace import traced
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize import attending
from layerzero.integrations.optimize.blocks import Block, block
from layerzero.integrations.optimize.candidate import Candidate, compared, distance
from layerzero.integrations.optimize.gate import Switch, gate
from layerzero.integrations.optimize.inputs import Workload, workload_of
from layerzero.integrations.optimize.joining import Joined, why_apart
from layerzero.integrations.optimize.norms import norm
from layerzero.integrations.optimize.products import linear, linear_then
from layerzero.integrations.optimize.refusing import refusal
from layerzero.integrations.optimize.report import Exchange, Left, Optimized, Replaced
from layerzero.integrations.optimize.swapping import is_swapped
from layerzero.integrations.tokenizers import is_tokenizer, optimize_tokenizer

KINDS: tuple[Callable[[Module], Candidate | str | None], ...] = (block, linear_then, norm, linear)
"""Asked in this order: what covers others comes first."""

BY_CALL = "by call"
"""The kernel of what no few rows can be asked about."""

MOST = 12
"""Submodules of what is looked at as a whole."""

NO_GAIN = "torch's own kernel runs it, and no time says that another is faster; pass inputs= to measure"


def optimize(
    model: Any,
    inputs: Any = None,
    *,
    rounds: int = 5,
    budget_s: float | None = 120.0,
    isolate: bool = True,
) -> Any:
    """Let LayerZero compute what a model's modules compute, where that is checked to be the same.

        report = lz.optimize(model)                   # or with the inputs that matter:
        report = lz.optimize(model, {"input_ids": ids, "attention_mask": mask})
        report = lz.optimize(model, lambda: model.generate(ids, max_new_tokens=16))
        print(report)
        report.undo()

    Norms, feed-forward blocks and linear layers are found by what they compute; attention of Transformers' models is
    set to ``"layerzero"``. Each keeps its class, its parameters and its place: ``state_dict``, ``save_pretrained``,
    ``.to()``, deep copies, ``torch.save`` (which saves the stock module) and hooks of the modules themselves work as
    before, and nothing of the process is changed. Calls that record gradients, run under autocast, in training mode or
    in ``torch.compile`` run the modules' own code.

    Args:
        model: a module in evaluation mode, or what has one (a pipeline, a SentenceTransformer).
        inputs: a tensor, a tuple or a dict that the model is called with, or a function without arguments that runs
            it. The calls that it makes are measured, and what gains less than 1 % end to end is left as it was.
        rounds: times that each variant is timed, interleaved.
        budget_s: seconds for measuring kernels; None for no limit.
        isolate: whether kernels that are new on this machine run in a child process first.
    A tokenizer of Transformers comes back as one with the same interface and the same ids, whose texts the fastest
    exact library encodes (:func:`layerzero.integrations.tokenizers.optimize_tokenizer`).

    Returns: the report, which prints what was done and why, and takes it back.
    Raises: TypeError for what has no modules; whatever the model raises on the inputs.
    """
    if is_tokenizer(model):
        return optimize_tokenizer(model, budget_s=budget_s)
    root = module_of(model)
    report = Optimized(weight_bytes=weight_bytes(root))
    if root.training:
        why = "the model is in training mode, in which its own code runs; call model.eval() first"
        report.left.append(Left("", type(root).__name__, why))
        return report
    already = sum(map(is_swapped, root.modules()))
    if already:
        why = f"{already} of its modules are LayerZero's already; undo() the first report to begin anew"
        report.left.append(Left("", type(root).__name__, why))
        return report
    found = _find(root, report, measured=inputs is not None)
    workload = None if inputs is None else workload_of(model, inputs)
    before = [] if workload is None else workload.run()
    attention = _attention(root, report, workload)
    _join(found, root, report)
    for path, each in found:
        each.swap.on()
        report._exchanges.append(each.swap)
        kernel = each.kernel
        report.replaced.append(
            Replaced(path, type(each.swap.module).__name__, each.kind, each.calls, kernel, each.error)
        )
    for path, exchange, error in attention:
        exchange.on()
        report._exchanges.append(exchange)
        report.replaced.append(
            Replaced(path, type(exchange.model).__name__, "attention", "lz.attention", BY_CALL, error)
        )
    if workload is None:
        if report.replaced:
            report.tune.append("pass inputs= so that the calls which they make are measured and the gain is shown")
        return report
    try:
        _measure(root, report, workload, before, rounds=rounds, budget_s=budget_s, isolate=isolate)
    except BaseException:
        report.undo()
        raise
    return report


def module_of(model: Any) -> Module:
    """The module to optimize: the model, or what it keeps under the names that pipelines use.

    Raises: TypeError naming what was wanted.
    """
    if isinstance(model, Module):
        return model
    inner = getattr(model, "model", None)
    if isinstance(inner, Module):
        return inner
    raise TypeError(f"optimize: wanted a torch.nn.Module or what has one as .model, got {type(model).__name__}")


def weight_bytes(root: Module) -> int:
    """Memory of all parameters and buffers, each once."""
    storages = {}
    for each in (*root.parameters(), *root.buffers()):
        if not each.is_meta and each.layout is torch.strided and type(each.data) is torch.Tensor:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _find(root: Module, report: Optimized, *, measured: bool) -> list[tuple[str, Candidate]]:
    """Candidates that gave what the originals give, and in the report what is left and why."""
    taken: set[int] = set()
    found: list[tuple[str, Candidate]] = []
    parents = {id(child): parent for parent in root.modules() for child in parent.children()}
    for path, module in root.named_modules():
        if id(module) in taken or not _is_small(module):
            continue
        why = refusal(module, parents.get(id(module)))
        if why:
            if not module._modules or any(isinstance(each, Linear) for each in module.children()):
                report.left.append(Left(path, type(module).__name__, why))
            continue
        for kind in KINDS:
            candidate = _candidate(kind, module)
            if candidate is None:
                continue
            if isinstance(candidate, Candidate) and not measured and candidate.is_torchs:
                candidate = NO_GAIN
            if isinstance(candidate, str):
                report.left.append(Left(path, type(module).__name__, candidate))
                if module._modules:  # what it is made of may be something else that is known
                    continue
                break
            found.append((path, candidate))
            taken |= {id(each) for each in candidate.covered}
            break
        else:
            if not module._modules and any(True for _ in module.parameters(recurse=False)):
                report.left.append(Left(path, type(module).__name__, "it computes nothing that LayerZero knows"))
    return found


def _is_small(module: Module) -> bool:
    """Whether it may be one of the kinds: it has parameters, and not many submodules."""
    few = len(list(itertools.islice(module.modules(), MOST + 1))) <= MOST
    return few and any(True for _ in module.parameters())


def _candidate(kind: Callable[[Module], Candidate | str | None], module: Module) -> Candidate | str | None:
    """A checked candidate, or why there is none."""
    candidate = kind(module)
    if isinstance(candidate, Candidate):
        try:
            why = compared(candidate)
        except InvalidCallError as error:
            why = f"{candidate.calls} does not compute it: {error}"
        if why:
            return why
    return candidate


def _attention(
    root: Module, report: Optimized, workload: Workload | None
) -> list[tuple[str, attending.AttentionSwap, float | None]]:
    """Attention of Transformers' models that gave what theirs gives, on the inputs or on Transformers' example."""
    found: list[tuple[str, attending.AttentionSwap, float | None]] = []
    for path, model in attending.models_of(root):
        why, error = attending.why_not(model), None
        if not why:
            exchange = attending.attention_swap(model)
            run = attending.example_run(model) if workload is None else workload.run
            try:
                error, why = attending.compared(exchange, run)
            except Exception as raised:  # what a model raises on an example that was made for another
                if workload is not None:
                    raise
                why = f"it could not be compared without inputs= ({type(raised).__name__}: {str(raised)[:80]})"
        if why:
            report.left.append(Left(path, type(model).__name__, f"attention: {why}"))
        else:
            found.append((path, exchange, error))
    return found


def _join(found: list[tuple[str, Candidate]], root: Module, report: Optimized) -> None:
    """Lay gate's and up's weights one after the other where kernels read them as they lie."""
    holders = Counter(each.untyped_storage().data_ptr() for each in root.parameters() if not each.is_meta)
    for _, candidate in found:
        state = candidate.swap.state
        if not isinstance(state, Block) or len(state.products) != 3 or state.products[0].weight.device.type == "cpu":
            continue
        join(state, holders, report)


def join(state: Block, holders: Counter[int], report: Optimized) -> str:
    """Join one block's weights; say why not, empty where it was done."""
    up, _, gate_product = state.products
    if up._parameters["bias"] is not None or gate_product._parameters["bias"] is not None:
        return "its products have biases"
    first, second = gate_product.weight, up.weight
    why = why_apart(first, second, holders)  # type: ignore[arg-type]
    if not why:
        state.joined = Joined(first, second)  # type: ignore[arg-type]
        report._joined.append(state.joined)
    return why


def _measure(
    root: Module,
    report: Optimized,
    workload: Workload,
    before: list[Tensor],
    *,
    rounds: int,
    budget_s: float | None,
    isolate: bool,
) -> None:
    """Measure the calls that the inputs make, compare the outputs, and take out what does not pay."""
    tuned = workload.tune(budget_s=budget_s, isolate=isolate)
    after = workload.run()
    errors = [distance(got, expected) for got, expected in zip(after, before, strict=False)]
    report.error = max(errors, default=None)
    by_kind: dict[str, list[Exchange]] = defaultdict(list)
    for exchange, told in zip(report._exchanges, report.replaced, strict=True):
        by_kind[told.kind].append(exchange)

    def switch_of(exchanges: list[Exchange]) -> Switch:
        def switch(on: bool) -> None:
            for each in exchanges:
                each.on() if on else each.off()

        return switch

    switches = {kind: switch_of(exchanges) for kind, exchanges in by_kind.items()}
    if switches:
        report.timed = gate(switches, workload.sample, rounds)
        for kind in report.timed.dropped:
            gain = report.timed.gains[kind]
            why = f"{kind}: end to end it gained {gain:+.1%}, less than 1 %"
            report.left += [Left(each.path, each.module, why) for each in report.replaced if each.kind == kind]
        kept = [
            (exchange, told)
            for exchange, told in zip(report._exchanges, report.replaced, strict=True)
            if told.kind not in report.timed.dropped
        ]
        report._exchanges = [exchange for exchange, _ in kept]
        report.replaced = [told for _, told in kept]
    _name_kernels(root, report, workload)
    if tuned.left:
        report.tune.append(f"{tuned.left} calls were not measured within the budget; call again with more, or lz.tune")


def _name_kernels(root: Module, report: Optimized, workload: Workload) -> None:
    """Say which kernels the inputs' calls get: a prompt and a token of one module may have kernels of their own."""
    ran: dict[str, dict[str, None]] = defaultdict(dict)
    paths = {each.path for each in report.replaced if each.kernel != BY_CALL}
    with torch.no_grad():
        found = traced(root, workload.call)
    for row in found.rows:
        ran[row.layer if row.layer in paths else BY_CALL][row.kernel] = None
    for each in report.replaced:
        kernels = ran.get(BY_CALL if each.kernel == BY_CALL else each.path)
        if kernels:
            each.kernel = ", ".join(kernels)
