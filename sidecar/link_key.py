"""How a sidecar proves its worker to the controller: by a token of its own, else by the fleet secret; each connection anew.

Never sends either: what travels is a proof that fits one challenge.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass

from pydantic import ValidationError

from fluidpd.signing import Seal, key_of_secret, key_of_token, session_key, token_id
from fluidpd.telemetry import Challenge, Hello


class NoChallenge(Exception):
    """The controller did not ask for a proof. The text says what to do."""


@dataclass(frozen=True, slots=True)
class LinkKey:
    secret: str | None = None
    token: str | None = None

    @property
    def is_set(self) -> bool:
        return self.secret is not None or self.token is not None

    def challenge_in(self, raw: str | bytes) -> Challenge:
        """Raises NoChallenge: a controller that asks for nothing proves nothing either, and is not obeyed."""
        try:
            said = json.loads(raw)
            if isinstance(said, dict) and said.get("type") == "challenge":
                return Challenge.model_validate(said)
        except (ValueError, ValidationError):
            pass
        raise NoChallenge(
            "it did not ask for the fleet secret: set security.fleet_secret_file there, or is this another controller?"
        )

    def sealed(self, hello: Hello, challenge: Challenge) -> tuple[str, Seal, Seal]:
        """The hello's frame, and the seals of what is sent and what arrives after it."""
        nonce = secrets.token_urlsafe(24)
        if self.token is not None:
            digest = hashlib.sha256(self.token.encode()).hexdigest()
            key, key_id = key_of_token(digest), token_id(digest)
        else:
            assert self.secret is not None
            key, key_id = key_of_secret(self.secret), ""
        session = session_key(key, challenge.nonce, nonce, hello.worker)
        outgoing = Seal(session, "sidecar")
        proven = hello.model_copy(update={"link_nonce": nonce, "link_key": key_id})
        return outgoing.close(proven.model_dump_json()), outgoing, Seal(session, "controller")
