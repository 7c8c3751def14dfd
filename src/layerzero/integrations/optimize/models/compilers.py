"""Libraries that compile a whole model for the shapes of one call: ONNX Runtime, OpenVINO and Inductor.

Each is a function of a module and of an example, and gives a function of the example's tensors or says why not. All of
them copy the weights, in an order of their own, so what they give holds only while the weights stay as they are.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from layerzero.core.dtypes import dtype_name
from layerzero.core.system import forking
from layerzero.integrations.optimize.swaps.candidate import watching

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Tensors of a call to tensors of its result."""


@dataclass(frozen=True)
class Compiler:
    """A library that compiles models.

    Attributes:
        name: as settings call it.
        needs: modules that it imports.
        least_s, each_s: seconds for the smallest module, and for each submodule: what a first one is expected to take.
        compile: of a module that takes and gives tensors, in evaluation mode, and of an example of what it takes.
    """

    name: str
    needs: tuple[str, ...]
    least_s: float
    each_s: float
    compile: Callable[[Module, Sequence[Tensor]], Run | str]

    @property
    def missing(self) -> str:
        """What of its modules is not installed; empty where all are."""
        return ", ".join(each for each in self.needs if importlib.util.find_spec(each) is None)

    @property
    def text(self) -> str:
        library = self.needs[0] if self.needs else "torch"
        return f"{self.name} {importlib.metadata.version(library)}"


@contextmanager
def _silent() -> Iterator[None]:
    """Tracers warn of every Python value that they make a constant: values are compared afterwards."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _not_float32(module: Module) -> str:
    others = {each.dtype for each in module.parameters() if each.dtype is not torch.float32}
    return f"it compiles float32, and weights are {dtype_name(others.pop())}" if others else ""


def _from(arrays: Sequence[Any]) -> list[Tensor]:
    return [torch.from_numpy(each) for each in arrays]


def _onnxruntime(module: Module, example: Sequence[Tensor]) -> Run | str:
    why = _not_float32(module)
    if why:
        return why
    import onnxruntime

    made = io.BytesIO()
    names = [f"input_{number}" for number in range(len(example))]
    # torch's exporter turns its log on, and on an operator that it does not know it writes the whole graph to stdout
    quietly = watching([module], lambda *_: torch._C._jit_set_onnx_log_enabled(False))
    with _silent(), torch.no_grad(), quietly:
        torch.onnx.export(module, tuple(example), made, dynamo=False, input_names=names, opset_version=18)  # type: ignore[arg-type]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # threads that spin after a call took 40 of 48 ms from the next one's in torch (Xeon, 2 threads, 2026-11-25)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(made.getvalue(), options, providers=["CPUExecutionProvider"])
    kept = {each.name for each in session.get_inputs()}  # what the model does not read is gone

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        given = {name: each.numpy() for name, each in zip(names, tensors, strict=True) if name in kept}
        return _from(session.run(None, given))

    return run


def _openvino(module: Module, example: Sequence[Tensor]) -> Run | str:
    why = _not_float32(module)
    if why:
        return why
    openvino: Any = importlib.import_module("openvino")

    with _silent(), torch.no_grad():
        model = openvino.convert_model(module, example_input=tuple(example))
        for each, tensor in zip(model.inputs, example, strict=True):
            each.get_node().set_partial_shape(openvino.PartialShape(list(tensor.shape)))
        model.validate_nodes_and_infer_types()
    told = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    compiled = openvino.Core().compile_model(model, "CPU", told)
    request, count, one_at_a_time = compiled.create_infer_request(), len(compiled.outputs), forking.rlock()

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        with one_at_a_time:
            found = request.infer([each.numpy() for each in tensors], share_inputs=True)
            return _from([found[number] for number in range(count)])

    return run


def _inductor(module: Module, example: Sequence[Tensor]) -> Run | str:
    from torch._inductor import config

    compiled = torch.compile(module, dynamic=False, fullgraph=True)
    with _silent(), torch.no_grad(), config.patch(freezing=True):
        compiled(*example)  # which compiles

    def run(tensors: Sequence[Tensor]) -> Any:
        with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
            return compiled(*tensors)

    return run


COMPILERS = (
    Compiler("onnxruntime", ("onnxruntime", "onnx"), 2.0, 0.05, _onnxruntime),
    Compiler("openvino", ("openvino",), 4.0, 0.15, _openvino),
    Compiler("torch.inductor", (), 15.0, 0.6, _inductor),
)
"""The quickest to compile first. Seconds: MiniLM (117 submodules), EPYC, one thread of a machine with 13 runnable ones,
2026-11-26: 5.3 s, 15 s and 72 s."""


class Flat(Module):
    """A module as a function of tensors: the other arguments are constants, and of its result the tensors count."""

    def __init__(
        self, module: Module, rebuild: Callable[[Sequence[Tensor]], Any], tensors: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.module = module
        self._rebuild, self._tensors = rebuild, tensors

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the result."""
        others, named = self._rebuild(given)
        return tuple(self._tensors(self.module(*others, **named)))
