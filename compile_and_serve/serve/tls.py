"""`TlsSettings`: the certificate with which the server encrypts its connections."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compile_and_serve.option_fields import MISSING, option

_ssl_option = partial(option, panel="Connections")


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsSettings:
    """Files and rules of TLS. ciphers: None is Python's default."""

    certfile: Path = _ssl_option(MISSING, "PEM certificate; the server then speaks HTTPS only.", name="ssl_certfile")
    keyfile: Path | None = _ssl_option(None, "PEM key, if it is not in --ssl-certfile.", name="ssl_keyfile")
    ca_certs: Path | None = _ssl_option(None, "PEM certificates of the CAs that may sign clients' certificates.", name="ssl_ca_certs")
    require_client_certificate: bool = _ssl_option(
        False, "Refuse clients without a certificate of --ssl-ca-certs.", name="ssl_require_client_cert"
    )
    ciphers: str | None = _ssl_option(None, "OpenSSL's list of ciphers for TLS 1.2.", name="ssl_ciphers")

    def context(self) -> ssl.SSLContext:
        """The TLS context of the server. Raises `ValueError` with one sentence if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # The password function keeps OpenSSL from asking on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"--ssl-certfile {self.certfile} and --ssl-keyfile {self.keyfile} are not a readable PEM certificate and "
                f"its unencrypted key ({error})."
            ) from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"--ssl-ca-certs {self.ca_certs} cannot be read as PEM certificates ({error}).") from None
            context.verify_mode = ssl.CERT_REQUIRED if self.require_client_certificate else ssl.CERT_OPTIONAL
        if self.ciphers is not None:
            try:
                context.set_ciphers(self.ciphers)
            except ssl.SSLError as error:
                raise ValueError(f"--ssl-ciphers {self.ciphers!r:.200} names no cipher of OpenSSL.") from error
        return context
