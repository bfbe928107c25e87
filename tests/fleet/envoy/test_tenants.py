"""The file of tenants: what it comes to, and the refusal of everything that is wrong in it."""

import json
from pathlib import Path

import pytest
import yaml

from fleet.commands.cli import main
from fleet.envoy.tenants import MAX_BYTES, MAX_TENANTS, AllowedTenant, RemoteKeys, read_tenants
from fleet.errors import UsageError

KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"
JWKS = json.dumps({"keys": [{"kty": "oct", "k": "AAAA"}]})
JWT = 'jwt: {issuer: "https://a", jwks: {file: jwks.json}}\n'


def read(folder: Path, text: str, **environment: str):
    (folder / "jwks.json").write_text(JWKS)
    (folder / "key").write_text(f"{OTHER}\n")
    (folder / "tenants.yaml").write_text(text)
    return read_tenants(folder / "tenants.yaml", environment)


def one(fields: str, keys: str = f"[{{value: {KEY}}}]") -> str:
    return f"tenants: [{{name: a, keys: {keys}, {fields}}}]"


def test_keys_come_from_the_environment_a_file_or_the_value(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        f"""\
tenants:
- name: acme
  keys: [{{env: ACME_KEY}}, {{file: key}}, {{value: sk-third-0123456789}}]
  objective: chat
  requestsPerMinute: 600
  tokensPerMinute: 100000
  models: [{{name: "llama 3=x", tokensPerMinute: 20000}}]
- {{name: research, claim: team r}}
- {{name: ops}}
{JWT}""",
        ACME_KEY=KEY,
    )
    keys = (KEY, OTHER, "sk-third-0123456789")
    limit = "100000, llama 3=x=20000"
    acme = AllowedTenant("acme", keys, "acme", "chat", 600, limit)
    assert found.tenants == (
        acme,
        AllowedTenant("research", (), "team r"),
        AllowedTenant("ops", (), "ops"),
    )
    assert (found.tokens.claim, found.tokens.keys) == ("sub", JWKS)
    assert found.limits_tokens


def test_the_address_of_a_key_server_has_its_port_and_authorities(tmp_path: Path) -> None:
    for url, port, ca in (("https://a/k", 443, "ca.pem"), ("http://a:81/k", 81, None)):
        jwks = f"jwks: {{url: {url!r}, ca: ca.pem}}"
        found = read(tmp_path, f"tenants: [{{name: a}}]\njwt: {{issuer: i, {jwks}}}\n")
        assert found.tokens.keys == RemoteKeys(url, "a", port, ca)


REFUSED = [
    ("", "the file is empty"),
    ("tenants: []", "tenants: list at least one tenant"),
    ("[]", "expected a mapping"),
    ("tenant: []", "tenant: unknown key; did you mean 'tenants'?"),
    ("a: [", "not valid YAML"),
    (one("limit: 5"), "tenants[0].limit: unknown key"),
    (one("tokensPerMinute: 0"), "tenants[0].tokensPerMinute: "),
    (one("tokensPerMinute: many"), "tenants[0].tokensPerMinute: expected a whole number"),
    (one("requestsPerMinute: 9999999999"), "tenants[0].requestsPerMinute: "),
    (one("objective: 'A b'"), "tenants[0].objective: "),
    (one("models: [{name: 'a,b', tokensPerMinute: 1}]"), "tenants[0].models[0].name: "),
    (one("models: [{name: m}]"), "tokensPerMinute"),
    (
        one("models: [{name: m, tokensPerMinute: 1}, {name: m, tokensPerMinute: 2}]"),
        "tenants[0].models[1]: has the same model as tenants[0].models[0]",
    ),
    (one("claim: x"), "tenants[0].claim: needs the section jwt"),
    (one("objective: o", keys="[]"), "tenants[0]: give it keys, or the file a section jwt"),
    (one("objective: o", keys="[{}]"), "tenants[0].keys[0]: give one of env, file and value"),
    (one("objective: o", keys="[{env: A, file: b}]"), "give one of env, file and value"),
    (one("objective: o", keys="[{env: UNSET}]"), "tenants[0].keys[0].env: names no key"),
    (one("objective: o", keys="[{file: none}]"), "keys[0]: cannot read none: No such file"),
    (one("objective: o", keys="[{value: short}]"), "keys[0].value: a key has at least 16"),
    (one("objective: o", keys="[{value: 'sk 0123456789abcdef'}]"), "without spaces"),
    (one("objective: o", keys=f"[{{value: {KEY}}}, {{value: {KEY}}}]"), "has the same key as"),
    (f"tenants: [{{name: a, name: b, keys: [{{value: {KEY}}}]}}]", "duplicate key"),
    (
        f"tenants: [{{name: a, keys: [{{value: {KEY}}}]}}, {{name: a, keys: [{{file: key}}]}}]",
        "tenants[1]: has the same name as tenants[0]",
    ),
    (
        f"tenants: [{{name: a, keys: [{{value: {KEY}}}]}}, {{name: b, keys: [{{value: {KEY}}}]}}]",
        "tenants[1].keys[0]: has the same key as tenants[0].keys[0]",
    ),
    (f"tenants: [{{name: a}}, {{name: b, claim: a}}]\n{JWT}", "has the same claim as tenants[0]"),
    (
        f"tenants: [{{name: a, keys: [{{value: eyJhbGciOiJI.eyJzdWIi.sig}}]}}]\n{JWT}",
        "looks like a JSON web token",
    ),
    ("tenants: [{name: a}]\njwt: {issuer: i, jwks: {}}", "jwt.jwks: give file or url"),
    ("tenants: [{name: a}]\njwt: {issuer: i, jwks: {file: key}}", "jwt.jwks.file: is no JWKS"),
    ("tenants: [{name: a}]\njwt: {issuer: i, jwks: {url: 'ftp://x'}}", "is no URL of http"),
    (f"tenants: [{'{name: a}, ' * (MAX_TENANTS + 1)}]", f"at most {MAX_TENANTS}"),
    ("#" * (MAX_BYTES + 1), f"larger than {MAX_BYTES} bytes"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_mistakes_are_named_without_the_keys(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, text)
    shown = str(refused.value)
    assert shown.startswith("--tenants: ")
    assert reason in shown
    assert KEY not in shown
    assert OTHER not in shown


def test_all_mistakes_are_reported_with_their_lines(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, "tenants:\n- name: a\n  keys: [{env: X}]\n- name: a\n  keys: [{env: Y}]\n")
    path = tmp_path / "tenants.yaml"
    lines = [line.removeprefix("--tenants: ") for line in str(refused.value).splitlines()]
    assert [line.split(": ")[:2] for line in lines] == [
        [f"{path}:3:11", "tenants[0].keys[0].env"],
        [f"{path}:4:3", "tenants[1]"],
        [f"{path}:5:11", "tenants[1].keys[0].env"],
    ]


def test_a_missing_file_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "none.yaml")
    assert main(["up", "--engine", "sim", "--tenants", path]) == 2
    assert f"--tenants: cannot read {path}: No such file" in capsys.readouterr().err
    flags = ["--tenants", path, "--trust-control-headers"]
    assert main(["up", "--engine", "sim", *flags]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_the_command_checks_the_file_and_adds_it_to_a_bootstrap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, one("objective: chat"))
    file, base, into = (tmp_path / name for name in ("tenants.yaml", "eds.yaml", "out.yaml"))
    assert main(["tenants", str(file)]) == 0
    assert capsys.readouterr().out == "ok: 1 tenants, 1 keys\n"
    main(["files", "envoy/eds.yaml", "--into", str(tmp_path)])
    given = ["tenants", str(file), "--bootstrap", str(base), "--into", str(into)]
    assert main(given) == 0
    assert into.stat().st_mode & 0o777 == 0o600
    written = yaml.safe_load(into.read_text())
    listener = written["static_resources"]["listeners"][0]
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    assert [one["name"] for one in filters][:3] == [
        "api-keys",
        "tenants",
        "envoy.filters.http.ext_proc",
    ]
    assert main(["tenants", str(file), "--into", str(into)]) == 2
    base.write_text("static_resources: {listeners: []}")
    assert main(given) == 2
    assert "no listener asks a picker" in capsys.readouterr().err
