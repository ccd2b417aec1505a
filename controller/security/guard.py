"""What is looked at once, at the start: the mode of secret files, TLS, whether the port is open to anybody.

Never refuses by itself: settings do. This says aloud what they let pass.
"""

from __future__ import annotations

import logging
import ssl
import stat
from pathlib import Path
from typing import Any

from controller.security.tokens import book_of
from controller.settings import ConfigError, ControllerSettings, SecuritySettings

log = logging.getLogger(__name__)

OPEN = "INSECURE: the controller's API at {host} is open to everyone who reaches it; set security.tokens_file"


def insecure(settings: ControllerSettings) -> str:
    """The sentence for log and status, empty where all is guarded."""
    return OPEN.format(host=settings.server.host) if settings.is_open else ""


def warn(settings: ControllerSettings) -> None:
    """Log what a person should change. Raises ConfigError where a file cannot be used at all."""
    s = settings.security
    book_of(s.tokens_file)
    for field in ("tokens_file", "fleet_secret_file", "tls_key_file"):
        name = getattr(s, field)
        if name is not None and (mode := loose_mode(Path(name))):
            log.warning("security.%s %s may be read by others (mode %s): chmod 600 %s", field, name, mode, name)
    if said := insecure(settings):
        log.warning("%s", said)


def loose_mode(path: Path) -> str:
    """The mode of a file that others than its owner may use; nothing where it is as it should be."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    return f"{mode:04o}" if mode & 0o077 else ""


def tls_options(s: SecuritySettings) -> dict[str, Any]:
    """uvicorn's settings for TLS; empty without. Raises ConfigError where a file is none of its kind."""
    if s.tls_cert_file is None:
        return {}
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(s.tls_cert_file, s.tls_key_file)
        if s.tls_client_ca_file is not None:
            context.load_verify_locations(s.tls_client_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"security.tls_cert_file, tls_key_file or tls_client_ca_file cannot be used: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if s.tls_client_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return {"ssl_context_factory": lambda _config, _default: context}
