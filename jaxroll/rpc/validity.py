"""From when to when a certificate is valid, read from its PEM text: Python's `ssl` tells that of a peer's only."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

_VERSION, _UTC_TIME = 0xA0, 0x17  # tags of DER, X.690


def validity(pem: str) -> tuple[float, float]:
    """The unix seconds of the first certificate's notBefore and notAfter; ValueError when there is none."""
    try:
        end = pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        der = ssl.PEM_cert_to_DER_cert(pem[pem.index(ssl.PEM_HEADER) : end])
        _, certificate = next(_parts(der))
        _, signed = next(_parts(certificate))
        fields = [part for tag, part in _parts(signed) if tag != _VERSION]
        first, last = _parts(fields[3])  # after serial number, algorithm and issuer (RFC 5280, 4.1)
    except (IndexError, StopIteration, ValueError) as error:
        raise ValueError(f"not a certificate in PEM ({error or type(error).__name__})") from error
    return _seconds(*first), _seconds(*last)


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element of a DER sequence."""
    at = 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size & 0x80:
            digits = size & 0x7F
            size, at = int.from_bytes(data[at : at + digits], "big"), at + digits
        if at + size > len(data):
            raise ValueError("cut off")
        yield tag, data[at : at + size]
        at += size


def _seconds(tag: int, text: bytes) -> float:
    digits = text.decode("ascii").removesuffix("Z")
    if tag == _UTC_TIME:  # two digits of the year
        digits = ("19" if digits[0] >= "5" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()
