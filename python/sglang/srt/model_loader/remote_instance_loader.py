"""The loader behind `--load-format remote_instance`: fork from a running instance, or fall back and say why."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from rfork.binding import Binding
from rfork.client.agreement import Agreement, AgreementLost, Vote
from rfork.client.fork import Fork, ForkOutcome
from rfork.client.lend import Lender
from rfork.errors import NoSeedAvailable, NotQuiet, RForkError
from rfork.fence import check_fence
from rfork.identity import Content, ModelIdentity, RankIdentity
from rfork.inventory import Inventory
from rfork.inventory.target import DevicePage, PullTarget
from rfork.transports.select import MooncakeFabrics
from rfork.wire.seed import DigestTable, WeightsReport
from sglang_rfork.srt.managers.rank import RankState
from sglang_rfork.srt.model_loader.content import disk_format, expected_content
from sglang_rfork.srt.model_loader.inventory_rules import SGLangRules
from sglang_rfork.srt.model_loader.remote_instance_weight_loader_utils import (
    build_in_loaded_layout,
    discarded_without_trace,
    release_discarded_memory,
    tie_as_the_target_does,
)
from sglang_rfork.srt.model_loader.seeds import seeds_for

log = logging.getLogger("rfork")


class Failure(NamedTuple):
    """Why there was no fork. `elected`: this instance is the one of its fleet that reads the disk."""

    reason: str
    detail: str
    elected: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        detail = str(error) if isinstance(error, RForkError) else repr(error)
        return cls(getattr(error, "reason", "error"), detail, getattr(error, "elected", False))


class RemoteInstanceModelLoader:
    """One load of one model. `report` and what a fork brought with the weights are set once `load_model` has
    returned.
    """

    preloaded_weights_bytes = 0

    def __init__(self, state: RankState, who: RankIdentity, identity: ModelIdentity, load_config: Any) -> None:
        self._state, self._who, self._identity = state, who, identity
        self.load_config = load_config
        self.fallback: Callable[[], Any] | None = None
        self.report = WeightsReport(source="checkpoint")
        self.content: Content | None = None
        self.origin_digests: DigestTable | None = None
        self.there: Binding | None = None

    def download_model(self, model_config: Any) -> None:
        """Nothing to fetch ahead: the fallback loader fetches what it needs when it is needed."""

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Fork, else fall back as `fallback` says; exits on NotQuiet.

        Raises RuntimeError where it says `never`, or says nothing to a client of live weights.
        """
        started_s = time.monotonic()
        dtype = torch.get_default_dtype()
        try:
            with discarded_without_trace():
                return self._fork(model_config, device_config)
        except (NotQuiet, AgreementLost) as error:
            # Memory that something may still write into, or ranks that may hold other weights: no way on from here.
            raise SystemExit(f"rfork: {self._who.key}: {error}") from None
        except Exception as error:
            # Kept as text: the exception's frames would keep the half-built model alive.
            failure = Failure.of(error)
            if not isinstance(error, RForkError):
                log.exception("rfork: %s: unexpected error, please report it", self._who.key)
        finally:
            torch.set_default_dtype(dtype)
        release_discarded_memory(self._state.device.type)
        return self._fall_back(model_config, device_config, failure, time.monotonic() - started_s)

    def _fork(self, model_config: Any, device_config: Any) -> nn.Module:
        state = self._state
        agreement = state.agreement(self._who)
        wanted = self._wanted(agreement, model_config)
        built: list[tuple[nn.Module, Inventory]] = []
        page = functools.cache(lambda: DevicePage(state.device))

        def build() -> PullTarget:
            model = build_in_loaded_layout(state.release, model_config, self.load_config, device_config)
            if self._who.role != "target" and (target := state.shards[0].model()) is not None:
                algorithm = str(state.release.arguments(state.server_args).speculative_algorithm)
                tie_as_the_target_does(model, target, algorithm)
            inventory = Inventory.note(model, rank=self._who, device=state.device, rules=SGLangRules())
            built.append((model, inventory))
            return PullTarget(inventory.resolve(), page())

        outcome = Fork(
            who=self._who,
            identity=self._identity,
            content=wanted,
            instance_id=state.instance_id,
            seeds=seeds_for(state, self._who, self._identity, wanted),
            settings=state.settings,
            fabrics=MooncakeFabrics(state.settings, state.facts),
            agreement=agreement,
            check_fence=check_fence,
            page=page,
            lender=self._lender(),
            **self._way(),
        ).run(build)
        self._take(outcome)
        return built[-1][0]

    def _lender(self) -> Lender | None:
        """For a draft its target, which it may share memory with on their seed."""
        target = self._state.shards[0] if self._state.shards else None
        if target is None or target.there is None or target.report.seed is None:
            return None
        return Lender(target.report.seed.instance_id, target.there, target.resolve)

    def _way(self) -> dict[str, Any]:
        """How the bytes travel, where it isn't by one-sided reads."""
        if self._state.request.backend != "nccl":
            return {}
        return {"transport": "collective", "mover": self._state.receiver()}

    def _wanted(self, agreement: Agreement, model_config: Any) -> Content:
        """The content that all ranks ask for. A node without the files, or with others, stops the fork of all."""
        try:
            settings = self._state.settings
            load_format = disk_format(settings, self.load_config)
            wanted = expected_content(settings, model_config.model_path, model_config.revision, load_format)
        except RForkError as error:
            agreement.vote("content", Vote(False, str(error)))
            raise
        agreed = agreement.vote("content", Vote(True, fact=str(wanted)))
        if not agreed.ok:
            raise NoSeedAvailable(agreed.why, reason="content")
        return wanted

    def _take(self, outcome: ForkOutcome) -> None:
        self.report, self.content, self.origin_digests = outcome.report, outcome.content, outcome.origin_digests
        self.there = outcome.there
        if outcome.content.kind == "live" and outcome.weight_version is not None and self._who.role == "target":
            self._state.weight_version = outcome.weight_version
            self._state.release.label_weights(outcome.weight_version)

    def _fall_back(self, model_config: Any, device_config: Any, failure: Failure, lost_s: float) -> nn.Module:
        choice = self._state.settings.fallback
        is_live = self._state.settings.weights == "live"
        if not failure.elected and (choice == "never" or (choice == "auto" and is_live)):
            why = "`fallback` is never" if choice == "never" else "`weights` is live and `fallback` names no loader"
            raise RuntimeError(f"rfork: no weights from a seed ({failure.reason}) and {why}: {failure.detail}")
        if choice == "never":
            choice = "auto"
        if choice != "auto":
            self.load_config.load_format = choice
        name = getattr(self.load_config.load_format, "value", self.load_config.load_format)
        log.warning(
            "rfork: %s: falling back to load format %s (reason %s): %s",
            self._who.key,
            name,
            failure.reason,
            failure.detail,
        )
        started_s = time.monotonic()
        assert self.fallback is not None
        model: nn.Module = self.fallback().load_model(model_config=model_config, device_config=device_config)
        seconds = time.monotonic() - started_s
        self.report = WeightsReport(
            source="checkpoint",
            fallback_reason=failure.reason,
            fallback_detail=failure.detail[:2000],
            seconds=seconds,
            phases_s={"lost": lost_s, "fallback": seconds},
        )
        return model
