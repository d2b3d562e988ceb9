"""Every private name of SGLang that the plugin touches, as one table per supported release.

A row says which releases have the name and what the plugin relies on in it. Nothing of SGLang is imported
before a row is resolved. The strict start-up check and `rfork doctor` both use `Release.problems`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Any

from rfork.errors import ConfigError

FIRST, LAST = 16, 23  # patch releases of 0.5, both inclusive
_SUPPORTED = f"this R-Fork supports sglang>=0.5.{FIRST},<0.5.{LAST + 1}"


class UnsupportedSGLang(ConfigError):
    """No table fits the installed SGLang. Consequence: where R-Fork was asked for, the process refuses to start."""

    reason = "sglang_version"


class Role(StrEnum):
    """The processes of a server in which the plugin has something to do."""

    MAIN = "main"
    HTTP_WORKER = "http_worker"
    SCHEDULER = "scheduler"


class Kind(Enum):
    CALL = "a function"
    VALUE = "a value"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One name of SGLang, `module:attribute` below sglang.srt, and the parameters that the plugin relies on, in order.

    More parameters are fine, as hooks hand on what they don't know. `first` and `last` are patch releases, inclusive.
    """

    purpose: str
    path: str
    roles: tuple[Role, ...]
    parameters: tuple[str, ...] = ()
    kind: Kind = Kind.CALL
    first: int = FIRST
    last: int = LAST

    @property
    def dotted(self) -> str:
        """The path as SGLang's HookRegistry takes it."""
        return "sglang.srt." + self.path.replace(":", ".")

    def resolve(self) -> Any:
        """The object itself. Raises ImportError or AttributeError where it is not there."""
        module, _, attribute = self.path.partition(":")
        found = importlib.import_module("sglang.srt." + module)
        return functools.reduce(getattr, attribute.split("."), found)

    def problem(self) -> str | None:
        """Why this row does not hold for the SGLang that is installed, or None."""
        try:
            found = self.resolve()
        except Exception as error:
            return f"{self.dotted} ({self.purpose}) is not there: {type(error).__name__}: {error}"
        if self.kind is Kind.VALUE:
            return None
        if not callable(found):
            return f"{self.dotted} ({self.purpose}) should be {self.kind.value}, but is {type(found).__name__}"
        names = tuple(inspect.signature(found).parameters)
        if tuple(name for name in names if name in self.parameters) != self.parameters:
            expected, got = ", ".join(self.parameters), ", ".join(names)
            return f"{self.dotted} ({self.purpose}) should take ({expected}), but takes ({got})"
        return None


_M, _H, _S, _V = (Role.MAIN,), (Role.MAIN, Role.HTTP_WORKER), (Role.SCHEDULER,), Kind.VALUE
_LOAD = "model_executor.model_runner_components.load_model_utils"
_UPDATER = "model_executor.model_runner_components.weight_updater:WeightUpdater"
_MANAGER = "managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_TRANSPORTER = "model_executor.model_runner_components.remote_instance_weight_transporter"
_HTTP_SERVER, _LOADER, _SPEC = "entrypoints.http_server", "model_loader.loader", "speculative.base_spec_worker"

# fmt: off
_TARGETS = (
    # Command line and argument resolution. The load-format step was a method, then a function, then got a hook.
    Target("arguments.add", "server_args:ServerArgs.add_cli_args", _M, ("parser",)),
    Target("arguments.parse", "server_args:ServerArgs.from_cli_args", _M, ("args",)),
    Target("arguments.load_format.step", "server_args:ServerArgs._handle_load_format", _M, ("self",), last=18),
    Target("arguments.load_format.step", "arg_groups.model_path_hook:handle_load_format", _M, ("server_args",),
           first=19, last=19),
    Target("arguments.load_format.hook", "arg_groups.resolution_hooks:register_resolution_hook", _M, ("name",),
           first=20),
    Target("arguments.declare", "arg_groups.overrides:declare_resolution", _M, ("server_args", "source"), first=19),
    Target("arguments.view", "arg_groups.model_override_base:resolving_view", (*_H, *_S), ("server_args",), first=19),
    Target("arguments.load_formats", "configs.load_config:LoadFormat", _M, kind=_V),
    Target("arguments.current", "runtime_context:get_server_args", _S),
    # The engine and the HTTP server.
    Target("engine.logging", "utils.common:configure_logger", _M, ("server_args",)),
    Target("engine.launch", "entrypoints.engine:Engine._launch_subprocesses", _M, ("server_args", "port_args")),
    Target("engine.shutdown", "entrypoints.engine:Engine.shutdown", _M, ("self",)),
    Target("http.app", f"{_HTTP_SERVER}:app", _H, kind=_V),
    Target("http.state", f"{_HTTP_SERVER}:get_global_state", _H),
    Target("http.run", f"{_HTTP_SERVER}:_setup_and_run_http_server", _M, ("server_args", "scheduler_infos")),
    Target("http.ready", f"{_HTTP_SERVER}:_wait_and_warmup", _H, ("server_args",)),
    Target("http.status", "managers.tokenizer_manager:ServerStatus.Up", _H, kind=_V),
    Target("http.label", "managers.tokenizer_manager:TokenizerManager._update_weight_version_if_provided", _H,
           ("self", "weight_version")),
    Target("http.auth", "utils.auth:auth_level", _H, ("level",)),
    Target("http.auth.level", "utils.auth:AuthLevel.ADMIN_OPTIONAL", _H, kind=_V),
    Target("http.sigterm", "managers.tokenizer_manager:SignalHandler.sigterm_handler", _M, ("self", "signum", "frame")),
    Target("http.sigterm.watch", "managers.tokenizer_manager:TokenizerManager.sigterm_watchdog", _M, ("self",)),
    Target("http.worker_app", "environ:envs.SGLANG_HTTP_SERVER_APP_PATH", _M, kind=_V, first=23),
    # One model: its loader, the helpers that build its layout, the cache that a discarded one leaves something in.
    Target("load.choose", f"{_LOAD}:get_model_loader", _S, ("load_config", "model_config")),
    Target("load.run", f"{_LOAD}:load_model_with_memory_saver", _S,
           ("model_config", "load_config", "device", "gpu_id", "is_draft_worker")),
    Target("load.quantization", f"{_LOADER}:_get_quantization_config", _S, ("model_config", "load_config")),
    Target("load.initialize", f"{_LOADER}:_initialize_model", _S, ("model_config", "load_config", "quant_config")),
    Target("load.dtype", "model_loader.utils:set_default_torch_dtype", _S, ("dtype",)),
    Target("load.staging", f"{_LOADER}:device_loading_context", _S, ("module", "target_device")),
    Target("load.finish", f"{_LOADER}:_post_load_weights", _S, ("model",), last=20),
    Target("load.finish", f"{_LOADER}:post_load_weights", _S, ("model",), first=21),
    Target("load.rope_cache", "layers.rotary_embedding.factory:_ROPE_DICT", _S, kind=_V),
    # Stock R-Fork in the rank. The rest of it sleeps once the arguments ask for neither a fork nor a seed.
    Target("stock.engine", f"{_TRANSPORTER}:RemoteInstanceWeightTransporter.init_engine", _S, ("self",)),
    # Publication, and which models a scheduler holds.
    Target("rank.process", "managers.scheduler:run_scheduler_process", _S, ("server_args", "pipe_writer")),
    Target("rank.ready", "managers.scheduler:Scheduler.init_model_worker", _S, ("self",)),
    Target("rank.info", "managers.scheduler:Scheduler.get_init_info", _S, ("self",)),
    Target("rank.state", "managers.scheduler:Scheduler.get_internal_state", _S, ("self", "recv_req")),
    Target("rank.loop", "managers.scheduler:Scheduler.run_event_loop", _S, ("self",)),
    Target("rank.parallel", "runtime_context:get_parallel", _S),
    Target("rank.device", "runtime_context:get_device", _S, first=21),
    Target("rank.drafts", f"{_SPEC}:EagleDraftWorkerBase.draft_runners", _S, kind=_V, last=20),
    Target("rank.targets", "managers.tp_worker:TpModelWorker.weight_update_runners", _S, ("self",), first=21),
    Target("rank.drafts", f"{_SPEC}:BaseSpecWorker.weight_update_runners", _S, ("self",), first=21),
    # A request to change weights, for all models of a scheduler together. Before 0.5.21 an update may be many calls
    # without a beginning and an end: it is over when generation continues.
    Target("update.disk", f"{_MANAGER}.update_weights_from_disk", _S, ("self", "recv_req")),
    Target("update.tensor", f"{_MANAGER}.update_weights_from_tensor", _S, ("self", "recv_req")),
    Target("update.distributed", f"{_MANAGER}.update_weights_from_distributed", _S, ("self", "recv_req")),
    Target("update.ipc", f"{_MANAGER}.update_weights_from_ipc", _S, ("self", "recv_req")),
    Target("update.begin", f"{_MANAGER}.begin_weight_update", _S, ("self", "recv_req"), first=21),
    Target("update.end", f"{_MANAGER}.end_weight_update", _S, ("self", "recv_req"), first=21),
    Target("update.release", f"{_MANAGER}.release_memory_occupation", _S, ("self", "recv_req")),
    Target("update.resume", f"{_MANAGER}.resume_memory_occupation", _S, ("self", "recv_req")),
    Target("update.continue", "managers.scheduler:Scheduler.continue_generation", _S, ("self", "recv_req"), last=20),
    Target("update.version", "runtime_context:get_serving", _S, first=23),
    Target("update.label", "runtime_context:get_context", _S, first=23),
    # Whatever changes or moves weights, whoever asks for it; each is wrapped by the fence.
    Target("fence.disk", f"{_UPDATER}.update_weights_from_disk", _S, ("self", "model_path", "load_format")),
    Target("fence.tensor", f"{_UPDATER}.update_weights_from_tensor", _S, ("self", "named_tensors", "load_format")),
    Target("fence.ipc", f"{_UPDATER}.update_weights_from_ipc", _S, ("self", "recv_req")),
    Target("fence.distributed", f"{_UPDATER}.update_weights_from_distributed", _S, ("self", "names"), last=20),
    Target("fence.distributed", f"{_UPDATER}.load_weights_from_distributed", _S, ("self", "named_tensors"), first=21),
    Target("fence.begin", f"{_UPDATER}.begin_weight_update", _S, ("self",), first=21),
    Target("fence.end", f"{_UPDATER}.end_weight_update", _S, ("self", "run_post_load"), first=21),
    Target("fence.reset", "utils.weight_checker:WeightChecker._reset_tensors", _S, ("self",)),
    Target("fence.experts", "eplb.expert_location_updater:ExpertLocationUpdater.update", _S, ("self",)),
    Target("fence.backup", "elastic_ep.expert_backup_client:ExpertBackupClient.update_weights", _S, ("self",)),
)

STOCK_ROUTES = (
    "/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info",
    "/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance",
)
"""Paths that SGLang's own R-Fork serves, in every supported release."""
# fmt: on

PARALLEL_DIMENSIONS = ("tp", "pp", "moe_ep", "moe_tp", "moe_dp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp")
"""get_parallel() has `<name>_rank` and `<name>_size` once models load; plain `dcp` may have no group and raise."""

LAYOUT_FIELDS = tuple(
    """
    dtype quantization model_impl json_model_override_args is_embedding enable_multimodal language_only
    language_model_only encoder_only device kv_cache_dtype mamba_ssm_dtype enable_fp32_lm_head modelopt_quant
    quantize_and_serve rl_quant_profile torchao_config enable_dp_attention enable_dp_lm_head moe_dense_tp_size dwdp_size
    shared_experts_tp_size enable_shared_experts_attn_tp enable_dense_mlp_attn_tp enable_tp_lm_head_all_to_all
    enable_cp_tp_group_sharing enable_cp_decode_attn_tp dcp_replicate_q_proj enable_layernorm_sp
    enable_megamoe_for_layernorm_sp enable_scattered_sconv mm_enable_dp_encoder moe_runner_backend moe_a2a_backend
    deepep_mode deepep_v2_mode deepep_dispatcher_output_dtype fuseep_mode flashinfer_mxfp4_moe_precision
    flashinfer_a2a_dispatch_type enable_w4a4_mxfp4_megamoe disable_shared_experts_fusion enforce_shared_experts_fusion
    disable_flashinfer_cutlass_moe_fp4_allgather enable_waterfill ep_num_redundant_experts ep_dispatch_algorithm
    init_expert_location enable_eplb elastic_ep_backend elastic_ep_initial_size ep_join_mode enable_paged_experts
    paged_experts_num_resident kt_method kt_num_gpu_experts fp8_gemm_runner_backend fp4_gemm_runner_backend
    bf16_gemm_backend attention_backend prefill_attention_backend decode_attention_backend mm_attention_backend
    dsa_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsv4_attn_backend dsv4_prefill_backend
    mamba_backend linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend qsa_indexer_dtype
    enable_dsa_fused_indexer enable_deepseek_v4_fp4_indexer enable_fused_qk_norm_rope enable_deterministic_inference
    rl_on_policy_target cpu_offload_gb offload_mode offload_group_size offload_num_in_group offload_prefetch_step
    ple_offload_embedding ple_offload_backend enable_lora enable_amd_monokernel enable_nvidia_megakernel
    speculative_algorithm speculative_num_steps enable_multi_layer_eagle speculative_draft_model_quantization
    speculative_moe_runner_backend speculative_moe_a2a_backend speculative_draft_attention_backend
    speculative_enable_w4a4_mxfp4_megamoe
    """.split()  # noqa: SIM905
)
"""Resolved server arguments that decide a model's layout or meaning, without sizes, paths and addresses; no release has
all of them. `init_expert_location` may name a file: its content counts, not its path."""

_LAYOUT_VARIABLE = re.compile(
    r"(SGLANG|SGL|AITER|CK|FLASHINFER|TRTLLM|USE_TRITON)_.*(A4W4|A8W4|ACL_FORMAT|AITER|BF16_DISPATCH|CPU_ENGINE"
    r"|CUTLASS|DEEPGEMM|DOWNCASTING|EMBED|EXPERT|EXTERNAL_MODEL|FP4|FP8|FUSE|GEMM(?!A)|HUMMING|IGNORED_LAYERS|INT4"
    r"|INTERLEAVE|ITLV|LAYOUT|LINEARQUANT|LM_HEAD|MARKOV|MARLIN|MODEL_ARCHS|MOE|MXSCALE|PACK|PADDING|QUANT|SHUFFLE"
    r"|W4A|WATERFILL|WO_A|WQA)"
)
_NOT_LAYOUT = re.compile(
    r"CACHE_DIR|_LOG|_PATH|_DIR|_HOST|_PORT|_ADDR|_MAX_|DEBUG|PRECOMPILE|SIMULATE|TRACE|TUNE|WARMUP"
)


def layout_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that choose kernels or layouts, as set; by word, as over 150 are read where layers are made.

    One that is missed means wrong weights, one too many means a load from disk.
    """
    return {k: v for k, v in sorted(environ.items()) if _LAYOUT_VARIABLE.match(k) and not _NOT_LAYOUT.search(k)}


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where a scheduler process stands. A replica is one of plain data parallelism, with a WORLD of its own."""

    replica: int
    num_replicas: int
    device_index: int


@dataclasses.dataclass(frozen=True)
class Release:
    """The table of one SGLang release, and the few calls whose shape differs between releases."""

    version: str
    targets: tuple[Target, ...]

    def find(self, purpose: str) -> Target | None:
        """The row for `purpose`, or None where this release has nothing of the kind."""
        return next((t for t in self.targets if t.purpose == purpose), None)

    def get(self, purpose: str) -> Any:
        """SGLang's object for `purpose`. Raises KeyError where this release has none."""
        target = self.find(purpose)
        if target is None:
            raise KeyError(f"SGLang {self.version} has nothing for {purpose!r}")
        return target.resolve()

    def for_role(self, role: str) -> tuple[Target, ...]:
        """What the plugin touches in a process of `role`; nothing for a role that it does not know."""
        return tuple(t for t in self.targets if role in t.roles)

    def problems(self, role: str) -> list[str]:
        """One line for each row of `role` that does not hold. Imports what it checks."""
        return [p for p in (t.problem() for t in self.for_role(role)) if p is not None]

    def arguments(self, server_args: Any) -> Any:
        """`server_args` as resolved so far; from 0.5.19 on its own attributes are only what the user typed."""
        return self.get("arguments.view")(server_args) if self.find("arguments.view") else server_args

    def post_load_weights(self, model: Any) -> None:
        """Run the model's own fix-up, which `load_weights` would have run."""
        self.get("load.finish")(model)

    def label_weights(self, version: str) -> None:
        """Make `version` the scheduler's own label of its weights, where this release keeps one there."""
        if self.find("update.label"):
            self.get("update.label")().override("rfork.weight_version", weight_version=version)

    def runners(self, scheduler: Any) -> list[tuple[str, Any]]:
        """(`target` or `draft-N`, ModelRunner) of each model of `scheduler`, drafts in the order in which they load."""
        target, draft = scheduler.tp_worker, scheduler.draft_worker
        if self.find("rank.targets"):
            drafts = [] if draft is None else [runner for _, runner in draft.weight_update_runners()]
        else:
            inner = None if draft is None else draft.draft_worker
            # A plain TpModelWorker (DFlash, DSpark) has one model and no list of them; n-gram speculation has none.
            drafts = [] if inner is None else getattr(inner, "draft_runners", None) or [inner.model_runner]
        return [("target", target.model_runner), *((f"draft-{i}", r) for i, r in enumerate(drafts))]

    def placement(self, scheduler: Any) -> Placement:
        """Placement of this process, known before `init_model_worker`. Attention-DP shares a WORLD: one replica."""
        parallel = self.get("rank.parallel")() if self.find("rank.device") else scheduler.ps
        device = self.get("rank.device")().gpu_id if self.find("rank.device") else scheduler.ps.gpu_id
        if parallel.attn_dp_size > 1:
            return Placement(0, 1, device)
        return Placement(parallel.dp_rank or 0, parallel.dp_size, device)


def table_for(version: str) -> Release:
    """The table for an SGLang version such as `0.5.23` or `0.5.16.post2`. Raises UnsupportedSGLang."""
    match = re.match(r"0\.5\.(\d+)", version)
    patch = int(match[1]) if match else -1
    if not FIRST <= patch <= LAST:
        raise UnsupportedSGLang(f"SGLang {version} is installed; {_SUPPORTED}")
    return Release(version, tuple(t for t in _TARGETS if t.first <= patch <= t.last))


@functools.cache
def installed_release() -> Release:
    """The table of the SGLang in this environment. Raises UnsupportedSGLang, also where there is none."""
    try:
        return table_for(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError as error:
        raise UnsupportedSGLang(f"SGLang is not installed; {_SUPPORTED}") from error
