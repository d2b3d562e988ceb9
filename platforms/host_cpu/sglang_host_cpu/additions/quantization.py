"""Quantized linear layers: weights keep the layout that SGLang gives them, products are computed after dequantizing.

That is slow and exact, and it is what makes these layouts testable without a GPU. Activations are not quantized, so
outputs are those of the weights, not those of the GPU kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.plugins.hook_registry import HookType

from sglang_host_cpu.additions.base import Addition

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantize_fp8(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    use_per_token_if_dynamic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with the given scale, or with the largest that fits: per row if asked for, else one for all."""
    values = input.float()
    if scale is None:
        largest = values.abs().amax(1, keepdim=True) if use_per_token_if_dynamic else values.abs().max().reshape(1)
        scale = largest.clamp(min=1e-12) / FP8_MAX
    quantized = (values / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    if num_token_padding and num_token_padding > len(quantized):
        padding = quantized.new_zeros((num_token_padding - len(quantized), quantized.shape[1]))
        quantized = torch.cat([quantized, padding])
    return quantized, scale


def fp8_linear(
    original: Callable[..., torch.Tensor], self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply by the weight at full precision.

    It is scaled per block of rows and columns, or per tensor; in the latter case it is stored transposed.
    """
    if self.block_quant:
        rows, columns = self.quant_config.weight_block_size
        scale = layer.weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        weight = layer.weight.float() * scale[: layer.weight.shape[0], : layer.weight.shape[1]]
    else:
        weight = layer.weight.float().t() * layer.weight_scale.float().reshape(-1, 1)
    return F.linear(x, weight.to(x.dtype), bias)


def int8_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by the weight at full precision; it is stored transposed, with a scale per output channel."""
    weight = layer.weight.t().to(x.dtype) * layer.weight_scale.to(x.dtype)
    return F.linear(x, weight, bias)


def scheme_is_supported(self: Any, min_capability: int, error: bool = True) -> bool:
    """Say yes: there is no compute capability here to compare, and asking CUDA for it raises."""
    return True


QUANTIZATION = "sglang.srt.layers.quantization"
COMPRESSED = f"{QUANTIZATION}.compressed_tensors"

ADDITIONS = (
    Addition("sglang.kernels.ops.quantization.fp8_kernel.scaled_fp8_quant", quantize_fp8),
    Addition(f"{QUANTIZATION}.fp8.Fp8LinearMethod.apply", fp8_linear, HookType.AROUND),
    Addition(f"{QUANTIZATION}.w8a8_int8.W8A8Int8LinearMethod.apply", int8_linear),
    Addition(f"{COMPRESSED}.compressed_tensors.CompressedTensorsConfig._check_scheme_supported", scheme_is_supported),
    Addition(
        f"{COMPRESSED}.schemes.compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8.apply_weights",
        int8_linear,
    ),
)
