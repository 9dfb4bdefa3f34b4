"""
JSON Web Tokens (RFC 7519) as credentials: signatures and claims by PyJWT.

Keys come from a file: a JWKS document, a PEM public key, or a secret for HS256. It is read again when it has
changed. The algorithm follows from the key, never from the token, so `alg: none` and a public key that is used
as a secret fail. `exp` is required; `nbf`, `iss` and `aud` are checked. The rights are a claim with a list of grants
(`virta.access.grants`).
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from jwt import PyJWTError

from virta.access.grants import Rights, read_grants
from virta.access.principal import JWT, Principal
from virta.errors import AccessError

if TYPE_CHECKING:
    from collections.abc import Callable

ALGORITHMS = ("HS256", "RS256", "ES256", "EdDSA")
KEYS_MAX = 100
KEY_FILE_BYTES_MAX = 1024 * 1024
SECRET_BYTES_MIN = 32  # RFC 7518 §3.2
TOKEN_CHARS_MAX = 16_384
# Verified tokens that are kept, since a signature takes longer than everything else.
KEPT_MAX = 1024
CLAIM_DEFAULT = "virta"
_PEM = b"-----BEGIN"


class VerificationKey:
    """A key and the one algorithm it is used with."""

    def __init__(self, key: Any, algorithm: str, id_: str | None = None) -> None:
        self.key = key
        self.algorithm = algorithm
        self.id = id_


class JwtVerifier:
    """Checks tokens against the keys of a file."""

    def __init__(
        self,
        path: str,
        *,
        issuer: str | None = None,
        audience: str | None = None,
        claim: str = CLAIM_DEFAULT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = Path(path)
        self._issuer = issuer
        self._audience = audience
        self._claim = claim
        self._clock = clock
        self._keys: list[VerificationKey] = []
        self._signature: tuple[int, int] | None = None
        self._kept: dict[bytes, Principal] = {}
        self.refresh()

    def refresh(self) -> bool:
        """
        Read the keys again if the file has changed; return whether it had.

        Raises:
            AccessError: the file cannot be read, or has no key that can be used.
        """
        try:
            found = self._path.stat()
            signature = (found.st_mtime_ns, found.st_size)
            if signature == self._signature:
                return False
            self._keys = read_keys(self._path.read_bytes()[: KEY_FILE_BYTES_MAX + 1], self._path)
        except OSError as error:
            raise AccessError(
                f"cannot read keys from {self._path}: {error.strerror}", code="keys-unreadable"
            ) from error
        self._signature = signature
        self._kept.clear()
        return True

    def find(self, text: str) -> Principal:
        """
        Return the principal of a token.

        Raises:
            AccessError: the token is not valid; the message says which check failed.
        """
        if len(text) > TOKEN_CHARS_MAX:
            raise AccessError("the JWT is too long", code="jwt-invalid")
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        principal = self._kept.get(digest)
        if principal is None:
            principal = self._verified(text)
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[digest] = principal
        if principal.expires <= self._clock():
            raise AccessError("the JWT has expired", code="token-expired")
        return principal

    def _verified(self, text: str) -> Principal:
        claims = self._claims(text)
        grants = read_grants(claims.get(self._claim, []))
        if not grants:
            raise AccessError(f"the JWT has no grants in `{self._claim}`", code="jwt-no-grants")
        subject = str(claims.get("sub", ""))[:100]
        name = "jwt:" + "".join(c if c.isprintable() else "?" for c in subject)
        return Principal(name, JWT, Rights(grants), float(claims["exp"]))

    def _claims(self, text: str) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(text)
        except PyJWTError:
            raise AccessError("the JWT cannot be read", code="jwt-invalid") from None
        wanted, algorithm = header.get("kid"), header.get("alg")
        keys = [key for key in self._keys if key.algorithm == algorithm]
        if wanted is not None:
            keys = [key for key in keys if key.id in {wanted, None}]
        refusal = AccessError(
            "the JWT is not signed by a known key with its algorithm", code="jwt-signature"
        )
        required = ["exp"] + ["iss"] * bool(self._issuer) + ["aud"] * bool(self._audience)
        for key in keys:
            try:
                claims: dict[str, Any] = jwt.decode(
                    text,
                    key.key,
                    algorithms=[key.algorithm],
                    issuer=self._issuer,
                    audience=self._audience,
                    options={"require": required, "verify_aud": self._audience is not None},
                )
            except jwt.InvalidSignatureError:
                continue
            except PyJWTError as error:
                code = "token-expired" if isinstance(error, jwt.ExpiredSignatureError) else ""
                raise AccessError(f"the JWT is refused: {_reason(error)}", code=code or "jwt-claims") from None  # fmt: skip
            return claims
        raise refusal


def _reason(error: PyJWTError) -> str:
    """Return which check failed; never the expected value."""
    kinds = {
        jwt.ExpiredSignatureError: "it has expired",
        jwt.ImmatureSignatureError: "it is not valid yet",
        jwt.InvalidAudienceError: "its audience is another one",
        jwt.InvalidIssuerError: "its issuer is another one",
    }
    if isinstance(error, jwt.MissingRequiredClaimError):
        return f"it has no {error.claim}"
    return next((text for kind, text in kinds.items() if isinstance(error, kind)), "it is invalid")


def read_keys(data: bytes, path: Path) -> list[VerificationKey]:
    """Return the keys of a file: a JWKS document, one PEM public key, or a secret."""
    if len(data) > KEY_FILE_BYTES_MAX:
        raise _unusable(path, f"it is larger than {KEY_FILE_BYTES_MAX} bytes")
    text = data.strip()
    if text.startswith(b"{"):
        return _jwks(text, path)
    if text.startswith(_PEM):
        return [_pem(text, path)]
    if len(text) < SECRET_BYTES_MIN:
        raise _unusable(path, f"a secret for HS256 has at least {SECRET_BYTES_MIN} bytes")
    return [VerificationKey(text, "HS256")]


def _pem(text: bytes, path: Path) -> VerificationKey:
    if b"PRIVATE KEY" in text:
        raise _unusable(path, "it is a private key: give the public key")
    try:
        key = load_pem_public_key(text)
    except ValueError as error:
        raise _unusable(path, str(error)) from None
    if isinstance(key, RSAPublicKey):
        return VerificationKey(key, "RS256")
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return VerificationKey(key, "ES256")
    if isinstance(key, Ed25519PublicKey):
        return VerificationKey(key, "EdDSA")
    raise _unusable(path, f"its kind of key is not used: {', '.join(ALGORITHMS)} are")


def _jwks(text: bytes, path: Path) -> list[VerificationKey]:
    try:
        members = msgspec.json.decode(text)["keys"]
        if not isinstance(members, list) or not 1 <= len(members) <= KEYS_MAX:
            raise _unusable(path, f"`keys` is a list of 1 to {KEYS_MAX} keys")
        found = []
        for member in members:
            key = jwt.PyJWK(member)
            if key.algorithm_name in ALGORITHMS and member.get("use", "sig") == "sig":
                found.append(VerificationKey(key.key, key.algorithm_name, member.get("kid")))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, PyJWTError) as error:
        raise _unusable(path, f"it is not a JWKS document: {error}") from None
    if not found:
        raise _unusable(path, f"it has no key for {', '.join(ALGORITHMS)}")
    return found


def _unusable(path: Path, why: str) -> AccessError:
    return AccessError(f"cannot use keys of {path}: {why}", code="keys-unreadable")
