"""TLS of a sidecar: what it shows, and whom it believes. One CA for the fleet, made by `fluidpd certs`.

Never falls back to anything: a file that cannot be used stops the start.
"""

from __future__ import annotations

import ssl
from typing import Any

from sidecar.settings import ConfigError, SidecarSettings


def server_options(settings: SidecarSettings) -> dict[str, Any]:
    """uvicorn's settings; empty without TLS. With a CA, callers must show a certificate of it. Raises ConfigError."""
    if settings.tls_cert_file is None:
        return {}
    context = _context(settings, ssl.PROTOCOL_TLS_SERVER)
    if settings.tls_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return {"ssl_context_factory": lambda _config, _default: context}


def client_context(settings: SidecarSettings) -> ssl.SSLContext | None:
    """For calls to peers and to the controller; None where nothing about TLS is set. Raises ConfigError."""
    if settings.tls_ca_file is None and settings.tls_cert_file is None:
        return None
    context = _context(settings, ssl.PROTOCOL_TLS_CLIENT)
    if settings.tls_ca_file is None:
        context.load_default_certs()
    return context


def _context(settings: SidecarSettings, protocol: int) -> ssl.SSLContext:
    try:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if settings.tls_cert_file is not None and settings.tls_key_file is not None:
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
        if settings.tls_ca_file is not None:
            context.load_verify_locations(settings.tls_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert_file, tls_key_file or tls_ca_file cannot be used: {error}") from error
    return context
