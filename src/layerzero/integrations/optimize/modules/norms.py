"""Norms by what they compute: by the root mean square or by mean and variance, with a weight or with 1 + weight."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import LayerNorm, Module, Parameter, RMSNorm, functional

import layerzero as lz
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, in_short
from layerzero.core.graph_capture import capture_of
from layerzero.integrations.optimize.attention.dynamic_cache import runs_a_library
from layerzero.integrations.optimize.swaps.candidate import (
    STRUCTURE,
    Candidate,
    candidate,
    distance,
    quiet,
    random_rows,
    weight_problem,
)
from layerzero.integrations.optimize.swaps.reads import functions_of, kept_by
from layerzero.integrations.optimize.swaps.swap import (
    ABSENT,
    MARK,
    State,
    as_forward,
    by_name,
    is_dense,
    serves,
    weight_of,
)
from layerzero.ops.linear.glance import Glance

_LARGEST_EPS = 0.01

WIDE = "norms in float64 run their own code: that of Transformers' computes in float32 whatever the input is"
"""Why a norm stays that would be 1e-7 from its own code: the kernels compute in float64 there."""


class Norm(State):
    """The formula and the number under its root, which is the dtype's own where the module leaves it open.

    Attributes:
        form: ``rms``, ``one_plus`` (by 1 + weight) or ``layer``.
    """

    def __init__(self, form: str, eps: float | None) -> None:
        super().__init__()
        self.form, self.eps = form, eps

    def weights_of(self, module: Module) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the norm; None where they are computed since, or are of another class than torch's."""
        parameters = module._parameters
        weight = parameters.get("weight")
        if type(weight) is not Parameter:
            return None
        if self.form != "layer":  # the others have none, which a module takes a microsecond to say
            return weight, None
        bias = parameters.get("bias")
        if bias is None and "bias" not in parameters and getattr(module, "bias", None) is not None:
            return None
        return weight, bias

    def eps_for(self, input: Tensor) -> float:
        """Torch's norm without one takes the smallest step from 1 of the dtype that it computes in."""
        return _step_of(input.dtype) if self.eps is None else self.eps

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The norm of an input. Raises: InvalidCallError for one of another kind than it was made for."""
        if self.form == "layer":
            return lz.layer_norm(input, weight.shape, weight, bias, self.eps_for(input))
        return lz.rms_norm(input, weight, self.eps_for(input))


def _step_of(dtype: torch.dtype) -> float:
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


class OneAndWeight:
    """1 + weight, made anew once the weight was written into or moved: in float32, or rounded to the weight's dtype."""

    def __init__(self, *, rounded: bool) -> None:
        self._rounded = rounded
        self._made_of: tuple[Any, ...] = ()
        self._stood: Glance | None = None
        self._sum = torch.empty(0)

    def of(self, weight: Tensor) -> Tensor:
        """The sum for a weight as it is now."""
        made_of = weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version
        if self._made_of != made_of or self._stood is None or self._stood.differs:
            total = 1 + weight.detach().float()
            total = total.to(weight.dtype) if self._rounded else total
            if capture_of(weight) is not None:  # it holds nothing before a replay
                return total
            stood = Glance(weight)
            stood.sum_up()
            self._sum, self._made_of, self._stood = total, made_of, stood
        return self._sum

    @property
    def bytes(self) -> int:
        return self._sum.nbytes


class OnePlus(Norm):
    """1 + weight in float32: exact enough for any dtype of the weight."""

    def __init__(self, form: str, eps: float | None) -> None:
        super().__init__(form, eps)
        self.factor = OneAndWeight(rounded=False)

    @property
    def bytes(self) -> int:
        return self.factor.bytes

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG002
        return lz.rms_norm(input.float(), self.factor.of(weight), self.eps_for(input)).to(input.dtype)


@as_forward
def _norm(self: Module, input: Tensor = ABSENT, /, *others: Any, **named: Any) -> Any:
    if input is ABSENT:
        return by_name(_norm, self, named)
    state: Any = self.__dict__.get(MARK)
    mine = not others and not named and serves(state, input, *self._parameters.values())
    mine = mine and input.dtype is not torch.float64  # cast since
    own = state.weights_of(self) if mine else None
    if own is not None and (own[0].dtype is input.dtype or state.form == "one_plus"):
        try:
            return state.compute(input, *own)
        except InvalidCallError:  # the module knows what to say
            pass
    return type(self).forward(self, input, *others, **named)


def norm(module: Module) -> Candidate | str | None:
    """A candidate for a module that is a norm, None for one that is none, or why it cannot be known."""
    parameters = {name: each for name, each in module._parameters.items() if each is not None}
    weight = parameters.get("weight")
    if weight is None or not all(map(is_dense, parameters.values())) or weight.ndim != 1 or not weight.numel():
        return None
    if module._modules or any(True for _ in module.buffers(recurse=False)):
        return None
    if set(parameters) - {"weight", "bias"} or any(each.shape != weight.shape for each in parameters.values()):
        return None
    for name, each in parameters.items():
        if each.is_meta:
            return f"{name} {weight_problem(each)}"
    example = random_rows(module, weight.shape[0], dtype=weight.dtype, device=weight.device)
    form, eps, why = _form_of(module, has_bias="bias" in parameters)
    if form is None:
        return why or None
    if weight.dtype is torch.float64:
        return WIDE
    number = _step_of(weight.dtype) if eps is None else eps
    kinds: dict[str, tuple[type[Norm], str, str, tuple[Any, ...]]] = {
        "rms": (Norm, "lz.rms_norm", "rms_norm", (example, weight)),
        "one_plus": (OnePlus, "lz.rms_norm by 1 + weight", "rms_norm", (example.float(), weight.detach().float())),
        "layer": (Norm, "lz.layer_norm", "layer_norm", (example, tuple(weight.shape), weight, parameters.get("bias"))),
    }
    state, calls, function, given = kinds[form]
    asked: tuple[str, tuple[Any, ...], dict[str, Any]] = function, (*given, number), {}
    stock = type(module).forward in {LayerNorm.forward, RMSNorm.forward}
    return candidate(
        module, _norm, state(form, eps), kind="norm", calls=calls, example=example, asked=asked, stock=stock
    )


def _form_of(module: Module, *, has_bias: bool) -> tuple[str | None, float | None, str]:
    """The formula of a module, found on a copy of it with other weights, in float32; a short row shows its eps."""
    twin = copy.deepcopy(module).to("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    size = weight_of(twin).shape[0]
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(size, generator=generator, device="cpu", dtype=torch.float32) + 0.5)
    shape = 3, 1, size  # a group norm's channels: the second axis
    rows = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) + 0.5
    rows *= torch.tensor([1.0, 0.03, 0.001], dtype=torch.float32, device="cpu")[:, None, None]
    try:
        with quiet(twin):
            expected = twin(rows.clone())
    except Exception as error:  # noqa: BLE001  # it takes something else than one tensor: whatever it raises
        return None, None, f"it does not compute on one tensor of rows: {in_short(error)}"
    if not isinstance(expected, Tensor) or expected.shape != rows.shape:
        return None, None, ""
    weight, bias = weight_of(twin), twin._parameters.get("bias")
    for eps in _eps_of(twin):
        number = _step_of(torch.float32) if eps is None else eps
        formulas: dict[str, Tensor] = {"layer": functional.layer_norm(rows, (size,), weight, bias, number)}
        if not has_bias:
            formulas["rms"] = functional.rms_norm(rows, (size,), weight, number)
            formulas["one_plus"] = functional.rms_norm(rows, (size,), 1 + weight, number)
        for name, got in formulas.items():
            if all(distance(a, b) <= STRUCTURE for a, b in zip(got.detach(), expected, strict=True)):
                return name, eps, ""
    return None, None, "its output is none of the norms' formulas"


def _eps_of(module: Module) -> Iterator[float | None]:
    """Small numbers that a module or its code keeps, any of which may be what stands under the root."""
    written = [each for of in functions_of(module) for each in (*of.__code__.co_consts, *kept_by(of).values())]
    if getattr(module, "eps", 0.0) is None:
        yield None
    for value in dict.fromkeys(each for each in (*vars(module).values(), *written) if isinstance(each, float)):
        if 0 <= value <= _LARGEST_EPS:
            yield value


class Normed:
    """One norm of a layer, alone or behind an addition."""

    def __init__(self, module: Module, norm: Norm) -> None:
        self.module, self.form, self.norm = module, norm.form, norm
        self._factor = OneAndWeight(rounded=True)  # as a library's sum is
        self._writes_both: bool | None = None

    @property
    def weight(self) -> Parameter:
        """The norm's own, whatever is made of it."""
        return weight_of(self.module)

    @property
    def is_computed(self) -> bool:
        """Whether the weight is no parameter any more: it was pruned or parametrised since."""
        return self.norm.weights_of(self.module) is None

    @property
    def bytes(self) -> int:
        """Memory of the factor, where it is another than the weight."""
        return self._factor.bytes

    def _scale(self) -> Tensor:
        return self._factor.of(self.weight) if self.form == "one_plus" else self.weight

    def alone(self, rows: Tensor) -> Tensor:
        """The norm of rows. Raises: InvalidCallError for a weight of another dtype, of which modules make either."""
        weight = self.weight
        if weight.dtype is not rows.dtype:
            got = f"weight: wanted dtype {dtype_name(rows.dtype)} like rows, got {dtype_name(weight.dtype)}"
            raise InvalidCallError("norm of a layer", [got])
        if self.form == "layer":
            return lz.layer_norm(
                rows, weight.shape, weight, self.module._parameters.get("bias"), self.norm.eps_for(rows)
            )
        return lz.rms_norm(rows, self._scale(), self.norm.eps_for(rows))

    def of_sum(self, rows: Tensor, fresh: Tensor) -> Tensor:
        """The norm of a sum, which is left in ``fresh``: a tensor that nothing else has."""
        if self.form == "layer":
            return self.alone(fresh.add_(rows))
        return lz.add_residual_rms_norm_(rows, fresh, self._scale(), self.norm.eps_for(rows))

    def over_both(self, rows: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and the sum; ``rows`` may be written over, too.

        One call spares a launch where nothing reads the sum in between: on an H200 the addition alone took 1.4 us of a
        captured step and the norm 2.3 (torch 2.11, 2026-11-22).
        """
        if self._writes_both is None:
            self._writes_both = self.form != "layer" and runs_a_library(
                "add_rms_norm_", fresh, rows, self._scale(), self.norm.eps_for(rows)
            )
        if not self._writes_both:
            return self.of_sum(rows, fresh), fresh
        lz.add_rms_norm_(fresh, rows, self._scale(), self.norm.eps_for(rows))
        return fresh, rows


def normed(module: Module) -> Normed | None:
    """A norm of a layer; None for a module that is none."""
    found = norm(module)
    if not isinstance(found, Candidate) or not isinstance(found.swap.state, Norm):
        return None
    return Normed(module, found.swap.state)


def fit(pair: tuple[Normed, Normed], sizes: tuple[int, int, int]) -> bool:
    """Whether these are norms of heads that one call computes for both, or each of all heads."""
    (first, second), (heads, kv_heads, width) = pair, sizes
    same = first.form == second.form and first.norm.eps == second.norm.eps and first.form != "layer"
    lengths = first.weight.shape[0], second.weight.shape[0]
    return same and lengths in {(width, width), (heads * width, kv_heads * width)}


def places(norms: dict[str, Normed]) -> Iterator[tuple[tuple[str, ...], tuple[Normed | None, ...]]]:
    """Where norms may stand: before or behind attention and block, or around both."""
    for names in itertools.permutations(norms):
        chosen = [norms[name] for name in names]
        if len(chosen) == 4:
            yield (*names, "around"), tuple(chosen)
        else:
            yield (*names, "before"), (chosen[0], None, chosen[1], None)
            yield (*names, "behind"), (None, chosen[0], None, chosen[1])
