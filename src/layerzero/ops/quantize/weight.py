"""``lz.QuantizedWeight``: the tensors of one quantised weight, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.bundle import MISSING, Bundle
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.reasons import ReasonCode
from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.schemes import conversion, format_problems, instead, scheme_of
from layerzero.ops.quantize.weight_format import Codes, Fields, WeightFormat, arguments_of, rotation_of

if TYPE_CHECKING:
    from layerzero.ops.linear.packed import PackedWeight


class QuantizedWeight(Bundle):
    """A weight (N, K) as a file holds it, or a stack (E, N, K): its format, and the tensors that this format has.

        weight = lz.QuantizedWeight.from_gptq(qweight, qzeros, scales, g_idx, bits=4, group_size=128)
        y = lz.quantized_linear(x, weight)

    Calls take it in place of ``weight``, or its tensors and ``weight_format=str(weight.format)``, which costs less. It
    makes one :class:`layerzero.PackedWeight` of itself, which its calls bring: a kernel that wants another order makes
    that once. Weights of experts are a stack, for :func:`layerzero.moe_experts`: each tensor has an axis more, in
    front. ``weight[e]`` is that of one, :meth:`stack` joins those of several.

    Attributes:
        format: how the tensors hold the numbers.
        shape: (N, K), the rows and columns of the numbers, or (E, N, K).
        fields: the tensors, by name.
    Args:
        format: a :class:`layerzero.WeightFormat`, or its text.
        data, scale, zero, group_index, second_scale: see :mod:`layerzero.ops.quantize.schemes` for the shapes.
    Raises: InvalidCallError for a tensor of another shape or dtype than the format and the size say, for groups that do
        not divide, for scales that are not finite or, where no block of zeros has one, 0, and for an index
        that is none. This reads the values once, which waits for the device.
    """

    __slots__ = ("_packed", "_text", "fields", "format", "shape")

    def __init__(
        self,
        format: WeightFormat | str,  # noqa: A002  # what it is everywhere
        shape: Sequence[int],
        data: Tensor,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        group_index: Tensor | None = None,
        second_scale: Tensor | None = None,
    ) -> None:
        of = format if isinstance(format, WeightFormat) else WeightFormat.of(format)
        given = Fields(data, scale, zero, group_index, second_scale)
        if problems := format_problems(of):
            problems[-1] += f"; {instead(of, shape)}"
            raise InvalidCallError("QuantizedWeight", problems, ReasonCode.QUANT_FORMAT_UNSUPPORTED)
        if problems := _shape_problems(of, shape, given) or scheme_of(of).problems_of_values(of, given):
            raise InvalidCallError("QuantizedWeight", problems)
        self.format, self.shape, self.fields = of, tuple(int(each) for each in shape), given
        self._packed: PackedWeight | None = None
        self._text = str(of)

    @classmethod
    def unchecked(cls, format: WeightFormat, shape: tuple[int, ...], fields: Fields) -> QuantizedWeight:  # noqa: A002
        """One of tensors that were checked before."""
        made = cls.__new__(cls)
        made.format, made.shape, made.fields, made._packed, made._text = format, shape, fields, None, str(format)
        return made

    @classmethod
    def stack(cls, weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Those of several experts as one, (E, N, K); their tensors are copied.

        Raises: InvalidCallError for none, and for weights that differ in format, shape or dtypes.
        """
        problems = [] if len(weights) else ["weights: wanted at least one, got none"]
        for number, each in enumerate(weights):
            if not isinstance(each, QuantizedWeight) or len(each.shape) != 2:
                problems.append(f"weights[{number}]: wanted a QuantizedWeight (N, K), got {told(each)}")
            elif _kind(each) != _kind(weights[0]):
                problems.append(f"weights[{number}]: wanted {weights[0]!r} like the first, got {each!r}")
        refuse("QuantizedWeight.stack", problems)
        first = weights[0]
        columns = zip(*[each.fields for each in weights], strict=True)
        fields = Fields(*[None if each[0] is None else torch.stack(each) for each in columns])  # type: ignore[arg-type]
        return cls.unchecked(first.format, (len(weights), *first.shape), fields)

    def __getitem__(self, number: int) -> QuantizedWeight:
        """The weight of one expert of a stack, views of its tensors."""
        if len(self.shape) != 3 or not -self.shape[0] <= number < self.shape[0]:  # what ends a loop over it
            raise IndexError(f"wanted an expert of {self!r}, got {number}")
        return QuantizedWeight.unchecked(self.format, self.shape[1:], self.fields.of_expert(number))

    @classmethod
    def from_gptq(
        cls,
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        g_idx: Tensor | None = None,
        *,
        bits: int = 4,
        group_size: int = 128,
        version: int = 1,
    ) -> QuantizedWeight:
        """Of GPTQ's tensors; version 1 stores zero points less one (``checkpoint_format: gptq``), 2 as they are.

        Shapes: qweight (K * bits / 32, N), qzeros (G, N * bits / 32), scales (G, N), g_idx (K,). A ``group_size`` of -1
        is a whole column. An index in order is left out, so that kernels without act-order take the weight.
        """
        problems = [] if bits in (2, 3, 4, 8) else [f"bits: wanted 2, 3, 4 or 8, got {told(bits)}"]
        problems += [] if version in (1, 2) else [f"version: wanted 1 or 2, got {told(version)}"]
        problems += _tensors_missing({"qweight": qweight, "qzeros": qzeros, "scales": scales}, 2)
        refuse("QuantizedWeight.from_gptq", problems)
        columns, group = qweight.shape[0] * 32 // bits, max(group_size, 0)
        if g_idx is not None and g_idx.shape == (columns,):
            in_order = torch.arange(columns, device=g_idx.device) // (group or columns)
            g_idx = None if torch.equal(g_idx.to(in_order.dtype), in_order) else g_idx.to(torch.int32)
        zeros = "minus_one" if version == 1 else "stored"
        of = WeightFormat("gptq", bits=bits, group=group, zeros=zeros, permuted=g_idx is not None)
        return cls(of, (qweight.shape[1], columns), qweight, scales, qzeros, g_idx)

    @classmethod
    def from_awq(cls, qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group_size: int = 128) -> QuantizedWeight:
        """Of AWQ's tensors (``version: gemm``). Shapes: qweight (K, N / 8), qzeros (G, N / 8), scales (G, N)."""
        problems = _tensors_missing({"qweight": qweight, "qzeros": qzeros, "scales": scales}, 2)
        refuse("QuantizedWeight.from_awq", problems)
        of = WeightFormat("awq", bits=4, group=max(group_size, 0), zeros="stored")
        return cls(of, (qweight.shape[1] * 8, qweight.shape[0]), qweight, scales, qzeros)

    @classmethod
    def from_marlin(cls, B: Tensor, s: Tensor, *, group_size: int = 128) -> QuantizedWeight:  # noqa: N803  # its names
        """Of a file whose weights lie in Marlin's order (``checkpoint_format: marlin``): four bits, no zero points.

        Shapes: B (K / 16, 2 N), s (G, N). A ``group_size`` of -1 is a whole column. :func:`layerzero.repack` lays the
        same numbers out as another format. 2:4 sparse weights (``marlin_24``: ``B_24``, ``B_meta``) are refused.
        """
        refuse("QuantizedWeight.from_marlin", _tensors_missing({"B": B, "s": s}, 2))
        of, shape = WeightFormat("marlin", bits=4, group=max(group_size, 0)), (s.shape[1], B.shape[0] * 16)
        if of.group and len(s) * of.group == 2 * shape[1]:
            wanted = f"B: wanted {len(s) * of.group // 16} rows for {len(s)} groups of {of.group}, got {len(B)}"
            sparse = WeightFormat("marlin_24", bits=4, group=of.group)
            problem = f"{wanted}, as 2:4 sparse weights have (marlin_24); {instead(sparse, (shape[0], 2 * shape[1]))}"
            raise InvalidCallError("QuantizedWeight.from_marlin", [problem], ReasonCode.QUANT_FORMAT_UNSUPPORTED)
        return cls(of, shape, B, s)

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_shape: Tensor | tuple[int, int],
        weight_zero_point: Tensor | None = None,
        weight_g_idx: Tensor | None = None,
        *,
        bits: int = 4,
        group_size: int = -1,
    ) -> QuantizedWeight:
        """Of compressed-tensors' ``pack-quantized``: weight_packed (N, ceil(K * bits / 32)), weight_scale (N, G).

        Args:
            weight_shape: N and K.
            weight_zero_point: packed along N, int32 (ceil(N * bits / 32), G), or int8 (N, G).
            weight_g_idx: (K,) the group of each column; one of -1 is none.
            group_size: -1 where a row has one scale.
        """
        rows, columns = (int(each) for each in weight_shape)
        zeros = "none"
        if weight_zero_point is not None:
            zeros = "signed" if weight_zero_point.dtype is torch.int8 else "stored"
        if weight_g_idx is not None and weight_g_idx.numel() and int(weight_g_idx.flatten()[0]) == -1:
            weight_g_idx = None
        group_index = None if weight_g_idx is None else weight_g_idx.to(torch.int32)
        group = max(group_size, 0)
        of = WeightFormat("compressed-tensors", bits=bits, group=group, zeros=zeros, permuted=group_index is not None)
        return cls(of, (rows, columns), weight_packed, weight_scale, weight_zero_point, group_index)

    @classmethod
    def from_fp8(cls, weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> QuantizedWeight:
        """Of float8 (N, K) with a scale for each block (``weight_scale_inv``), row (N, 1) or (N,), or for all: ().

        Of a stack (E, N, K) scales are (E, blocks, blocks), (E, N, 1) or (E,).
        """
        wrong = _tensors_missing({"weight": weight}, 2, exactly=False)
        refuse("QuantizedWeight.from_fp8", wrong + _tensors_missing({"scale": scale}, 0, exactly=False))
        lead = tuple(weight.shape[:-2])
        if scale.ndim == weight.ndim and tuple(scale.shape[-2:]) not in ((weight.shape[-2], 1), (1, 1)):
            return cls(WeightFormat("fp8", rows=block[0], group=block[1]), tuple(weight.shape), weight, scale)
        of = WeightFormat("fp8", rows=1 if scale.numel() > math.prod(lead) else 0)
        return cls(of, tuple(weight.shape), weight, scale.reshape(*lead, -1, 1) if of.rows else scale.reshape(lead))

    @classmethod
    def from_mx(cls, weight: Tensor, scale: Tensor, of: str = "", *, rotation: int | Tensor = 0) -> QuantizedWeight:
        """Of MX: uint8 (N, K / 2) or, as gpt-oss has it, (N, K / 32, 16), or float8 (N, K); scale (N, K / 32).

        Of a stack with an axis more: gpt-oss's ``gate_up_proj_blocks`` (E, N, K / 32, 16). Of six bits are (N, 3 K / 4)
        with ``of="mxfp6_e2m3"`` or ``"mxfp6_e3m2"``, which no dtype tells. Of MR-GPTQ's weights ``rotation`` is the
        size of the Hadamard matrix that columns were multiplied by, or this matrix (``forward_hadamard_matrix``).
        """
        refuse("QuantizedWeight.from_mx", _tensors_missing({"weight": weight, "scale": scale}, 2, exactly=False))
        weight = weight.flatten(min(scale.ndim, weight.ndim) - 1)
        name = of or ("mxfp4" if weight.dtype is torch.uint8 else "mxfp8")
        bits = {"mxfp4": 4.0, "mxfp8": 8.0}.get(name, 6.0)
        made = WeightFormat(name, rotation=rotation_of(rotation))
        return cls(made, (*weight.shape[:-1], int(weight.shape[-1] * 8 // bits)), weight, scale)

    @classmethod
    def from_nvfp4(
        cls, weight: Tensor, scale: Tensor, second_scale: Tensor, *, divides: bool = False, rotation: int | Tensor = 0
    ) -> QuantizedWeight:
        """Of NVFP4: weight (N, K / 2), scale (N, K / 16), second_scale one number; of a stack (E, ...) one for each.

        ``divides``: scales are quotients by it (``weight_global_scale``), no multiples (ModelOpt's ``weight_scale_2``).
        ``rotation``: as of :meth:`from_mx`.
        """
        wrong = _tensors_missing({"weight": weight, "scale": scale}, 2, exactly=False)
        refuse("QuantizedWeight.from_nvfp4", wrong + _tensors_missing({"second_scale": second_scale}, 0, exactly=False))
        of = WeightFormat("nvfp4", "over" if divides else "", rotation=rotation_of(rotation))
        return cls(of, (*weight.shape[:-1], 2 * weight.shape[-1]), weight, scale, second_scale=second_scale)

    @classmethod
    def from_bitsandbytes(cls, data: Tensor, state: Any) -> QuantizedWeight:
        """Of ``Params4bit.data`` and its ``quant_state``; double quantisation is undone, once, into float32.

        On a CPU the first call of a layer lays them out anew, for rows in blocks of 32, with scales in bfloat16.
        """
        absmax = state.absmax
        if getattr(state, "packing_format_for_cpu", False):
            rows, columns = state.shape
            blocks = data.view(torch.uint8).view(rows // 32, columns // 2, 32)
            pairs = torch.cat((blocks & 15, blocks >> 4), -1).view(rows // 32, columns // 2, 32, 2).transpose(1, 2)
            data, absmax = (pairs[..., 0] << 4 | pairs[..., 1]).contiguous(), absmax.t().flatten()
        elif state.nested:
            inner, codes = state.state2, absmax.to(torch.int64)
            each = inner.absmax.repeat_interleave(inner.blocksize)[: codes.numel()]
            absmax = inner.code[codes] * each + state.offset
        of = WeightFormat(state.quant_type, group=state.blocksize)
        return cls(of, tuple(int(each) for each in state.shape), data.view(torch.uint8).reshape(-1, 1), absmax.float())

    @property
    def codes(self) -> Codes:
        """Whole numbers by group; of a format of such. Raises: InvalidCallError for any other, and of a stack."""
        scheme = GROUPED.get(self.format.scheme)
        if scheme is None:
            wanted = f"codes: wanted a format of whole numbers by group ({', '.join(GROUPED)}), got {self.format}"
            step = conversion(WeightFormat("compressed-tensors", bits=8, group=128), self.shape)
            raise InvalidCallError("QuantizedWeight", [f"{wanted}; {step}"], ReasonCode.REQUANTIZATION_REQUIRED)
        if len(self.shape) == 3:
            step = "weight[e].codes are those of one expert"
            raise InvalidCallError("QuantizedWeight", [f"codes: wanted one weight, got {self!r}; {step}"])
        return scheme.codes(self.format, self.fields, self.shape[1])

    @property
    def packed(self) -> PackedWeight:
        """What kernels keep their own forms of this weight on, made at the first call."""
        from layerzero.ops.linear.packed import PackedWeight  # which knows this class

        made = self._packed
        if made is None:
            made = self._packed = PackedWeight(self)
        return made

    @property
    def is_by_row(self) -> bool:
        """Whether it is float8 with float32 scales, one for each row or for all: what calls take without a format."""
        of, scale = self.format, self.fields.scale
        return (
            of.scheme == "fp8" and not of.group and of.rows < 2 and scale is not None and scale.dtype is torch.float32
        )

    @property
    def bytes(self) -> int:
        """Memory that its tensors take."""
        return sum(each.nbytes for each in self.fields if each is not None)

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers (N, K), or of a stack (E, N, K), as the library gives them that defines the format.

        Dtype: that of this library if None.
        """
        if len(self.shape) == 3:
            return torch.stack([self[number].dequantized(dtype) for number in range(self.shape[0])])
        scheme, own = scheme_of(self.format), scheme_of(self.format).own_dtype(self.fields)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        return scheme.dequantized(self.format, self.fields, self.shape[1], wide).to(dtype or own)

    def arguments_of(self, function: str, parameter: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its tensors and its format. Raises: InvalidCallError where it stands for anything but a weight."""
        names, of_experts, text = arguments_of(parameter), len(self.shape) == 3, self._text
        places: tuple[str, ...] = {
            "moe_experts": ("gate_up_weight", "down_weight"),
            "quantized_linear": ("weight",),
        }.get(function, ())
        if parameter not in places or of_experts != (function == "moe_experts"):
            wanted = "one of experts (E, N, K)" if of_experts < (function == "moe_experts") else "one weight (N, K)"
            wanted = wanted if parameter in places else "a tensor"
            step = (
                "weight[e] is that of one expert"
                if wanted == "one weight (N, K)"
                else "weight.dequantized() gives its numbers"
            )
            raise InvalidCallError(function, [f"{parameter}: wanted {wanted}, got a {self!r}; {step}"])
        brought: dict[str, Any] = {names[name]: each for name, each in zip(Fields._fields, self.fields, strict=True)}
        brought[names["format"]] = text
        for name, mine in brought.items():
            named = None if name == parameter else given.get(name)
            if not (named is None or named is MISSING or named is mine or named == text):
                problem = f"{name}: wanted None with a QuantizedWeight, which brings it, got one"
                raise InvalidCallError(function, [problem])
        bring_packed = given.get(names["packed"]) in (None, MISSING)
        if bring_packed and not torch.compiler.is_compiling():  # it has no place for one
            brought[names["packed"]] = self.packed
        if self.is_by_row and not of_experts:  # more kernels have the operation of these
            return {name: brought[name] for name in ("weight", "weight_scale", "packed") if name in brought}
        return brought

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.format}, {' x '.join(map(str, self.shape))}, {self.bytes} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        return QuantizedWeight.unchecked, (self.format, self.shape, self.fields)


def _tensors_missing(tensors: Mapping[str, object], ndim: int, *, exactly: bool = True) -> list[str]:
    """What is no tensor of so many axes, or of so many or more, by the names that the file has."""
    more = "" if exactly else " or more"
    return [
        f"{name}: wanted a tensor of {ndim} axes{more}, got {told(each)}"
        for name, each in tensors.items()
        if not isinstance(each, Tensor) or each.ndim < ndim or (exactly and each.ndim > ndim)
    ]


def _kind(weight: QuantizedWeight) -> tuple[object, ...]:
    """What weights of one stack have in common."""
    return weight.format, weight.shape, *[None if each is None else (each.dtype, each.device) for each in weight.fields]


def _shape_problems(of: WeightFormat, shape: object, given: Fields) -> list[str]:
    if not isinstance(shape, (tuple, list)) or len(shape) not in (2, 3) or not all(type(each) is int for each in shape):
        return [f"shape: wanted rows and columns as two integers, or experts before them, got {told(shape)}"]
    strangers = [
        f"{name}: wanted a tensor or None, got {told(each)}"
        for name, each in given._asdict().items()
        if not isinstance(each, Tensor) and (each is not None or name == "data")
    ]
    if strangers:
        return strangers
    tensors = {name: each for name, each in given._asdict().items() if each is not None}
    dense = [
        f"{name}: wanted a dense tensor, got {told(each)}"
        for name, each in tensors.items()
        if each.is_nested or each.layout is not torch.strided
    ]
    if dense:
        return dense
    problems = stack_problems(of, given, shape[-1], shape[0] if len(shape) == 3 else None)
    if not problems:
        one = given if len(shape) == 2 else given.of_expert(0)
        found = scheme_of(of).outputs(of, tuple(one.data.shape), shape[-1])
        if found != shape[-2]:
            problems.append(f"shape: wanted {found} rows, which data {tuple(one.data.shape)} holds, got {shape[-2]}")
    elsewhere = [name for name, each in tensors.items() if each.device != given.data.device]
    return problems + [
        f"{name}: wanted {given.data.device} like data, got {tensors[name].device}" for name in elsewhere
    ]


def stack_problems(of: WeightFormat, given: Fields, inputs: int, experts: int | None) -> list[str]:
    """What is wrong with the shapes and dtypes of a weight's tensors, or of a stack of so many, by the names of fields.

    No value is read.
    """
    if experts is None:
        return scheme_of(of).field_problems(of, given, inputs)
    there = {name: each for name, each in given._asdict().items() if each is not None}
    problems = [
        f"{name}: wanted the {experts} experts in front, got {tuple(each.shape)}"
        for name, each in there.items()
        if each.ndim == 0 or each.shape[0] != experts
    ]
    if experts == 0:
        problems.append("shape: wanted at least one expert, got none")
    return problems or [
        f"{each} for each expert" for each in scheme_of(of).field_problems(of, given.of_expert(0), inputs)
    ]
