"""Quantized forms of a checkpoint, as the usual tools write them: tensors in, tensors and `quantization_config` out."""

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
FP8_MAX = 448.0
BLOCK = 128


def _projections(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name.endswith(("_proj.weight", "_proj_with_mqa.weight"))]


def fp8_per_tensor(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Each projection as float8 with one float32 scale; activations are scaled when they come."""
    out = dict(tensors)
    for name in _projections(tensors):
        weight = tensors[name].float()
        scale = weight.abs().max() / FP8_MAX
        out[name] = (weight / scale).to(torch.float8_e4m3fn)
        out[f"{name}_scale"] = scale.reshape(())
    return out, {"quant_method": "fp8", "activation_scheme": "dynamic"}


def fp8_with_kv_scales(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The same with the scales of an FP8 cache; SGLang reads them as tensors and keeps them as plain numbers too."""
    out, config = fp8_per_tensor(tensors)
    for number, name in enumerate(n for n in _projections(tensors) if n.endswith(("k_proj.weight", "v_proj.weight"))):
        kind = "k_scale" if "k_proj" in name else "v_scale"
        out[name.replace("weight", kind)] = torch.tensor(0.01 + 0.003 * number)
    return out, config


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """A matrix as [block row, row, block column, column]; the last blocks are filled up with zeros."""
    rows, columns = weight.shape
    filled = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return filled.reshape(-1, BLOCK, filled.shape[1] // BLOCK, BLOCK)


def fp8_block(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Each projection as float8 with a scale per block of 128 x 128, the form of DeepSeek's checkpoints."""
    out = dict(tensors)
    for name in _projections(tensors):
        rows, columns = tensors[name].shape
        blocks = _blocks(tensors[name])
        scales = blocks.abs().amax((1, 3)) / FP8_MAX
        scaled = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
        out[name] = scaled[:rows, :columns].contiguous().to(torch.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scales
    return out, {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }


def int8_block(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The same blocks as int8."""
    out = dict(tensors)
    for name in _projections(tensors):
        blocks = _blocks(tensors[name])
        scales = blocks.abs().amax((1, 3)) / 127
        out[name] = (blocks / scales[:, None, :, None]).round().reshape(tensors[name].shape).to(torch.int8)
        out[f"{name}_scale_inv"] = scales
    return out, {"quant_method": "blockwise_int8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def _fp8_per_channel(tensors: Tensors) -> Tensors:
    out = dict(tensors)
    for name in _projections(tensors):
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
        out[name] = (weight / scale).to(torch.float8_e4m3fn)
        out[f"{name}_scale"] = scale
    return out


def w8a8_fp8(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Each projection as float8 with a scale per output channel."""
    return _fp8_per_channel(tensors), {"quant_method": "w8a8_fp8"}


def compressed_tensors_fp8(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The same numbers under compressed-tensors' description of them."""
    return _fp8_per_channel(tensors), _compressed_tensors("float", "float-quantized")


def modelopt_fp8(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Each projection as float8 with one scale, and one for its input, as ModelOpt calibrates it."""
    out, _ = fp8_per_tensor(tensors)
    out |= {f"{name.removesuffix('.weight')}.input_scale": torch.tensor(0.02) for name in _projections(tensors)}
    return out, {"quant_method": "modelopt", "quant_algo": "FP8"}


AWQ_GROUP = 128


def awq(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Each projection transposed, as unsigned int4 with scale and zero per 128 inputs; eight columns in an int32."""
    out = dict(tensors)
    for name in _projections(tensors):
        weight = out.pop(name).float().t()
        groups = weight.reshape(-1, AWQ_GROUP, weight.shape[1])
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = (high - low) / 15
        zero = (-low / scale).round().clamp(0, 15)
        base = name.removesuffix("weight")
        out[f"{base}qweight"] = _packed((groups / scale + zero).round().clamp(0, 15).reshape(weight.shape))
        out[f"{base}qzeros"] = _packed(zero[:, 0])
        out[f"{base}scales"] = scale[:, 0].half()
    return out, {"quant_method": "awq", "bits": 4, "group_size": AWQ_GROUP, "zero_point": True, "version": "gemm"}


def _packed(values: torch.Tensor) -> torch.Tensor:
    eights = values.to(torch.int64).reshape(len(values), -1, 8)
    words = sum(eights[:, :, column] << 4 * place for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    return words.to(torch.int32).contiguous()


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
    return _int8_per_channel(tensors), _compressed_tensors("int", "int-quantized")


def _compressed_tensors(kind: str, form: str) -> dict[str, Any]:
    eight_bits = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
