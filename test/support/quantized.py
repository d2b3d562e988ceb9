"""Quantized forms of a checkpoint, as the usual tools write them: tensors in, tensors and `quantization_config` out."""

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
FP8_MAX = 448.0
BLOCK = 128


def _projections(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name.endswith("_proj.weight")]


def fp8_per_tensor(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Each projection as float8 with one float32 scale; activations are scaled when they come."""
    out = dict(tensors)
    for name in _projections(tensors):
        weight = tensors[name].float()
        scale = weight.abs().max() / FP8_MAX
        out[name] = (weight / scale).to(torch.float8_e4m3fn)
        out[f"{name}_scale"] = scale.reshape(())
    return out, {"quant_method": "fp8", "activation_scheme": "dynamic"}


def fp8_block(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Each projection as float8 with a scale per block of 128 x 128, the form of DeepSeek's checkpoints."""
    out = dict(tensors)
    for name in _projections(tensors):
        weight = tensors[name].float()
        rows, columns = weight.shape
        blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / FP8_MAX
        out[name] = (blocks / scales[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scales
    return out, {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }


def _int8_per_channel(tensors: Tensors) -> Tensors:
    out = dict(tensors)
    for name in _projections(tensors):
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        out[name] = (weight / scale).round().to(torch.int8)
        out[f"{name}_scale"] = scale
    return out


def w8a8_int8(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Each projection as int8 with a scale per output channel."""
    return _int8_per_channel(tensors), {"quant_method": "w8a8_int8"}


def compressed_tensors_int8(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The same numbers under compressed-tensors' description of them."""
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    return _int8_per_channel(tensors), {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
