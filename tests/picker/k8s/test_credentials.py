"""Access to an API server: sources, renewal, errors of broken kubeconfig files, and TLS."""

import asyncio
import base64
import ssl
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from picker.errors import ConfigError
from picker.k8s.api import PODS, ApiError, Selection, UnreachableError
from picker.k8s.client import KubernetesClient
from picker.k8s.credentials import Access, Credentials, Places, find_credentials
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.server import KubeApi
from tests.support.certificates import Authority
from tests.support.kube.wired_client import Accesses


class Home:
    """A home directory with kubeconfig files, and a clock that advances only when it is set."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 1000.0

    def clock(self) -> float:
        return self.now

    def config(
        self,
        user: dict[str, Any] | None = None,
        cluster: dict[str, Any] | None = None,
        *,
        file: str = "config",
        name: str = "one",
        current: str | None = "one",
    ) -> Path:
        context = {"cluster": name, "user": name}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster or {"server": "http://10.0.0.1:6443/"}}],
            "contexts": [{"name": name, "context": context}],
            "users": [{"name": name, "user": user or {}}],
        }
        if current is not None:
            document["current-context"] = current
        path = self.folder / file
        path.write_text(yaml.safe_dump(document))
        return path

    def found(
        self, path: Path | str = "", context: str | None = None, **environ: str
    ) -> Credentials:
        places = Places(environ, self.folder, self.folder / "serviceaccount")
        return find_credentials(str(path), context, clock=self.clock, places=places)

    async def access(self, **given: Any) -> Access:
        return await self.found(self.config(**given)).access()


PLUGIN = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
if number in map(int, sys.argv[3:]):
    sys.exit("no luck today")
status = {"token": f"token-{number}"}
if sys.argv[2] != "never":
    status["expirationTimestamp"] = sys.argv[2]
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1",
                  "kind": "ExecCredential", "status": status}))
"""


class Plugin:
    def __init__(self, folder: Path, expires: str = "never", failing: tuple[int, ...] = ()) -> None:
        script, self._count = folder / "plugin.py", folder / "count"
        script.write_text(PLUGIN)
        arguments = [script, self._count, expires, *failing]
        self.user = {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": sys.executable,
                "args": [str(one) for one in arguments],
            }
        }

    @property
    def runs(self) -> int:
        return int(self._count.read_text()) if self._count.exists() else 0


def in_minutes(minutes: float) -> str:
    return (datetime.now(UTC) + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")


ALL = Selection("default")
LIST_PODS = Rule(("",), ("pods",), ("list",))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxies of the test machine must not affect the tests."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


async def test_a_token_is_read(home: Home) -> None:
    credentials = home.found(home.config({"token": "abc"}))
    assert await credentials.access() == Access("http://10.0.0.1:6443", "Bearer abc")


async def test_a_name_and_a_password_are_basic_authentication(home: Home) -> None:
    access = await home.access(user={"username": "u", "password": "p:w"})
    assert access.authorization == "Basic " + base64.b64encode(b"u:p:w").decode()


async def test_a_user_without_credentials_sends_none(home: Home) -> None:
    access = await home.access()
    assert access.authorization is None


async def test_the_first_of_several_files_wins(home: Home) -> None:
    first = home.config({"token": "first"}, file="first", name="a", current="b")
    second = home.config({"token": "second"}, file="second", name="b", current="a")
    listed = f"{home.folder / 'missing'}:{first}::{second}"
    environ = {"KUBECONFIG": listed, "KUBERNETES_SERVICE_HOST": "10.0.0.9"}
    for path, context, token in (("", None, "second"), ("", "a", "first"), (first, "a", "first")):
        found = await home.found(path, context, **environ).access()
        assert found.authorization == f"Bearer {token}"


def service_account(home: Path, authority: Authority, token: str) -> Path:
    folder = home / "serviceaccount"
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(token + "\n")
    (folder / "ca.crt").write_bytes(authority.path.read_bytes())
    return folder


async def test_a_pod_uses_its_service_account_and_sees_its_token_change(home: Home) -> None:
    authority = Authority(home.folder)
    service_account(home.folder, authority, "old")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    (home.folder / ".kube").mkdir()
    home.config(file=".kube/config")
    credentials = home.found(**environ)
    before = await credentials.access()
    assert before.url == "https://[fd00::1]:443"
    assert before.authorization == "Bearer old"
    service_account(home.folder, authority, "new")
    home.now += 59
    assert await credentials.access() is before
    home.now += 1
    after = await credentials.access()
    assert after.authorization == "Bearer new"
    assert after.tls is before.tls
    home.now += 60
    assert await credentials.access() is after


async def test_the_file_in_the_home_directory_is_the_last_resort(home: Home) -> None:
    (home.folder / ".kube").mkdir()
    home.config({"token": "home"}, file=".kube/config")
    assert (await home.found().access()).authorization == "Bearer home"


async def test_files_with_tokens_are_read_again(home: Home) -> None:
    token = home.folder / "token"
    token.write_text("one\n")
    credentials = home.found(home.config({"tokenFile": "token"}))
    assert (await credentials.access()).authorization == "Bearer one"
    token.write_text("two\n")
    home.now += 60
    assert (await credentials.access()).authorization == "Bearer two"
    home.config({"token": "three"})
    assert (await credentials.renewed(await credentials.access())).authorization == "Bearer three"


@pytest.mark.parametrize("text", ["", "\n", None])
async def test_a_token_file_without_a_token_changes_nothing(home: Home, text: str | None) -> None:
    """A file is empty while it is being written; the last token stays in use meanwhile."""
    token = home.folder / "token"
    token.write_text("one")
    credentials = home.found(home.config({"tokenFile": "token"}))
    if text is None:
        token.unlink()
    else:
        token.write_text(text)
    home.now += 60
    access = await credentials.access()
    assert (await credentials.renewed(access)).authorization == "Bearer one"
    with pytest.raises(ConfigError, match="token"):
        home.found(home.config({"tokenFile": "token"}))
    token.write_text("two")
    home.now += 60
    assert (await credentials.access()).authorization == "Bearer two"


async def test_a_plugin_runs_again_only_when_its_token_expires(home: Home) -> None:
    plugin = Plugin(home.folder, in_minutes(60))
    credentials = home.found(home.config(plugin.user))
    first = await credentials.access()
    for _ in range(5):
        home.now += 60
        assert await credentials.access() is first
    assert plugin.runs == 1
    second = await credentials.renewed(first)
    assert (second.authorization, plugin.runs) == ("Bearer token-2", 2)
    assert await credentials.renewed(first) is second
    assert await credentials.renewed(second) is second
    home.now += 10
    assert (await credentials.renewed(second)).authorization == "Bearer token-3"


async def test_a_token_that_is_about_to_expire_is_replaced(home: Home) -> None:
    plugin = Plugin(home.folder, in_minutes(1))
    credentials = home.found(home.config(plugin.user))
    before = await credentials.access()
    home.now += 60
    after = await credentials.access()
    assert after.authorization != before.authorization
    assert plugin.runs >= 2


async def test_a_plugin_that_fails_later_leaves_the_old_token_in_use(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = Plugin(home.folder, failing=(2,))
    credentials = home.found(home.config(plugin.user))
    first = await credentials.access()
    assert await credentials.renewed(first) is first
    assert "are not read again" in caplog.text
    home.now += 10
    assert (await credentials.renewed(first)).authorization == "Bearer token-3"


def test_a_plugin_that_fails_at_the_start_is_an_error(home: Home) -> None:
    plugin = Plugin(home.folder, failing=(1, 2))
    path = home.config(plugin.user)
    with pytest.raises(ConfigError, match=r"plugin '.*python.*' .* gave no credentials"):
        home.found(path)


async def listed(credentials: Credentials) -> int:
    async with KubernetesClient(credentials, rng=Random(1)) as client:
        return len((await client.list(PODS, ALL)).items)


async def test_a_token_that_was_replaced_on_disk_is_found_when_it_is_refused(home: Home) -> None:
    api = KubeApi()
    await api.start()
    try:
        api.access.grant("new", "picker", [LIST_PODS])
        credentials = home.found(home.config({"token": "old"}, {"server": api.url}))
        with pytest.raises(ApiError, match="401"):
            await listed(credentials)
        home.config({"token": "new"}, {"server": api.url})
        home.now += 10
        assert await listed(credentials) == 0
    finally:
        await api.stop()


async def test_all_waiting_requests_share_one_renewal(home: Home) -> None:
    old, new = Access("http://a", "Bearer old"), Access("http://a", "Bearer new")
    source = Accesses(old, new, Access("http://a", "Bearer too new"))
    credentials = Credentials(source, home.clock)
    renewed = await asyncio.gather(*(credentials.renewed(old) for _ in range(10)))
    assert renewed == [new] * 10
    assert source.loads == [False, True]


class Held(Accesses):
    def __init__(self, *accesses: Access) -> None:
        super().__init__(*accesses)
        self.go_on = threading.Event()

    def load(self, *, anew: bool) -> Access:
        if self.loads:
            self.go_on.wait(60)
        return super().load(anew=anew)


async def test_reading_does_not_block_the_event_loop(home: Home) -> None:
    first, second = Access("http://a"), Access("http://b")
    source = Held(first, second)
    credentials = Credentials(source, home.clock)
    home.now += 60
    waiting = asyncio.create_task(credentials.access())
    await asyncio.sleep(0)
    assert not waiting.done()
    source.go_on.set()
    assert await waiting == second


async def test_a_source_that_hangs_leaves_the_old_credentials_in_use(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    source = Held(Access("http://a"), Access("http://b"))
    credentials = Credentials(source, home.clock, timeout_seconds=0.05)
    before = await credentials.access()
    home.now += 60
    try:
        assert await credentials.access() is before
        assert await credentials.access() is before
        assert caplog.text.count("not read again in time") == 1
    finally:
        source.go_on.set()


# Kubeconfig files


ONE = "contexts: [{name: one, context: {cluster: c}}]\ncurrent-context: one\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "it is not a mapping"),
        ("{", "not a kubeconfig file"),
        ("[]", "it is not a mapping"),
        ("a: \x00", "not a kubeconfig file"),
        ("kind: Config", "no current-context; the files have: none"),
        ("current-context: one", "no context 'one'"),
        ("contexts: 3\ncurrent-context: one", "no context 'one'"),
        ("contexts: [{name: one, context: {cluster: c}}]\ncurrent-context: one", "not usable"),
        (
            ONE + "clusters: [{name: c, cluster: {server: 'https://10.0.0.1', "
            "certificate-authority-data: '!!'}}]",
            "not usable|no certificates",
        ),
        (
            ONE + "clusters: [{name: c, cluster: {server: 'https://10.0.0.1', "
            "certificate-authority: missing.pem}}]",
            "missing.pem",
        ),
        (
            ONE + "clusters: [{name: c, cluster: {server: '10.0.0.1:6443'}}]",
            "begin it with https://",
        ),
        (
            ONE + "clusters: [{name: c, cluster: {server: 'http://a', proxy-url: 'socks5://b'}}]",
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
    home: Home, text: str, wanted: str
) -> None:
    path = home.folder / "config"
    path.write_text(text)
    with pytest.raises(ConfigError, match=wanted):
        home.found(path)


def test_the_error_about_a_missing_entry_names_the_files_searched(home: Home) -> None:
    with pytest.raises(
        ConfigError, match="give --kubeconfig PATH, set KUBECONFIG, or run in a Pod"
    ):
        home.found()
    with pytest.raises(ConfigError, match=r"--kubeconfig: there is no such file: .*nowhere"):
        home.found(home.folder / "nowhere")
    path = home.config()
    with pytest.raises(ConfigError, match="no context 'two'; the files have: one"):
        home.found(path, "two")
    with pytest.raises(ConfigError, match="KUBECONFIG: there is no such file"):
        home.found(KUBECONFIG=str(home.folder / "gone"))
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match="serviceaccount: not usable: Service token file"):
        home.found(**environ)


def test_the_error_without_the_extra_names_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not needed for anything else."""
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    with pytest.raises(ConfigError, match=r"in a clone, pip install '\.\[k8s\]'"):
        home.found(home.config())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("users:\n- name: a\n  user:\n    token: top-secret: x\n", "in line 4, column 22"),
        (
            ONE + "clusters: [{name: c, cluster: {server: 'http://a', "
            "proxy-url: 'socks5://me:top-secret@b'}}]",
            "proxy 'socks5://b' cannot be used",
        ),
        (
            ONE + "clusters: [{name: c, cluster: {server: 'me:top-secret@b'}}]",
            "server 'b' is not an address",
        ),
    ],
)
def test_errors_show_no_secrets(home: Home, text: str, wanted: str) -> None:
    """Errors are logged, also while the picker runs."""
    path = home.folder / "config"
    path.write_text(text)
    with pytest.raises(ConfigError, match=wanted) as raised:
        home.found(path)
    assert "top-secret" not in str(raised.value)


async def test_credentials_are_not_shown_by_accident(home: Home) -> None:
    given = {"server": "http://10.0.0.1", "proxy-url": "http://me:top-secret@proxy:1"}
    access = await home.access(user={"token": "top-secret"}, cluster=given)
    assert access.authorization == "Bearer top-secret"
    assert "top-secret" not in repr(access)


async def test_proxies_are_those_of_the_file_or_of_the_environment(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"server": "http://10.0.0.1", "proxy-url": "http://proxy:1"}
    assert (await home.access(cluster=given)).proxy == "http://proxy:1"
    monkeypatch.setenv("HTTP_PROXY", "http://other:2")
    assert (await home.access()).proxy == "http://other:2"
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    assert (await home.access()).proxy is None


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


async def test_tls_verifies_as_the_file_demands(home: Home) -> None:
    authority = Authority(home.folder)
    served, client = authority.issue("server", "kubernetes"), authority.issue("picker")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.path)
    context.load_cert_chain(served.certificate, served.key)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as the picker verifies, on any Python
    context.verify_mode = ssl.CERT_REQUIRED
    api = KubeApi()
    await api.start(context)
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
            assert await listed(home.found(home.config(user, cluster))) == 0
        for user, cluster in [
            (shown, by_file),  # the certificate is for another name
            (shown, {"server": api.url}),  # no authority vouches for it
            ({}, by_file | name),  # no client certificate
        ]:
            with pytest.raises(UnreachableError):
                await listed(home.found(home.config(user, cluster)))
    finally:
        await api.stop()


def test_an_unreadable_certificate_is_an_error(home: Home) -> None:
    authority = Authority(home.folder)
    one, other = authority.issue("one"), authority.issue("other")
    cluster = {"server": "https://10.0.0.1", "certificate-authority": str(authority.path)}
    user = {"client-certificate": str(one.certificate), "client-key": str(other.key)}
    with pytest.raises(ConfigError, match="not a client certificate with its key"):
        home.found(home.config(user, cluster))
    cluster["certificate-authority"] = str(one.key)
    with pytest.raises(ConfigError, match="no certificates of authorities"):
        home.found(home.config({}, cluster))
