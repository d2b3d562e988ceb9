"""Build a model in its loaded layout without a checkpoint, and let go of one without a trace.

The order follows SGLang's own disk loader: make the modules, give the raw weights harmless values, run the model's
fix-up, then every quantization method's post-processing. What comes out has the layout that a disk load has; only the
values are missing.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rfork.errors import UnsupportedModel
from sglang_rfork.srt.compat import Release


def build_in_loaded_layout(release: Release, model_config: Any, load_config: Any, device_config: Any) -> nn.Module:
    """The model as a disk load would leave it, filled with zeros (scales with ones). Raises what SGLang raises."""
    from sglang.srt.model_loader import loader as stock
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    device = torch.device(device_config.device)
    quant_config = stock._get_quantization_config(model_config, load_config)
    with set_default_torch_dtype(model_config.dtype):
        with device:
            model = stock._initialize_model(model_config, load_config, quant_config)
        make_what_loading_makes(model)
        fill_raw_weights(model)
        release.post_load_weights(model)
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None and not _is_lora_wrapper(module):
                with stock.device_loading_context(module, device):
                    method.process_weights_after_loading(module)
    return model.eval()


def make_what_loading_makes(model: nn.Module) -> None:
    """The one tensor that SGLang's models make in `load_weights` and not before: EAGLE-3's map from the words that its
    head knows to those of the target. Where a checkpoint has none the two vocabularies are equal.
    """
    known = getattr(getattr(model, "config", None), "draft_vocab_size", None)
    if getattr(model, "hot_token_id", known) is None and known not in (None, model.config.vocab_size):
        model.hot_token_id = torch.zeros(known, dtype=torch.int64)


def tie_as_the_target_does(draft: nn.Module, target: nn.Module, algorithm: str) -> None:
    """Make embedding and head of a draft one memory where it is given those of a target that has them in one.

    SGLang gives them once the draft is loaded, so that on the seed they are one already.
    """
    if algorithm != "EAGLE" and not getattr(draft, "load_lm_head_from_target", False):
        return  # the others take an embedding at most
    try:
        (embedding, head), (theirs, their_head) = draft.get_embed_and_head(), target.get_embed_and_head()
    except AttributeError:  # a stage without an embedding, or a model that lends none
        return
    same = embedding.shape == head.shape and embedding.dtype == head.dtype
    if same and theirs.data_ptr() == their_head.data_ptr():
        head.data = embedding.data


def fill_raw_weights(model: nn.Module) -> None:
    """Zeros everywhere, ones where a name says scale: post-processing divides by scales and asserts on garbage.

    Raises UnsupportedModel, by name, for a weight that has no shape yet.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise UnsupportedModel(f"{name} gets its shape while SGLang reads the checkpoint, as GGUF's weights do")
            parameter.fill_(1 if "scale" in name.rpartition(".")[2] else 0)


def _is_lora_wrapper(module: nn.Module) -> bool:
    return any(base.__name__ == "BaseLayerWithLoRA" for base in type(module).__mro__)


@contextlib.contextmanager
def discarded_without_trace() -> Iterator[None]:
    """Undo what a model that is thrown away leaves in SGLang's process-wide caches.

    Only the rotary-embedding cache was found to keep anything alive. It is put back as it was on an exception; on
    success the new entries belong to the live model and stay.
    """
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT

    before = dict(_ROPE_DICT)
    try:
        yield
    except BaseException:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(before)
        raise


def release_discarded_memory(device: str) -> None:
    """Collect a model that nothing references any more and give its memory back before another is built (I9)."""
    for name in ("last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    gc.collect()
    if device != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()
