"""Certificates for tests: a CA, and what it signs. They are good for an hour, or have been."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.extras import needed

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID
else:
    x509 = needed("cryptography.x509", "crypto")
    hashes = needed("cryptography.hazmat.primitives.hashes", "crypto")
    serialization = needed("cryptography.hazmat.primitives.serialization", "crypto")
    ec = needed("cryptography.hazmat.primitives.asymmetric.ec", "crypto")
    NameOID = needed("cryptography.x509.oid", "crypto").NameOID


class Certificate(NamedTuple):
    """A certificate and its key, and the files they are in."""

    certificate: x509.Certificate
    private: ec.EllipticCurvePrivateKey
    cert: Path
    key: Path


def context_of(folder: Path, side: ssl.Purpose, name: str = "instance") -> ssl.SSLContext:
    """What Python's TLS needs to be one instance to another: of a certificate in a folder, and the CA beside it.

    Args:
        side: what the other side is to prove: SERVER_AUTH where this is the reader, CLIENT_AUTH where it is the owner.
    """
    context = ssl.create_default_context(side, cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}-key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def certify(
    folder: Path, name: str, issuer: Certificate | None = None, host: str = "127.0.0.1", is_over: bool = False
) -> Certificate:
    """A CA without issuer, or a certificate of one, for a host's address and for its name.

    Args:
        is_over: its time has run out a minute ago.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + (-datetime.timedelta(minutes=1) if is_over else datetime.timedelta(hours=1)))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(host)), x509.DNSName(name)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(issuer.private if issuer else key, hashes.SHA256())
    made = Certificate(certificate, key, folder / f"{name}.pem", folder / f"{name}-key.pem")
    made.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.touch(0o600)
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made
