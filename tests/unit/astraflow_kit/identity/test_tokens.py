"""What a token must be to prove who calls: signed, for this server, now."""

import base64
import json
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from astraflow.errors import UnauthenticatedError
from astraflow_kit.identity.tokens import LEEWAY_S, ROLES, Identity, read_revoked, verify
from support.tokens import HOUR_S, KEY_ID, OTHER_KEY, SIGNING_KEY
from support.tokens import token as token_of

KEYS = {KEY_ID: SIGNING_KEY.public_key()}
PUBLIC_PEM = SIGNING_KEY.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)
NOW_S = float(int(time.time()))


def token(subject: str, role: str, /, **claims: Any) -> str:
    """A token that is valid from `NOW_S` on."""
    return token_of(subject, role, **({"nbf": NOW_S, "exp": NOW_S + HOUR_S} | claims))


def read(made: str, *, now_s: float = NOW_S) -> Identity:
    """What the token proves."""
    return verify(made, keys=KEYS, audience="astraflow", now_s=now_s)


def refused(made: str, *, now_s: float = NOW_S) -> UnauthenticatedError:
    """The refusal of a token."""
    with pytest.raises(UnauthenticatedError) as caught:
        read(made, now_s=now_s)
    return caught.value


def unsigned(algorithm: str) -> str:
    """A token of another algorithm, signed with what everybody knows: nothing, or the public key as a secret."""
    good = jwt.decode(token("n", "rollout"), options={"verify_signature": False})
    header = {"alg": algorithm, "kid": KEY_ID, "typ": "JWT"}
    body = ".".join(_part(part) for part in (header, good))
    if algorithm == "none":
        return f"{body}."
    signature = jwt.get_algorithm_by_name(algorithm).sign(body.encode(), b"x" * 64)
    return f"{body}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def _part(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def test_roles_are_those_of_the_contract() -> None:
    assert set(ROLES) == {"rollout", "trainer", "operator", "viewer", "agent"}


def test_a_good_token_says_who_calls_and_what_it_is_for() -> None:
    identity = read(
        token(
            "node-1", "rollout", runs=["a", "b"], pools=["spot"], policies=["*"], nbf=NOW_S - 1, exp=NOW_S + 9
        )
    )
    assert identity == Identity(
        subject="node-1",
        roles=frozenset({"rollout"}),
        runs=frozenset({"a", "b"}),
        pools=frozenset({"spot"}),
        token_id="jti-node-1",
        expires_s=NOW_S + 9 + LEEWAY_S,
        warned_from_s=NOW_S + 7,
    )
    assert [identity.may_see(run) for run in ("a", "c")] == [True, False]


CHANGED: dict[str, tuple[dict[str, Any], str, str]] = {
    "expired": ({"exp": NOW_S - LEEWAY_S}, "expired", "this server's clock says 20"),
    "ahead": ({"nbf": NOW_S + HOUR_S}, "not_yet_valid", "a clock is off"),
    "other installation": (
        {"aud": "staging"},
        "wrong_audience",
        "audience 'staging', this server is 'astraflow'",
    ),
    "no audience": ({"aud": None}, "wrong_audience", "audience none"),
    "other issuer": ({"iss": "elsewhere"}, "malformed", "issuer is 'elsewhere'"),
    "no id": ({"jti": None}, "malformed", "no claim `jti`"),
    "unknown role": ({"role": "root"}, "malformed", "role is 'root'"),
    "role of nobody": ({"role": "anyone"}, "malformed", "role is 'anyone'"),
    "runs as text": ({"runs": "*"}, "malformed", "`runs` must be a list"),
    "no pools": ({"pools": None}, "malformed", "`pools` must be a list"),
    "no end": ({"exp": None}, "malformed", "no time in claim `exp`"),
    "endless": ({"exp": float("inf")}, "malformed", "no time in claim `exp`"),
    "unknown key": (
        {"key_id": "old"},
        "unknown_key",
        "key 'old', which this server does not know (it knows suite)",
    ),
    "forged": ({"key": OTHER_KEY}, "signature", "changed or forged"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_token_that_proves_nothing_is_refused_with_its_reason(case: str) -> None:
    claims, reason, words = CHANGED[case]
    error = refused(token("node-1", "rollout", **claims))
    assert error.metadata["reason"] == reason
    assert words in error.message


@pytest.mark.parametrize("algorithm", ["none", "HS256", "HS512"])
def test_the_algorithm_is_fixed_whatever_the_header_says(algorithm: str) -> None:
    assert refused(unsigned(algorithm)).metadata["reason"] == "algorithm"


@pytest.mark.parametrize("text", ["", "x", "a.b", "a.b.c", "." * 5, "é.é.é", "x" * 9000])
def test_what_is_no_token_is_refused(text: str) -> None:
    assert refused(text).metadata["reason"] == "malformed"


def test_a_changed_claim_breaks_the_signature() -> None:
    header, claims, signature = token("node-1", "viewer").split(".")
    content = json.loads(base64.urlsafe_b64decode(claims + "=="))
    changed = f"{header}.{_part(content | {'role': 'operator'})}.{signature}"
    assert refused(changed).metadata["reason"] == "signature"


def test_clocks_may_be_a_minute_apart() -> None:
    made = token("node-1", "rollout", nbf=NOW_S, exp=NOW_S + 10)
    assert read(made, now_s=NOW_S - LEEWAY_S).subject == "node-1"
    assert read(made, now_s=NOW_S + 9 + LEEWAY_S).subject == "node-1"
    assert refused(made, now_s=NOW_S - LEEWAY_S - 1).metadata["reason"] == "not_yet_valid"
    assert refused(made, now_s=NOW_S + 10 + LEEWAY_S).metadata["reason"] == "expired"


def test_no_refusal_repeats_the_token() -> None:
    for claims, _, _ in CHANGED.values():
        made = token("node-1", "rollout", **claims)
        assert made.rpartition(".")[2] not in refused(made).message


def test_revoked_ids_are_lines_with_comments() -> None:
    assert read_revoked("# lost laptop\nabc # of node-1\n\n  def\n") == {"abc", "def"}
