"""CURVE keys for the ZMQ sockets between an engine and ranks on other hosts: encryption, and authentication of both sides."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator


@dataclass(frozen=True, slots=True)
class RankKeys:
    """What a rank needs to connect. It reaches the rank over a channel that is already trusted, such as Ray's."""

    engine: bytes
    public: bytes
    secret: bytes

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Call before `connect`: the socket talks only to the engine."""
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = self.engine, self.public, self.secret


class EngineKeys:
    """The keys of one engine. `ranks` is what its ranks get."""

    def __init__(self, engine: tuple[bytes, bytes] | None = None, ranks: tuple[bytes, bytes] | None = None) -> None:
        """engine, ranks: their public and secret keys; None: new ones."""
        public, self._secret = engine or zmq.curve_keypair()
        self.ranks = RankKeys(public, *(ranks or zmq.curve_keypair()))
        self._authenticator: ThreadAuthenticator | None = None

    @classmethod
    def of_secret(cls, secret: bytes) -> EngineKeys:
        """The keys that all who have the secret derive from it."""
        return cls(_keypair(b"engine", secret), _keypair(b"ranks", secret))

    def admit_ranks_only(self, context: zmq.Context[Any]) -> None:
        """Call before the first socket: protected sockets of `context` refuse peers without the ranks' keys."""
        from zmq.auth.thread import ThreadAuthenticator  # slow to import, and only Ray needs it

        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Call before `bind`."""
        socket.curve_server, socket.curve_secretkey = True, self._secret

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer may connect. Called by the authenticator."""
        return key == self.ranks.public

    def close(self) -> None:
        """Call before the context is destroyed."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


def _keypair(purpose: bytes, secret: bytes) -> tuple[bytes, bytes]:
    own = z85.encode(hashlib.blake2b(secret, digest_size=32, person=purpose).digest())
    return zmq.curve_public(own), own
