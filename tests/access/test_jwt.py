"""JWT: algorithms, keys, claims."""

from __future__ import annotations

import base64
import json
import os

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from virta.access.jwt import JwtVerifier
from virta.errors import AccessError

SECRET = b"0123456789abcdef0123456789abcdef"
NOW = 2_000_000_000  # the library reads the real clock: far in the future
GRANTS = [{"verbs": ["read"], "pattern": "orders.*", "filter": "tenant=42"}]
CLAIMS = {"sub": "shop", "exp": NOW + 60, "virta": GRANTS, "iss": "https://id", "aud": "virta"}


def private_keys():
    return {
        "RS256": rsa.generate_private_key(public_exponent=65537, key_size=2048),
        "ES256": ec.generate_private_key(ec.SECP256R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    }


KEYS = private_keys()


def pem(key):
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


@pytest.fixture
def verifier(tmp_path):
    def make(content, **options):
        path = tmp_path / "keys"
        path.write_bytes(content)
        return JwtVerifier(str(path), clock=lambda: NOW, **options)

    return make


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA", "HS256"])
def test_each_algorithm(verifier, algorithm):
    """A token that is signed by the key has the rights of its claim."""
    key = SECRET if algorithm == "HS256" else KEYS[algorithm]
    content = SECRET if algorithm == "HS256" else pem(key)
    principal = verifier(content).find(jwt.encode(CLAIMS, key, algorithm))

    assert principal.id == "jwt:shop"
    assert principal.expires == NOW + 60
    assert principal.rights.permission("read", "orders.eu").row_filter is not None
    assert principal.rights.permission("publish", "orders.eu") is None


def unsigned(claims):
    def part(value):
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none', 'typ': 'JWT'})}.{part(claims)}."


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: unsigned(CLAIMS), "jwt-signature"),
        (lambda: jwt.encode(CLAIMS, KEYS["ES256"], "ES256"), "jwt-signature"),
        (lambda: jwt.encode(CLAIMS, rsa.generate_private_key(public_exponent=65537, key_size=2048), "RS256"), "jwt-signature"),
        # The public key as a secret: the algorithm is that of the key, not of the token.
        (lambda: forged(pem(KEYS["RS256"])), "jwt-signature"),
        (lambda: jwt.encode(CLAIMS | {"exp": 1}, KEYS["RS256"], "RS256"), "token-expired"),
        (lambda: jwt.encode({k: v for k, v in CLAIMS.items() if k != "exp"}, KEYS["RS256"], "RS256"), "jwt-claims"),
        (lambda: jwt.encode(CLAIMS | {"nbf": NOW + 30}, KEYS["RS256"], "RS256"), "jwt-claims"),
        (lambda: jwt.encode(CLAIMS | {"aud": "other"}, KEYS["RS256"], "RS256"), "jwt-claims"),
        (lambda: jwt.encode({k: v for k, v in CLAIMS.items() if k != "aud"}, KEYS["RS256"], "RS256"), "jwt-claims"),
        (lambda: jwt.encode(CLAIMS | {"iss": "https://evil"}, KEYS["RS256"], "RS256"), "jwt-claims"),
        (lambda: jwt.encode(CLAIMS | {"virta": []}, KEYS["RS256"], "RS256"), "jwt-no-grants"),
        (lambda: jwt.encode(CLAIMS | {"virta": "admin"}, KEYS["RS256"], "RS256"), "invalid-grant"),
        (lambda: "a.b.c", "jwt-invalid"),
        (lambda: "a" * 20_000 + ".b.c", "jwt-invalid"),
    ],
    ids=[
        "alg none", "another algorithm", "another key", "public key as secret", "expired", "no exp",
        "not yet", "another audience", "no audience", "another issuer", "no grants", "odd grants",
        "no JWT", "too long",
    ],
)  # fmt: skip
def test_what_is_refused(verifier, make, code):
    """Each check fails with its code, and the message never says what would have passed."""
    checking = verifier(pem(KEYS["RS256"]), issuer="https://id", audience="virta")
    with pytest.raises(AccessError) as refused:
        checking.find(make())

    assert refused.value.code == code
    assert "https://id" not in refused.value.message


def forged(secret):
    """Sign with a public key as HMAC secret; the library refuses to do so itself."""
    import hashlib
    import hmac

    def part(value):
        return base64.urlsafe_b64encode(value).rstrip(b"=")

    content = part(b'{"alg":"HS256","typ":"JWT"}') + b"." + part(json.dumps(CLAIMS).encode())
    signature = part(hmac.new(secret, content, hashlib.sha256).digest())
    return (content + b"." + signature).decode()


def jwks(**keys):
    found = []
    for kid, key in keys.items():
        made = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
        found.append(made | {"kid": kid, "use": "sig", "alg": "RS256"})
    return json.dumps({"keys": found}).encode()


def test_keys_are_rotated_in_a_jwks_file(verifier, tmp_path):
    """A new file is read while the server runs; tokens of a removed key are refused."""
    old, new = KEYS["RS256"], rsa.generate_private_key(public_exponent=65537, key_size=2048)
    checking = verifier(jwks(old=old))
    by_old = jwt.encode(CLAIMS, old, "RS256", headers={"kid": "old"})
    by_new = jwt.encode(CLAIMS, new, "RS256", headers={"kid": "new"})
    checking.find(by_old)
    path = tmp_path / "keys"
    path.write_bytes(jwks(new=new))
    os.utime(path, ns=(1, 1))

    assert checking.refresh() is True
    assert checking.find(by_new).id == "jwt:shop"
    with pytest.raises(AccessError) as refused:
        checking.find(by_old)
    assert refused.value.code == "jwt-signature"


def test_a_kept_token_expires(tmp_path):
    """A token that was verified before is still refused after its time."""
    now = [NOW]
    path = tmp_path / "keys"
    path.write_bytes(SECRET)
    checking = JwtVerifier(str(path), clock=lambda: now[0])
    text = jwt.encode(CLAIMS, SECRET, "HS256")
    checking.find(text)
    now[0] = NOW + 61
    with pytest.raises(AccessError) as refused:
        checking.find(text)

    assert refused.value.code == "token-expired"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"short", "at least 32 bytes"),
        (b"{}", "not a JWKS document"),
        (b'{"keys": []}', "1 to 100 keys"),
        (b'{"keys": [1]}', "not a JWKS document"),
        (b"-----BEGIN PUBLIC KEY-----\nx\n-----END PUBLIC KEY-----", "cannot use keys"),
        pytest.param(
            KEYS["RS256"].private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            "give the public key",
            id="private key",  # a new one in each process, and ids must be the same in all
        ),
    ],
)
def test_key_files_that_cannot_be_used(verifier, content, why):
    """The server does not start with them, and says why."""
    with pytest.raises(AccessError, match=why):
        verifier(content)


def test_a_key_file_that_is_missing(tmp_path):
    """The path is named."""
    with pytest.raises(AccessError, match="cannot read keys from"):
        JwtVerifier(str(tmp_path / "none"))
