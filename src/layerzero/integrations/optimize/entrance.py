"""``lz.optimize``: find modules, check candidates against them, put the new forwards on, and time the whole."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Module

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize import attending, diffusion
from layerzero.integrations.optimize.blocks import Block
from layerzero.integrations.optimize.bounding import Budget
from layerzero.integrations.optimize.finding import find
from layerzero.integrations.optimize.floor import set_floor
from layerzero.integrations.optimize.inputs import Workload, is_function, workload_of
from layerzero.integrations.optimize.joining import Joined, wants_packed, why_apart
from layerzero.integrations.optimize.layer import Heads, Layer
from layerzero.integrations.optimize.layers import Found, layers
from layerzero.integrations.optimize.measured import measure
from layerzero.integrations.optimize.report import BY_CALL, NO_TIME, Left, Optimized, Replaced
from layerzero.integrations.optimize.steps import ON_HOST, Steps, stepping
from layerzero.integrations.optimize.stock import stock_of
from layerzero.integrations.optimize.swapping import (
    Packs,
    State,
    Swap,
    has_own_forward,
    is_dense,
    is_swapped,
    weight_of,
)
from layerzero.integrations.optimize.time_left import RUN, TimeLeft
from layerzero.integrations.tokenizers import is_tokenizer, optimize_tokenizer
from layerzero.serving.warmup import Progress, bar_or

LAYER = "lz.add_residual_rms_norm_, lz.rope_, lz.attention, lz.linear, lz.mlp"
"""What a layer calls, in short."""

_Attention = tuple[str, attending.AttentionSwap, float | None, bool]
"""A model's path, its exchange, how far its attention was from the original, and whether it is exchanged."""


def optimize(
    model: Any,
    inputs: Any = None,
    *,
    graph: bool = False,
    rounds: int = 5,
    budget_s: float | None = 120.0,
    isolate: bool = True,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> Any:
    """Let LayerZero compute what a model's modules compute, where that is checked to be the same.

        report = lz.optimize(model)                   # or with the inputs that matter:
        report = lz.optimize(model, {"input_ids": ids, "attention_mask": mask})
        report = lz.optimize(model, lambda: model.generate(ids, max_new_tokens=16))
        print(report)
        report.undo()

    Norms, feed-forward blocks, experts of mixtures and linear layers are found by what they compute, and whole decoder
    layers of Transformers' models, whose attention is set to ``"layerzero"``. Each keeps its class, its parameters and
    its place: ``state_dict``, ``save_pretrained``, ``.to()``, deep copies, ``torch.save`` (of the stock module) and
    hooks of the modules themselves work as before, and nothing of the process is changed. Calls that record gradients,
    run under autocast, in training mode or in ``torch.compile`` run the modules' own code. So does a module that is no
    longer what it was when it was checked, or one of whose submodules is not: another mode, hook, attribute, submodule,
    class or forward, or another function of torch that its code names. What is changed back is LayerZero's again.
    Shallow copies and replicas of ``DataParallel`` are stock. A weight that is packed for a CPU is compared with its
    source: a write that torch does not count (``weight.data[3] = 0``, NumPy) is seen at once or within 1024 calls of
    that weight, told by a warning and in the report, and the weight packed anew.

    Args:
        model: a module in evaluation mode, or what has one (a pipeline of Transformers or diffusers); a
            SentenceTransformer in either mode, for its ``encode()`` leaves training mode by itself.
        inputs: a tensor, a tuple or a dict that the model is called with, or a function without arguments that runs
            it. The calls that it makes are measured, and what gains less than 1 % end to end is left as it was.
        graph: whether decoders' steps (one token, a cache) are captured in a CUDA graph for each of a few lengths, and
            replayed; on a CPU they run as they are, with the cache in memory that stays where it is.
        rounds: times that each variant is timed, interleaved; up to four times as often while their ratios scatter
            around the 1 %.
        budget_s: seconds for all that is done here; None for no limit. No step begins that is likely to end later. The
            report says what was left out, and what was not compared and timed stays as it was.
        isolate: whether kernels that are new on this machine run in a child process first.
        memory_limit: bytes that packed forms of weights may take together, beside the weights, which stay for state
            dicts; None for no limit, 0 for none at all. A kernel for prompts and one for tokens may keep a form each.
            What has no room is read as it lies, by whichever kernel is fastest then.
        progress: told what is done, how much of it, and of how much; a bar on a terminal if None. Not of tokenizers.

    Without inputs, on a CPU, whole decoder layers and modules of each shape are timed beside the model's own code on 1,
    4 and 64 random tokens, for a second or two a shape and once a process: the layers of a small model as steps of the
    model itself. What is slower at one of them by more than 1 % or the noise is left as it was, and so is what raises
    while it is timed. Attention that is in no such layer is compared, and not timed. With ``graph=True`` all layers and
    their attention stay, for steps are taken from them: then what loses is shown, and not left.

    No other thread may use the model until this returns: its modules and settings are switched to and fro meanwhile.

    A tokenizer of Transformers comes back as one with the same interface and the same ids, whose texts the fastest
    exact library encodes (:func:`layerzero.integrations.tokenizers.optimize_tokenizer`).

    Returns: the report, which prints what was done and why, and takes it back.
    Raises: TypeError for what has no modules; whatever the model raises on the inputs.
    """
    problems = []
    if memory_limit is not None and (type(memory_limit) is not int or memory_limit < 0):
        problems.append(f"memory_limit: wanted bytes from 0 or None, got {told(memory_limit)}")
    if type(rounds) is not int or rounds < 1:
        problems.append(f"rounds: wanted a number of at least 1, got {told(rounds)}")
    if budget_s is not None and (
        isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not budget_s >= 0
    ):
        problems.append(f"budget_s: wanted seconds from 0 or None, got {told(budget_s)}")
    problems += [
        f"{name}: wanted True or False, got {told(each)}"
        for name, each in (("graph", graph), ("isolate", isolate))
        if not isinstance(each, bool)
    ]
    if problems:
        raise InvalidCallError("optimize", problems)
    if is_tokenizer(model):
        return optimize_tokenizer(model, budget_s=budget_s)
    time = TimeLeft(budget_s)
    model = diffusion.whole(model)
    root = module_of(model)
    report = Optimized(weight_bytes=weight_bytes(root), memory_limit=memory_limit, time=time)
    if root.training and not (_evaluates_itself(root) and (inputs is None or is_function(inputs))):
        why = "the model is in training mode, in which its own code runs; call model.eval() first"
        report.left.append(Left("", type(root).__name__, why))
        return report
    already = sum(map(is_swapped, root.modules()))
    if already:
        why = f"{already} of its modules are LayerZero's already; undo() the first report to begin anew"
        report.left.append(Left("", type(root).__name__, why))
        return report
    try:
        with bar_or(progress) as tell:
            _optimized(model, root, report, inputs, tell, graph=graph, rounds=rounds, isolate=isolate)
    except BaseException:  # all or nothing, whatever failed and however late
        report.undo()
        raise
    report.seconds = time.deadline.spent_s
    return report


def _evaluates_itself(root: Module) -> bool:
    """Whether a model leaves training mode when it is used, as a new SentenceTransformer does when it encodes.

    Until then, and when it is trained, its own code runs.
    """
    library = type(root).__module__.partition(".")[0]
    return library == "sentence_transformers" and any(hasattr(root, name) for name in ("encode", "predict"))


def _optimized(
    model: Any,
    root: Module,
    report: Optimized,
    inputs: Any,
    tell: Progress,
    *,
    graph: bool,
    rounds: int,
    isolate: bool,
) -> None:
    """Find, check, put on and measure, for a model that may be changed."""
    memory_limit, time = report.memory_limit, report.time
    workload = None if inputs is None else workload_of(model, inputs, time)
    if not time.allows("everything, the first run of the model included", RUN):
        report.left.append(Left("", type(root).__name__, NO_TIME))
        return
    before = [] if workload is None else workload.run()
    report.stock = "" if workload is None else stock_of(root, workload.device)
    attention = _attention(root, report, workload)
    whole, taken = _layers(attention, report)
    found = find(root, report, taken, time, measured=inputs is not None, tell=tell)
    _join([*(each.swap.state for each in whole if each.swap), *(each.swap.state for _, each in found)], root, report)
    for layer in whole:
        assert layer.swap is not None
        layer.swap.on()
        report._exchanges.append(layer.swap)
        name = type(layer.module).__name__
        report.replaced.append(Replaced(layer.path, name, "layer", LAYER, ", ".join(layer.kernels), layer.error))
    for path, each in found:
        each.swap.on()
        report._exchanges.append(each.swap)
        kernel = each.kernel
        report.replaced.append(
            Replaced(path, type(each.swap.module).__name__, each.kind, each.calls, kernel, each.error)
        )
    for path, exchange, error, ours in attention:
        if not ours or exchange.chosen:
            continue
        exchange.on()
        report._exchanges.append(exchange)
        report.replaced.append(
            Replaced(path, type(exchange.model).__name__, "attention", "lz.attention", BY_CALL, error)
        )
    for theirs, error in diffusion.attention(root, report, None if workload is None else workload.run):
        theirs.on()
        report._exchanges.append(theirs)
        report.replaced.append(
            Replaced(theirs.path, type(theirs.model).__name__, "attention", "lz.attention", BY_CALL, error)
        )
    for turned in diffusion.rotations(root, report):
        turned.on()
        report._exchanges.append(turned)
        name = type(turned.model).__name__
        report.replaced.append(Replaced(turned.path, name, "rotation", "lz.rope_", turned.kernel, turned.error))
    if memory_limit is not None:
        _bound(report, memory_limit)
    if workload is None:
        set_floor(attention, whole, found, report, tell, graph=graph)
    if graph:  # behind the floor, whose runs of the model are no steps
        _steps(attention, report)
    report._forget()
    if workload is None:
        if report.replaced:
            report.tune.append("pass inputs= so that the calls which they make are measured and the gain is shown")
        return
    measure(root, report, workload, before, rounds=rounds, isolate=isolate, tell=tell)


def _bound(report: Optimized, limit: int) -> None:
    """Keep packed forms within so many bytes."""
    budget = Budget(limit)
    for exchange in report._exchanges:
        state = getattr(exchange, "state", None)
        for each in getattr(state, "parts", (state,)):
            if isinstance(each, Packs):
                each.bound(budget)


def _steps(attention: list[_Attention], report: Optimized) -> None:
    """Capture the steps of decoders, where attention is LayerZero's."""
    if not attention:
        report.left.append(Left("", "", "graph: no model of Transformers whose attention may be exchanged"))
    for path, exchange, _, ours in attention:
        model, why = exchange.model, ""
        if not ours:
            why = "its attention is not LayerZero's, and so does not read a cache by its length"
        elif not hasattr(model, "prepare_inputs_for_generation") or not model.can_generate():
            why = "it does not generate"
        elif model.config.is_encoder_decoder:
            why = "it has an encoder, too"
        elif has_own_forward(model):
            why = "its forward was exchanged on the instance"
        if why:
            report.left.append(Left(path, type(model).__name__, f"graph: {why}"))
            continue
        on_host = all(each.device.type in ON_HOST for each in model.parameters())
        how = "keys and values in memory that stays" if on_host else "a CUDA graph a length"
        swap = Swap(model, stepping(model), Steps(model))
        swap.on()
        report._exchanges.append(swap)
        report.replaced.append(Replaced(path, type(model).__name__, "step", how, BY_CALL, None))


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


def _layers(attention: list[_Attention], report: Optimized) -> tuple[list[Found], set[int]]:
    """Whole layers of the models whose attention is LayerZero's, and all modules that they compute for."""
    whole: list[Found] = []
    for path, exchange, _, ours in attention:
        for each in layers(exchange.model, exchange, report.time, ours=ours):
            each.path = f"{path}.{each.path}".strip(".")
            if each.swap is None:
                report.left.append(Left(each.path, type(each.module).__name__, each.why))
            else:
                whole.append(each)
    return whole, {id(inner) for each in whole for inner in each.module.modules()}


def _attention(root: Module, report: Optimized, workload: Workload | None) -> list[_Attention]:
    """Attention of Transformers' models that gave what theirs gives, on the inputs or on Transformers' example."""
    found: list[_Attention] = []
    for path, model in attending.models_of(root):
        why = attending.untested(sys.modules["transformers"].__version__)
        if why:
            report.left.append(Left(path, type(model).__name__, why))
            continue
        why, error, exchange = attending.why_not(model), None, None
        step = f"comparing the attention of {type(model).__name__}"
        if not why and not report.time.allows(step, step if workload is None else RUN):
            report.left.append(Left(path, type(model).__name__, f"attention: {NO_TIME}"))
            continue
        if not why:
            exchange = attending.attention_swap(model)
            run = attending.example_run(model) if workload is None else workload.run
            try:
                error, why = attending.compared(exchange, run)
            except Exception as raised:  # what a model raises on an example that was made for another
                if workload is not None:
                    raise
                why = f"it could not be compared without inputs= ({type(raised).__name__}: {str(raised)[:80]})"
        if exchange is not None and exchange.chosen:
            said = "it is LayerZero's already, as attn_implementation says"
            report.left.append(Left(path, type(model).__name__, f"attention: {said}{why and f', but {why}'}"))
            if why:
                continue
        elif why:
            report.left.append(Left(path, type(model).__name__, f"attention: {why}"))
        if exchange is not None:
            found.append((path, exchange, error, not why))
    return found


def _join(states: Iterable[State], root: Module, report: Optimized) -> None:
    """Lay weights that one product computes with one after the other, where kernels read them as they lie."""
    holders = Counter(
        each.untyped_storage().data_ptr() for each in root.parameters() if is_dense(each) and not each.is_meta
    )
    for state in states:
        if isinstance(state, Layer):
            if not wants_packed(weight_of(state.heads.products[0])):
                join_heads(state.heads, holders, report)
            state = state.block  # noqa: PLW2901  # it lies within
        if isinstance(state, Block) and len(state.products) == 3 and not wants_packed(weight_of(state.products[0])):
            join(state, holders, report)


def join_heads(heads: Heads, holders: Counter[int], report: Optimized) -> str:
    """Join the weights of queries, keys and values; say why not, empty where it was done or nothing is to be done."""
    first = heads.products[:-1]
    biases = [each._parameters["bias"] for each in first]
    if len(first) == 1:
        return ""
    given = [each for each in biases if each is not None]
    if len(given) not in {0, len(first)}:
        return "some have biases"
    weights = [weight_of(each) for each in first]
    why = why_apart(weights, holders) or (why_apart(given, holders) if given else "")
    if not why:
        heads.joined = Joined(*weights)
        heads.biases = Joined(*given) if given else None
        report._joined += [each for each in (heads.joined, heads.biases) if each is not None]
    return why


def join(state: Block, holders: Counter[int], report: Optimized) -> str:
    """Join one block's weights; say why not, empty where it was done."""
    up, _, gate_product = state.products
    if up._parameters["bias"] is not None or gate_product._parameters["bias"] is not None:
        return "its products have biases"
    weights = weight_of(gate_product), weight_of(up)
    why = why_apart(weights, holders)
    if not why:
        state.joined = Joined(*weights)
        report._joined.append(state.joined)
    return why
