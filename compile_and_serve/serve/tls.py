"""`TlsSettings`: the certificate with which the server encrypts its connections."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsSettings:
    """certfile, keyfile: PEM files; the key may be in the certificate's file. ca_certs: CAs that may sign the clients' certificates.
    require_client_certificate: refuse clients without one. ciphers: OpenSSL's list for TLS 1.2; None is Python's default.
    """

    certfile: Path
    keyfile: Path | None = None
    ca_certs: Path | None = None
    require_client_certificate: bool = False
    ciphers: str | None = None

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
