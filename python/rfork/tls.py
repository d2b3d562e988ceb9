"""TLS on both services: how a peer's certificate is checked, and which one is shown. Loads no HTTP library."""

from __future__ import annotations

import ssl
from typing import NamedTuple

from rfork.errors import ConfigError


class Tls(NamedTuple):
    """How a peer's certificate is checked: a private authority, and the name in the certificate if not the address."""

    ca_file: str | None = None
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        """Raises ConfigError if the authority's file can't be used."""
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ca_file {self.ca_file}: {error}") from error

    def extensions(self) -> dict[str, str]:
        """What httpx takes with a request so that the certificate is held against `server_name`."""
        return {"sni_hostname": self.server_name} if self.server_name else {}


class Certificate(NamedTuple):
    """What a service shows: certificate chain and private key, as PEM files."""

    cert_file: str
    key_file: str

    @classmethod
    def of(cls, cert_file: str | None, key_file: str | None) -> Certificate | None:
        """None where neither is given. Raises ConfigError for one without the other, or for files that don't fit."""
        if not cert_file and not key_file:
            return None
        if not cert_file or not key_file:
            raise ConfigError("tls_cert_file, tls_key_file: expected both or neither, got one")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_cert_file {cert_file}, tls_key_file {key_file}: {error}") from None
        return cls(cert_file, key_file)
