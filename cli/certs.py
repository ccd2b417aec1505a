"""`fluidpd certs`: a CA for one fleet, and a certificate for each part of it, for mutual TLS.

Never writes over a key, and never sends one anywhere.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import Exit, fail, parse_span

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

app = typer.Typer(help="A CA and certificates for mutual TLS between the parts.", no_args_is_help=True)

DirOption = Annotated[Path, typer.Option("--dir", help="folder of ca.crt and ca.key, and of what is made", metavar="DIR")]
_SKEW = timedelta(minutes=5)


@app.command()
def ca(
    directory: DirOption = Path("certs"), ttl: Annotated[str, typer.Option("--ttl", help="how long it is valid")] = "3650d"
) -> None:
    """Make the fleet's CA: ca.crt, which every part gets, and ca.key (mode 0600), which stays where certificates are issued.

    \b
    Examples:
      fluidpd certs ca --dir /etc/fluidpd/certs
    """
    x509 = library()
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "FluidPD fleet CA")])
    made = (
        begun(x509, name, name, key.public_key(), parse_span(ttl))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(x509, sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    save(directory, "ca", made.sign(key, hash_()), key)
    typer.echo(f"made {directory / 'ca.crt'} and {directory / 'ca.key'}; issue with: fluidpd certs issue NAME --dir {directory}")


@app.command()
def issue(
    name: Annotated[str, typer.Argument(help="controller, dashboard, a worker's name or a person's: names the files")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="name or address that the part is called by; repeat it", metavar="HOST")
    ] = None,
    directory: DirOption = Path("certs"),
    ttl: Annotated[str, typer.Option("--ttl", help="how long it is valid")] = "365d",
) -> None:
    """Make NAME.crt and NAME.key (mode 0600), signed by the CA of the folder: good for serving and for calling.

    \b
    Examples:
      fluidpd certs issue controller --host ctl.example --host 10.0.0.1
      fluidpd certs issue w3 --host 10.0.0.5 --ttl 90d
      fluidpd certs issue ana
    """
    x509 = library()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if not name or name == "ca" or name.startswith(".") or "/" in name:
        raise typer.BadParameter(f"{name!r} cannot name the files; write for example controller or w3")
    try:
        authority = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
        signer: Any = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as problem:
        fail(f"no CA in {directory} ({problem}): make one with `fluidpd certs ca --dir {directory}`", Exit.CONFIG)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = [general_name(x509, given) for given in host or [name]]
    purposes = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    made = (
        begun(x509, subject, authority.subject, key.public_key(), parse_span(ttl))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(x509, sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    save(directory, name, made.sign(signer, hash_()), key)
    typer.echo(f"made {directory / f'{name}.crt'} and {directory / f'{name}.key'}, valid for {ttl}")


def library() -> Any:
    """The one library that makes certificates, which only this command needs."""
    try:
        from cryptography import x509
    except ImportError:
        fail("this needs the package cryptography: pip install 'fluidpd[certs]'", Exit.UNAVAILABLE)
    return x509


def hash_() -> Any:
    from cryptography.hazmat.primitives.hashes import SHA256

    return SHA256()


def begun(x509: Any, subject: Any, issuer: Any, public: Any, ttl_s: float) -> Any:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(seconds=ttl_s))
    )


def usage(x509: Any, *, sign: bool) -> Any:
    return x509.KeyUsage(
        digital_signature=not sign,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def general_name(x509: Any, given: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(given))
    except ValueError:
        return x509.DNSName(given)


def save(directory: Path, name: str, certificate: Certificate, key: Any) -> None:
    """Key first: a certificate without one is of no use. Both are new files."""
    from cryptography.hazmat.primitives import serialization

    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = ((f"{name}.key", secret, 0o600), (f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM), 0o644))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, content, mode in files:
            with os.fdopen(os.open(directory / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as made:
                made.write(content)
    except FileExistsError as problem:
        fail(f"{problem.filename} is there already: move it away, or choose another --dir or name", Exit.CONFLICT)
    except OSError as problem:
        fail(f"{directory} cannot be written: {problem.strerror}", Exit.FAILURE)
