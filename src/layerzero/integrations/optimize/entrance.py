"""``lz.optimize``: find modules, check candidates against them, put the new forwards on, and time the whole."""

from __future__ import annotations

import functools
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from layerzero.core import emulation
from layerzero.core.arguments import told
from layerzero.core.device import Device
from layerzero.core.eager_state import uncompiled
from layerzero.core.errors import LayerZeroFallbackWarning, refuse
from layerzero.core.system import memory, warn
from layerzero.core.system.resources import available_bytes
from layerzero.engine.config import CONFIGURATION, current_policy
from layerzero.engine.frozen_choices import ranks_choose
from layerzero.inspection.agreement import agreed_where_ends
from layerzero.integrations.optimize.attention import diffusers, transformers
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.layers import find as layers
from layerzero.integrations.optimize.models import compiled_calls, gguf_steps, stacks
from layerzero.integrations.optimize.models.steps import find_steps
from layerzero.integrations.optimize.models.training import optimize_training
from layerzero.integrations.optimize.modules import coded_experts, int8, quantised
from layerzero.integrations.optimize.modules import find as modules
from layerzero.integrations.optimize.modules import weights as requested
from layerzero.integrations.optimize.selection import WHOLE, time_inputs, time_random_rows
from layerzero.integrations.optimize.swaps.candidate import watching
from layerzero.integrations.optimize.swaps.codes import fell_back
from layerzero.integrations.optimize.swaps.swap import Swap, is_dense, is_swapped
from layerzero.integrations.optimize.swaps.weights import Budget, Packs
from layerzero.integrations.optimize.times.module_times import compiled_parts
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Optimized, Replaced, switch_all
from layerzero.integrations.optimize.times.workload import (
    RUN,
    TimeLeft,
    Workload,
    collectives,
    is_function,
    stock_of,
    workload_of,
)
from layerzero.integrations.tokenizers import is_tokenizer, optimize_tokenizer
from layerzero.serving.warmup import Progress, bar_or

Params = ParamSpec("Params")

FINDERS: tuple[Callable[[Search], Iterator[Replaced | Left]], ...] = (
    transformers.find,
    coded_experts.find_kept,
    layers.find,
    quantised.find,
    int8.find,
    modules.find,
    diffusers.find_attention,
    diffusers.find_rotations,
)
"""Each looks for one kind, checks it against the original, and gives what may be put on, or is left and why.

In this order: layers rest on the attention that was found, and modules within a layer are the layer's.
"""

_TURNS = 5
"""Runs of the model's own code and of what is put on, in turn; the first of each does not count."""


def _among_ranks(run: Callable[Params, Any]) -> Callable[Params, Any]:
    """Let ranks agree where ``lz.optimize`` of a model ends, early or not, and keep what all of them keep.

    What one of them leaves, or computes otherwise at some sizes, is taken out: each rank timed by itself.
    """

    def way(found: Replaced) -> str:
        state = getattr(found.exchange, "state", None)
        ways = [(each.own_at, getattr(each, "plain", ())) for each in (state, *state.parts)] if state else ()
        return f"{found.path} {found.kind} {found.kernel if found.kind == compiled_calls.KIND else ''} {ways}"

    def keep(report: Optimized, of_all: frozenset[str]) -> None:
        why = "another rank left it, or computes it in another way at some sizes (distributed_selection)"
        report.take_out([each for each in report.replaced if way(each) not in of_all], why)

    @functools.wraps(run)
    def running(*args: Params.args, **kwargs: Params.kwargs) -> Any:
        model = args[0] if args else kwargs.get("model")
        if is_tokenizer(model) or not ranks_choose(CONFIGURATION.policy):
            return run(*args, **kwargs)
        found: list[Optimized] = []

        def once() -> Optimized:
            found.append(run(*args, **kwargs))
            return found[0]

        try:
            return agreed_where_ends("optimize", once, lambda report: [*map(way, report.replaced)], keep)
        except BaseException:
            for report in found:
                report.undo()
            raise

    return running


@_among_ranks
def optimize(
    model: Any,
    inputs: Any = None,
    *,
    graph: bool = False,
    padding: bool = True,
    rounds: int = 5,
    budget_s: float | None = 120.0,
    isolate: bool = True,
    memory_limit: int | None = None,
    weights: str | None = None,
    activations: str | None = None,
    accuracy: float | None = None,
    training: bool = False,
    progress: Progress | None = None,
) -> Any:
    """Let LayerZero compute what a model's modules compute, where that is checked to be the same.

        report = lz.optimize(model)                   # or with the inputs that matter:
        report = lz.optimize(model, {"input_ids": ids, "attention_mask": mask})
        report = lz.optimize(model, lambda: model.generate(ids, max_new_tokens=16))
        print(report)
        report.undo()

    Norms, feed-forward blocks, experts of mixtures, linear layers, and whole layers of decoders and encoders are found
    by what they compute. Attention of Transformers is set to ``"layerzero"``. Each module keeps its class, parameters
    and place. ``state_dict``, ``save_pretrained``, ``.to()``, deep copies, ``torch.save`` (of the stock module) and
    hooks work as before, and nothing of the process stays changed. Calls that record gradients, run under autocast, in
    training mode or in ``torch.compile`` run the modules' own code. So does a module that changed since its check, or
    one of whose submodules did: another mode, hook, attribute, submodule, class or forward, or another function of
    torch that its code names. What is changed back is LayerZero's again. Shallow copies and replicas of
    ``DataParallel`` are stock. A weight that is packed for a CPU is compared with its source. A write that torch does
    not count (``weight.data[3] = 0``, NumPy) is seen at once or within 1024 calls of that weight. A warning and the
    report name it, and the weight is packed anew.

    Args:
        model: a module in evaluation mode, or what has one (a pipeline of Transformers or diffusers). A
            SentenceTransformer in either mode: its ``encode()`` leaves training mode by itself.
        inputs: a tensor, a tuple or a dict that the model is called with, or a function without arguments that runs
            it. The calls that it makes are measured, and what gains less than 1 % end to end is left as it was.
        graph: whether decoders' steps (one token, a cache) are captured in a CUDA graph for each of a few lengths, and
            replayed. On a CPU they run as they are, over a cache in memory that stays where it is.
        padding: whether encoders of Transformers on a CPU compute padded batches without their padding, where enough of
            it saves time. Real positions get what they got but for rounding. Positions behind a row's last real token
            give zeros, which changes code that reads them, such as a mean without the mask.
        rounds: times that each variant is timed, interleaved; up to four times as often while their ratios scatter
            around the 1 %.
        budget_s: seconds for all that is done here; None for no limit. No step begins that is likely to end later. The
            report says what was left out. Where the model is too slow to be timed in it, random rows decide, as without
            inputs. What was not timed stays as it was, but for products that the CPU is known to emulate.
        isolate: whether kernels that are new on this machine run in a child process first.
        memory_limit: bytes that packed forms of weights may take together; None for no limit, 0 for none at all. The
            weights stay, for state dicts. A kernel for prompts and one for tokens may keep a form each. Where the CPU
            emulates half precision, one of them is in float32, and that of a quantised weight may be as large as a
            floating one. None means half of the free memory then. A weight without room is read as it lies, by the
            fastest kernel for that.
        weights: ``"int8"`` quantises the weights of linear layers and experts by a scale for each output, ``"fp8"`` to
            e4m3 likewise. ``"int4"`` has a scale for each 128 columns, ``"int4:32"`` for each 32; ``"mxfp4"`` and
            ``"nvfp4"`` have four bits in blocks. Where no fast kernel takes a format, another one is taken, with a
            warning, and settings order formats: ``quant.*``, docs/quantizing.md. ``"auto"`` takes int8 for experts, and
            for each layer the fastest format within ``accuracy`` on the sizes of the inputs' calls. By default nothing
            is quantised. Each layer is compared with its own code, on the inputs' rows or, without inputs, on random
            ones. The report says what each loses, and how far the model's output is from its own. Weights stay as they
            are, for ``undo()``, state dicts, gradients and calls that they serve faster, and codes follow what is
            written into them. The layer that gives a model's output, or shares an embedding's weight, is taken with
            inputs only. Nothing is compiled then.
        activations: ``"int8"`` quantises rows, too, by a scale for each or, with four bits, for a group. None
            multiplies them as they are, which gains at a few tokens at most. Without ``weights`` it is for weights that
            the model has quantised by group or in GGUF's blocks.
        accuracy: how far a layer's output may be from its own, as a share of its norm. A layer that loses more stays as
            it was. None is 0.03 for int8, auto and rows alone, 0.05 for fp8, and 0.15 for four bits.
        training: whether steps of training count: norms, and the loss of a causal language model of Transformers. In
            training mode and with labels its outputs have no logits then. A step forward and back on ``inputs`` (a dict
            with labels), or on random texts, proves them and times them. Attention, blocks and products stay the
            model's own, and nothing of inference is put on: docs/training.md.
        progress: hears what is done, how much of it, and of how much; a bar on a terminal if None. Not of tokenizers.

    With inputs, on a CPU, each model of Transformers, or the module itself, is also compiled as a whole for the shapes
    of the inputs' calls. ONNX Runtime, OpenVINO and Inductor are tried where they are installed; ``avoid=["openvino"]``
    leaves one out. A compiled call must give the same values, on these inputs and on others of their shapes, and take
    less time. It then runs calls of those shapes while weights, settings and modules stay as they are. Any other call
    runs the model's own code. Each keeps a copy of the weights, which counts against ``memory_limit``, and compiling
    takes at most half of ``budget_s``.

    Without inputs, on a CPU, whole layers and modules of each shape are timed against the model's own code on 1, 4 and
    64 random tokens. That takes a second or two a shape, once a process. Layers of a small model are timed as steps of
    the model itself. What is slower at one size by more than 1 % or the noise, or raises, is left as it was. Then steps
    of a whole decoder are timed, up to 16 of one token and of four in a row. Where they are slower for sure, layers
    compute another way, or the model keeps its own. Attention that is in no such layer is compared, and not timed. With
    ``graph=True`` all layers and their attention stay, since steps need them: what loses is shown, and not left.

    No other thread may use the model until this returns: its modules and settings are switched to and fro meanwhile.

    A tokenizer of Transformers comes back as one with the same interface and the same ids, whose texts the fastest
    exact library encodes (:func:`layerzero.integrations.tokenizers.optimize_tokenizer`).

    Where ``batch_invariant`` or ``require_tp_invariant`` is on, all that is checked stays, whatever time it takes. The
    report says what that costs on the inputs, and which products are left to the model's own code.

    Where ``distributed_selection`` is on, what another rank left is left, and ranks agree where this ends.

    Returns: the report, which prints what was done and why, and takes it back.
    Raises: TypeError for what has no modules; whatever the model raises on the inputs; what ``lz.agree`` does.
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
        for name, each in (("graph", graph), ("padding", padding), ("isolate", isolate), ("training", training))
        if not isinstance(each, bool)
    ]
    asked, wrong = requested.request(weights, activations, accuracy)
    problems += wrong
    if training is True and (graph is True or weights is not None or activations is not None):
        problems.append(
            "training: wanted it without graph=, weights= and activations=, which serve inference, got such"
        )
    refuse("optimize", problems)
    if is_tokenizer(model):
        return optimize_tokenizer(model, budget_s=budget_s)
    time = TimeLeft(budget_s)
    model = diffusers.whole(model)
    root = module_of(model)
    report = Optimized(weight_bytes=weight_bytes(root), memory_limit=memory_limit, time=time)
    if root.training and not training and not (_evaluates_itself(root) and (inputs is None or is_function(inputs))):
        why = "the model is in training mode, in which its own code runs; call model.eval() or pass training=True"
        report.left.append(Left("", type(root).__name__, why))
        return report
    if any(map(is_lazy, (*root.parameters(), *root.buffers()))):
        why = "parameters of lazy modules have no values before a first run; run the model once, then optimize it"
        report.left.append(Left("", type(root).__name__, why))
        return report
    already = sum(map(is_swapped, root.modules()))
    if already:
        why = f"{already} of its modules are LayerZero's already; undo() the first report to begin anew"
        report.left.append(Left("", type(root).__name__, why))
        return report
    try:
        if training:
            optimize_training(root, report, inputs, rounds)
            report.seconds = time.deadline.spent_s
            return report
        with bar_or(progress) as tell:
            workload = None if inputs is None else workload_of(model, inputs, time)
            rounding = requested.rounding(weights, activations, accuracy)
            search = Search(root, time, workload, tell, graph, rounds, isolate, rounding=rounding, accuracy=accuracy)
            _optimized(search, report, asked, padding=padding)
    except BaseException:  # all or nothing, whatever failed and however late
        report.undo()
        raise
    report.seconds = time.deadline.spent_s
    for text in fell_back(report.made):
        warn(f"lz.optimize: {text}", LayerZeroFallbackWarning, stacklevel=3)
    return report


def _evaluates_itself(root: Module) -> bool:
    """Whether a model leaves training mode when it is used, as a new SentenceTransformer does when it encodes.

    Until then, and when it is trained, its own code runs.
    """
    library = type(root).__module__.partition(".")[0]
    return library == "sentence_transformers" and any(hasattr(root, name) for name in ("encode", "predict"))


def _optimized(search: Search, report: Optimized, asked: requested.Request | None, *, padding: bool) -> None:
    """Find, check, put on and time, for a model that may be changed."""
    root, time, workload = search.root, search.time, search.workload
    if not time.allows("everything, the first run of the model included", RUN):
        report.left.append(Left("", type(root).__name__, NO_TIME))
        return
    parts = compiled_parts(root)

    def find_all(*finders: Callable[[Search], Iterator[Replaced | Left]]) -> list[Replaced]:
        with uncompiled(bool(parts)):
            return [each for finder in finders for each in report.sort(finder(search), parts)]

    watched = compiled_calls.CallsOfInputs(root)
    models = [] if parts else [each for _, each in watched.models]  # a hook would be compiled, too
    with watching(models, watched.keep), collectives() as exchanged:
        before = [] if workload is None else workload.run()
    shared = exchanged is not None and exchanged.seen
    if shared:
        why = "inputs: their calls exchange tensors with other ranks, which time by themselves; done as without inputs"
        report.left.append(Left("", type(root).__name__, why))
        search.workload = workload = None
    till_s = time.deadline.spent_s + time.deadline.left_s / 10
    report.large_pages = memory.take((*root.parameters(), *root.buffers()), lambda: time.deadline.spent_s > till_s)
    dtypes = dict.fromkeys(each.dtype for each in root.parameters() if each.device.type == "cpu")
    report.emulated = emulation.told(Device.detect("cpu"), dtypes)
    report.stock = "" if workload is None else stock_of(root, workload.device)
    finders = FINDERS if asked is None else (asked.find, *FINDERS)
    with time.holding_back(0.0 if workload is None else time.expected_s(RUN, WHOLE)):  # else nothing tells what slows
        found = find_all(*finders)
    invariant = current_policy().invariant  # then nothing goes because of its time, and no compiler helps
    mended = any(each.mends for each in found)  # a compiled model has the faults of its own code
    left = workload is None or asked is not None or invariant or mended or bool(parts)
    targets = [] if left else compiled_calls.compile_calls(search, report, watched)
    _join(found, root, report)
    for each in found:
        report.put_on(each)
    room = report.memory_limit
    grow = report.emulated or any(each.dense for each in report.packs)
    if room is None and grow:  # forms in float32 take twice what the weights do, and those of codes up to eight times
        room = int(min(available_bytes() / 2, sys.maxsize))
    if room is not None:
        budget = Budget(max(room - sum(map(compiled_calls.bytes_of, targets)), 0))
        for packs in report.packs:
            packs.bound(budget)
    if invariant:
        _tell_cost_of_invariance(report, workload)
    elif workload is None:
        time_random_rows(search, report)
        requested.keep_sizes(search, report)
    late = [stacks.find] if padding and not invariant else []  # behind the timing of modules, at sizes of their own
    late += [find_steps] if search.graph else [] if invariant else [gguf_steps.find]  # the first's runs are no steps
    for finder in late:  # the last one rests on the products that stayed
        for each in find_all(finder):
            report.put_on(each)
    report._forget()
    if workload is not None and not invariant:
        with time.holding_back(compiled_calls.timing_s(targets, workload, search.rounds)):
            time_inputs(search, report, before)
        requested.keep_sizes(search, report)
        compiled_calls.keep_faster(targets, report, workload, search.rounds)
    elif report.replaced and not invariant and not shared:
        report.tune.append("pass inputs= so that the calls which they make are measured and the gain is shown")
    if asked is not None and not report.made:
        report.tune += requested.hints(asked)
    for each in report.replaced:
        each.candidate = None  # example rows and results of each module, and references to weights


def _join(found: Iterable[Replaced], root: Module, report: Optimized) -> None:
    """Lay weights that one product computes with one after the other, where kernels read them as they lie."""
    weights = [each for each in root.parameters() if is_dense(each) and not each.is_meta]
    holders = Counter(each.untyped_storage().data_ptr() for each in weights)
    for each in found:
        for part in each.swap.state.parts if isinstance(each.exchange, Swap) else ():
            if isinstance(part, Packs) and not part.may_pack:
                part.join(holders, report._joined)


def module_of(model: Any) -> Module:
    """The module to optimize: the model, or what it keeps under the names that pipelines use.

    Raises: TypeError naming what was wanted.
    """
    found = model if isinstance(model, Module) else getattr(model, "model", None)
    if isinstance(found, Module) and not isinstance(found, torch.jit.ScriptModule):
        return found
    hint = "; optimize the module that the script was made of" if isinstance(found, Module) else ""
    raise TypeError(f"optimize: wanted a torch.nn.Module or what has one as .model, got {type(model).__name__}{hint}")


def weight_bytes(root: Module) -> int:
    """Memory of all parameters and buffers, each once."""
    storages = {}
    for each in (*root.parameters(), *root.buffers()):
        if not is_lazy(each) and not each.is_meta and each.layout is torch.strided and type(each.data) is torch.Tensor:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tell_cost_of_invariance(report: Optimized, workload: Workload | None) -> None:
    """Say what invariant bits cost, in units of the model's own time, and which products may have other bits."""
    if workload is not None and report.time.allows("timing what invariant bits cost", RUN, 2 * _TURNS):
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(_TURNS):
            for on, samples in times.items():
                switch_all(report.replaced, on)
                sample = workload.sample()
                samples.extend([sample] if turn else [])
        own_s, ours_s = (statistics.median(each) for each in times.values())
        report.tune.append(f"invariant bits cost {ours_s / own_s:.2f} times the model's own time on these inputs")
    left = [f"{each.path} ({each.module})" for each in report.left]
    if left:
        named = ", ".join(left[:3])
        report.tune.append(f"{len(left)} modules run their own code, whose bits may depend on the batch: {named}")
