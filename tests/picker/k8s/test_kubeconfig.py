"""Kubeconfig files: what is wrong with broken ones, proxies, and TLS as they ask for it."""

from __future__ import annotations

import base64
import ssl
import sys
from pathlib import Path
from random import Random

import pytest
from certificates import Authority
from kube_api.server import KubeApi
from kubeconfig_files import Clock, access_of, around, found, kubeconfig

from picker.errors import ConfigError
from picker.k8s.api import PODS, Selection, UnreachableError
from picker.k8s.client import KubernetesClient
from picker.k8s.credentials import Credentials, find_credentials


@pytest.fixture
def clock() -> Clock:
    """A clock."""
    return Clock()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies of the machine that the tests run on are none of theirs."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "it is no mapping"),
        ("{", "not a kubeconfig file"),
        ("[]", "it is no mapping"),
        ("a: \x00", "not a kubeconfig file"),
        ("kind: Config", "no current-context; the files have: none"),
        ("current-context: one", "no context 'one'"),
        ("contexts: 3\ncurrent-context: one", "no context 'one'"),
        ("contexts: [{name: one, context: {cluster: c}}]\ncurrent-context: one", "not usable"),
        (
            "contexts: [{name: one, context: {cluster: c}}]\ncurrent-context: one\n"
            "clusters: [{name: c, cluster: {server: 'https://10.0.0.1', "
            "certificate-authority-data: '!!'}}]",
            "not usable|no certificates",
        ),
        (
            "contexts: [{name: one, context: {cluster: c}}]\ncurrent-context: one\n"
            "clusters: [{name: c, cluster: {server: 'https://10.0.0.1', "
            "certificate-authority: missing.pem}}]",
            "missing.pem",
        ),
        (
            "contexts: [{name: one, context: {cluster: c}}]\ncurrent-context: one\n"
            "clusters: [{name: c, cluster: {server: '10.0.0.1:6443'}}]",
            "begin it with https://",
        ),
        (
            "contexts: [{name: one, context: {cluster: c}}]\ncurrent-context: one\n"
            "clusters: [{name: c, cluster: {server: 'http://a', proxy-url: 'socks5://b'}}]",
            "proxy 'socks5://b' cannot be used",
        ),
        (
            "contexts: [{name: one, context: {cluster: c, user: u}}]\ncurrent-context: one\n"
            "clusters: [{name: c, cluster: {server: 'http://a'}}]\n"
            'users: [{name: u, user: {token: "a\\nb"}}]',
            "exactly one token",
        ),
    ],
)
def test_a_broken_file_is_an_error_that_says_what_is_wrong(
    tmp_path: Path, clock: Clock, text: str, wanted: str
) -> None:
    """Whatever is broken in it."""
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigError, match=wanted):
        found(clock, tmp_path, path)


def test_what_is_missing_is_an_error_that_says_where_it_was_looked_for(
    tmp_path: Path, clock: Clock
) -> None:
    """No configuration, no such file, no such context, a service account without files."""
    with pytest.raises(
        ConfigError, match="give --kubeconfig PATH, set KUBECONFIG, or run in a Pod"
    ):
        found(clock, tmp_path)
    with pytest.raises(ConfigError, match=r"--kubeconfig: there is no such file: .*nowhere"):
        found(clock, tmp_path, tmp_path / "nowhere")
    path = kubeconfig(tmp_path / "config")
    with pytest.raises(ConfigError, match="no context 'two'; the files have: one"):
        found(clock, tmp_path, path, "two")
    listed = around(tmp_path, KUBECONFIG=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="KUBECONFIG: there is no such file"):
        find_credentials(clock=clock, places=listed)
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match="serviceaccount: not usable: Service token file"):
        find_credentials(clock=clock, places=around(tmp_path, **environ))


def test_without_the_extra_it_is_said_how_to_get_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is not needed for anything else."""
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    with pytest.raises(ConfigError, match=r"pip install 'pointsman\[k8s\]'"):
        found(clock, tmp_path, kubeconfig(tmp_path / "config"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("users:\n- name: a\n  user:\n    token: top-secret: x\n", "in line 4, column 22"),
        (
            "contexts: [{name: one, context: {cluster: c}}]\ncurrent-context: one\n"
            "clusters: [{name: c, cluster: {server: 'http://a', "
            "proxy-url: 'socks5://me:top-secret@b'}}]",
            "proxy 'socks5://b' cannot be used",
        ),
        (
            "contexts: [{name: one, context: {cluster: c}}]\ncurrent-context: one\n"
            "clusters: [{name: c, cluster: {server: 'me:top-secret@b'}}]",
            "server 'b' is no address",
        ),
    ],
)
def test_errors_show_no_secrets(tmp_path: Path, clock: Clock, text: str, wanted: str) -> None:
    """They are logged, also while the picker runs."""
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigError, match=wanted) as raised:
        found(clock, tmp_path, path)
    assert "top-secret" not in str(raised.value)


async def test_credentials_are_not_shown_by_accident(tmp_path: Path, clock: Clock) -> None:
    """Neither a token nor the password of a proxy."""
    given = {"server": "http://10.0.0.1", "proxy-url": "http://me:top-secret@proxy:1"}
    access = await access_of(tmp_path, clock, user={"token": "top-secret"}, cluster=given)
    assert access.authorization == "Bearer top-secret"
    assert "top-secret" not in repr(access)


async def test_proxies_are_those_of_the_file_or_of_the_environment(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for servers that `NO_PROXY` names."""
    given = {"server": "http://10.0.0.1", "proxy-url": "http://proxy:1"}
    assert (await access_of(tmp_path, clock, cluster=given)).proxy == "http://proxy:1"
    monkeypatch.setenv("HTTP_PROXY", "http://other:2")
    assert (await access_of(tmp_path, clock)).proxy == "http://other:2"
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    assert (await access_of(tmp_path, clock)).proxy is None


async def listed(credentials: Credentials) -> int:
    """How many Pods the API server shows to who has these."""
    async with KubernetesClient(credentials, rng=Random(1)) as client:
        return len((await client.list(PODS, Selection("default"))).items)


def encoded(path: Path) -> str:
    """A file as `…-data` holds it."""
    return base64.b64encode(path.read_bytes()).decode()


async def test_tls_checks_what_the_file_tells_it_to_check(tmp_path: Path, clock: Clock) -> None:
    """The authority, by file and by data; another name; a client certificate; or nothing at all."""
    authority = Authority(tmp_path)
    served, client = authority.issue("server", "kubernetes"), authority.issue("picker")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.path)
    context.load_cert_chain(served.certificate, served.key)
    context.verify_mode = ssl.CERT_REQUIRED
    api = KubeApi()
    await api.start(context)
    path = tmp_path / "config"
    shown = {"client-certificate": str(client.certificate), "client-key": str(client.key)}
    data = {
        "client-certificate-data": encoded(client.certificate),
        "client-key-data": encoded(client.key),
    }
    by_file = {"server": api.url, "certificate-authority": authority.path.name}
    by_data = {"server": api.url, "certificate-authority-data": encoded(authority.path)}
    name = {"tls-server-name": "kubernetes"}
    try:
        for user, cluster in [
            (shown, by_file | name),
            (data, by_data | name),
            (shown, {"server": api.url, "insecure-skip-tls-verify": True}),
        ]:
            assert await listed(found(clock, tmp_path, kubeconfig(path, user, cluster))) == 0
        for user, cluster in [
            (shown, by_file),  # the certificate is for another name
            (shown, {"server": api.url}),  # nobody vouches for it
            ({}, by_file | name),  # no client certificate
        ]:
            with pytest.raises(UnreachableError):
                await listed(found(clock, tmp_path, kubeconfig(path, user, cluster)))
    finally:
        await api.stop()


def test_a_certificate_that_is_none_is_an_error(tmp_path: Path, clock: Clock) -> None:
    """As are a key that does not fit, and an authority's file without certificates."""
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    cluster = {"server": "https://10.0.0.1", "certificate-authority": str(authority.path)}
    user = {"client-certificate": str(one.certificate), "client-key": str(other.key)}
    with pytest.raises(ConfigError, match="not a client certificate with its key"):
        found(clock, tmp_path, kubeconfig(tmp_path / "config", user, cluster))
    cluster["certificate-authority"] = str(one.key)
    with pytest.raises(ConfigError, match="no certificates of authorities"):
        found(clock, tmp_path, kubeconfig(tmp_path / "config", {}, cluster))
