"""Codecs as values: how a tensor becomes bytes and scales, and how large the error is."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._arguments import check_choice, did_you_mean
from fzero._torch import allow_in_graph
from fzero._tracebacks import api_boundary, api_boundary_of_class
from fzero.codecs._quantize import (
    KINDS,
    CodeKind,
    block_scales,
    codes_to_float32,
    largest_magnitudes,
    pack,
    quantize,
    unpack,
)

__all__ = [
    "CODECS",
    "Codec",
    "CodecKey",
    "EncodedTensor",
    "decode_blocks",
    "encode_blocks",
    "float8",
    "int4",
    "int8",
    "round_trip",
    "round_with",
    "scale_blocks",
]

CodecKey = tuple[str, int, str]


class EncodedTensor(NamedTuple):
    """An encoded tensor.

    Attributes:
        payload: its codes, uint8 `[bytes]`.
        magnitudes: the largest magnitude of each block, float32 `[blocks]`.
    """

    payload: torch.Tensor
    magnitudes: torch.Tensor


@api_boundary_of_class
@dataclass(frozen=True)
class Codec:
    """A codec: consecutive elements of a leaf are blocks, each with a scale, and each element is a code.

    The functions of this module make one, such as `int8`.

    Attributes:
        kind: the kind of its codes, such as "int8" or "float8_e4m3". The error of another lists all.
        block: the number of elements of a block. The last block of a leaf may be shorter.
        rounding: "nearest", or "stochastic": up or down at random, so that the mean is right.
    """

    kind: str
    block: int = 256
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}{did_you_mean(self.kind, KINDS)}")
        if type(self.block) is not int or self.block < 2:
            raise ValueError(f"block={self.block!r}: expected a number of elements, at least 2")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r}: expected 'nearest' or 'stochastic'")
        if self.rounding == "stochastic" and self.code_kind.is_float:
            raise ValueError(
                f"rounding='stochastic' with {self.kind}: its codes have no equal distances; use int8 or int4"
            )

    @property
    def code_kind(self) -> CodeKind:
        """The kind of its codes."""
        return KINDS[self.kind]

    @property
    def is_stochastic(self) -> bool:
        """Whether it rounds at random."""
        return self.rounding == "stochastic"

    @property
    def key(self) -> CodecKey:
        """Its settings as plain values: `Codec(*key)` is the codec."""
        return self.kind, self.block, self.rounding

    def num_blocks(self, numel: int) -> int:
        """Return the number of blocks of a leaf of `numel` elements."""
        return -(-numel // self.block)

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of an encoded leaf of `numel` elements, with 4 bytes for each block's scale.

        Example:
            >>> int8().num_bytes(1024), int4().num_bytes(1024)
            (1040, 528)
        """
        return -(-numel * self.code_kind.bits // 8) + 4 * self.num_blocks(numel)

    @api_boundary
    def encode(self, x: torch.Tensor) -> EncodedTensor:
        """Encode a tensor of any shape and floating-point dtype, in row-major order.

        Raises:
            TypeError: if `x` is not a floating-point tensor.

        Example:
            >>> x = torch.tensor([1.0, -0.75, 0.25])
            >>> encoded = int4().encode(x)
            >>> encoded.payload.tolist(), encoded.magnitudes.tolist()
            ([183, 2], [1.0])
        """
        _check_floating_point("encode", x)
        blocks = self.to_blocks(x.reshape(-1))
        magnitudes = largest_magnitudes(blocks)
        codes = encode_blocks(self, blocks, magnitudes)
        return EncodedTensor(pack(self.code_kind, codes.flatten(-2)[..., : x.numel()].contiguous()), magnitudes)

    @api_boundary
    def decode(
        self, encoded: EncodedTensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Decode a tensor of this shape. A block with an element that was not finite is nan.

        Raises:
            TypeError: if `encoded` is not a pair of tensors, as `encode` returns it, or `shape` is no tuple.
            ValueError: if a tensor of this shape has other bytes or blocks by this codec.

        Example:
            >>> codec, x = int4(), torch.tensor([1.0, -0.75, 0.25])
            >>> codec.decode(codec.encode(x), x.shape)
            tensor([ 1.0000, -0.7143,  0.2857])
        """
        if not isinstance(shape, tuple | list):
            raise TypeError(f"decode: shape={shape!r}: expected the sizes of a tensor, such as x.shape, or (3,)")
        numel = torch.Size(shape).numel()
        self._check_encoded(encoded, tuple(shape), numel)
        blocks = self.to_blocks(unpack(self.code_kind, encoded.payload, numel))
        values = decode_blocks(self, blocks, encoded.magnitudes)
        return values.flatten(-2)[..., :numel].view(shape).to(dtype)

    def _check_encoded(self, encoded: EncodedTensor, shape: tuple[int, ...], numel: int) -> None:
        """Check that this codec made codes and magnitudes of so many elements, as far as their sizes tell."""
        if not isinstance(encoded, tuple) or [isinstance(x, torch.Tensor) for x in encoded] != [True, True]:
            raise TypeError(f"decode: encoded={tree.show(encoded)}: expected what encode returned, an EncodedTensor")
        sizes = (-(-numel * self.code_kind.bits // 8), torch.uint8), (self.num_blocks(numel), torch.float32)
        for name, x, (size, dtype) in zip(EncodedTensor._fields, encoded, sizes, strict=True):
            if x.shape != (size,) or x.dtype != dtype:
                expected = torch.empty(size, dtype=dtype, device="meta")
                raise ValueError(
                    f"decode: the {name} is {tree.show(x)}: expected {tree.show(expected)} for the shape {list(shape)} "
                    f"by {self}; give the shape of the tensor that was encoded, and its codec"
                )

    @api_boundary
    def error_bound(self, x: torch.Tensor) -> torch.Tensor:
        """Return the largest possible error of each element of a tensor, float32 of its shape, before a cast.

        It is half a step of the block's codes, a whole one with stochastic rounding. A float8 code's step is relative
        to the element: 2^-4 of it for e4m3 and 2^-3 for e5m2, or half the smallest step.

        Raises:
            TypeError: if `x` is not a floating-point tensor.
        """
        _check_floating_point("error_bound", x)
        kind, flat = self.code_kind, x.reshape(-1)
        scales = block_scales(kind, largest_magnitudes(self.to_blocks(flat)))
        of_element = scales.repeat_interleave(self.block)[: x.numel()].view(x.shape)
        if not kind.is_float:
            # float32 rounds the quotient and the product, each by 2^-24 of a code: of half a step that is twice as much
            rounding = 1 + (kind.largest + 1) * 2**-22
            return of_element * (1.0 if self.is_stochastic else 0.5) * rounding
        info = torch.finfo(kind.dtype)
        relative = x.to(torch.float32).abs() * (info.eps / 2)
        return torch.maximum(relative, of_element * info.smallest_normal * info.eps / 2) * (1 + 2**-20)

    def to_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[.., numel]` as blocks `[.., n, block]`: a view, or a copy with zeros after the last element."""
        missing_numel = -x.shape[-1] % self.block
        if missing_numel:
            # a copy of bytes: not every dtype can be padded
            padding = torch.zeros((*x.shape[:-1], missing_numel), dtype=x.dtype, device=x.device)
            x = torch.cat([x, padding], -1)
        return x.unflatten(-1, (-1, self.block)) if x.shape[-1] else x.view(*x.shape[:-1], 0, self.block)

    @api_boundary
    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Return the decoded code of a tensor. Its derivative is that of the identity.

        Raises:
            TypeError: if `x` is not a floating-point tensor.

        Example:
            >>> x = torch.tensor([1.0, -0.75, 0.25])
            >>> torch.func.grad(lambda x: (int4().round(x) ** 2).sum())(x)
            tensor([ 2.0000, -1.4286,  0.5714])
        """
        _check_floating_point("round", x)
        return round_with(self.key, x, 0)


def _check_floating_point(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"{name}: x={tree.show(x)}: expected a tensor of floating-point numbers; x.float() makes one")


def encode_blocks(codec: Codec, blocks: torch.Tensor, magnitudes: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the codes of a leaf's blocks `[.., n, b]`, from the blocks' largest magnitudes.

    Args:
        codec: the codec.
        blocks: the numbers.
        magnitudes: the largest magnitudes `[.., n]`.
        first: the number of the first block, from which a random rounding follows.
    """
    return quantize(
        codec.code_kind, blocks, block_scales(codec.code_kind, magnitudes), first if codec.is_stochastic else None
    )


def decode_blocks(codec: Codec, codes: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers of codes `[.., n, b]`, from the largest magnitudes `[.., n]`.

    A block that was not finite is nan.
    """
    return scale_blocks(codec, codes_to_float32(codec.code_kind, codes), magnitudes)


def scale_blocks(codec: Codec, numbers: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Multiply numbers without scales `[.., n, b]`, such as sums of codes, by the scales of their blocks."""
    return numbers * block_scales(codec.code_kind, magnitudes).unsqueeze(-1)


def round_trip(codec: Codec, x: torch.Tensor, leading: int = 0) -> torch.Tensor:
    """Encode and decode a tensor; its first `leading` dimensions count several tensors."""
    if not x.numel():
        return x.clone()
    flat = x.reshape((*x.shape[:leading], x.shape[leading:].numel()))
    blocks = codec.to_blocks(flat)
    magnitudes = largest_magnitudes(blocks)
    values = decode_blocks(codec, encode_blocks(codec, blocks, magnitudes), magnitudes)
    return values.flatten(-2)[..., : flat.shape[-1]].reshape(x.shape).to(x.dtype)


class _Round(torch.autograd.Function):
    """Rounds by a codec, with the derivative of the identity."""

    @staticmethod
    def forward(key: CodecKey, leading: int, x: torch.Tensor) -> torch.Tensor:
        return round_trip(Codec(*key), x, leading)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[2].view_as(tangents[2])

    @staticmethod
    def vmap(info: Any, in_dims: Any, key: CodecKey, leading: int, x: torch.Tensor) -> Any:
        return _Round.apply(key, leading + 1, x.movedim(in_dims[2], 0)), 0


@allow_in_graph
def round_with(key: CodecKey, x: torch.Tensor, leading: int) -> Any:
    """Round a tensor by the codec of this key; its first `leading` dimensions count several tensors."""
    return _Round.apply(key, leading, x)


@api_boundary
def int8(block: int = 256, rounding: str = "nearest") -> Codec:
    """Make a codec of 8-bit integers, from -127 to 127, with one scale for each block.

    Args:
        block: the number of elements of a block.
        rounding: "nearest" or "stochastic".

    Returns:
        The codec: 1 byte an element, and 4 bytes a block.

    Raises:
        ValueError: if `block` or `rounding` is none of these.

    Example:
        >>> import torch
        >>> int8().round(torch.tensor([1.0, 0.3]))
        tensor([1.0000, 0.2992])
    """
    return Codec("int8", block, rounding)


@api_boundary
def int4(block: int = 256, rounding: str = "nearest") -> Codec:
    """Make a codec of 4-bit integers, from -7 to 7, with one scale for each block.

    Args:
        block: the number of elements of a block.
        rounding: "nearest" or "stochastic".

    Returns:
        The codec: half a byte an element, and 4 bytes a block.

    Raises:
        ValueError: if `block` or `rounding` is none of these.

    Example:
        >>> import torch
        >>> int4().round(torch.tensor([7.0, 3.4, -1.0])).tolist()
        [7.0, 3.0, -1.0]
    """
    return Codec("int4", block, rounding)


@api_boundary
def float8(kind: str = "e4m3", block: int = 256) -> Codec:
    """Make a codec of 8-bit floating-point numbers, with one scale for each block.

    Args:
        kind: "e4m3", with 3 bits of precision, or "e5m2", with 2 bits and a wider range.
        block: the number of elements of a block.

    Returns:
        The codec: 1 byte an element, and 4 bytes a block.

    Raises:
        ValueError: if `kind` is neither, or `block` is not a number of elements.

    Example:
        >>> import torch
        >>> float8().round(torch.tensor([448.0, 3.1])).tolist()
        [448.0, 3.0]
    """
    check_choice("kind", kind, ("e4m3", "e5m2"))
    return Codec(f"float8_{kind}", block)


# by the names that `fzero.tune` and `fzero plan` take
CODECS = {make.__name__: make for make in (int8, int4, float8)}
