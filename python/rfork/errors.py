"""Errors whose type is the next action.

A message says what happened, what was expected and what was got, whose fault it is and what to try. `reason` is the
short, stable word that status pages and metrics carry.
"""

from __future__ import annotations

from collections.abc import Sequence


class RForkError(Exception):
    """Base of everything that R-Fork raises on purpose."""

    reason = "error"


class ConfigError(RForkError):
    """A setting is wrong. Consequence: the process refuses to start."""

    reason = "config"


class UnsupportedModel(RForkError):
    """This model or feature can't be carried, named in the message. Consequence: no fork; the fallback loader runs."""

    reason = "unsupported"


class NoSeedAvailable(RForkError):
    """Nobody can be read. Consequence: the fallback loader runs.

    `elected`: this instance was chosen to read the disk for its fleet, so `fallback: never` does not stop it.
    """

    reason = "no_seed"

    def __init__(self, message: str, *, reason: str = "no_seed", elected: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.elected = elected


class SeedError(RForkError):
    """One seed is no use to this client. Consequence: the next seed is tried, then the fallback loader."""

    reason = "seed"


class SeedUnreachable(SeedError):
    """The seed did not answer within the deadline, or not in our protocol. Nothing was touched."""

    reason = "unreachable"


class SeedUnproven(SeedError):
    """This fleet has a key, and the answer does not prove it: a stranger's, or a seed with another key. Nothing of the
    answer was used.
    """

    reason = "unproven"


class SeedRefused(SeedError):
    """The seed answered no (not ready, busy, draining, other instance, other key). Nothing was touched.

    `differing` lists the identity fields that differ as (field, here, there); `retry_after_s` is set where waiting
    helps, `listener` where another node of the same instance is to be asked.
    """

    reason = "refused"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "refused",
        differing: Sequence[tuple[str, object, object]] = (),
        retry_after_s: float | None = None,
        listener: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.differing = tuple(differing)
        self.retry_after_s = retry_after_s
        self.listener = listener


class ManifestMismatch(SeedError):
    """The two sides do not hold the same tensors. Raised before a byte moves; the seed is healthy."""

    reason = "manifest_mismatch"


class SeedLost(SeedError):
    """A read failed or made no progress within its deadline. Local memory may be half written."""

    reason = "seed_lost"


class FenceBroken(SeedError):
    """The seed's weights changed while they were read. Local memory may mix two versions."""

    reason = "fence"


class DigestMismatch(SeedError):
    """Bytes that arrived differ from the seed's digests. Local memory is wrong."""

    reason = "digest_mismatch"


class NotQuiet(RForkError):
    """The transport can't prove that nothing writes into local memory any more. Consequence: the process exits."""

    reason = "not_quiet"


class IllegalTransition(RForkError):
    """A lifecycle got an event that its state does not allow. Nothing changed; the message tells the story."""

    reason = "bug"


class TransportError(RForkError):
    """The transport can't be set up in this process. Consequence: no fork and no seed on this fabric."""

    reason = "transport"
