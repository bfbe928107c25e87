"""Where the way to an API server comes from, and how it is kept up to date."""

from __future__ import annotations

import asyncio
import base64
import threading
from pathlib import Path
from random import Random

import pytest
from certificates import Authority
from kube_api.access import Rule
from kube_api.server import KubeApi
from kubeconfig_files import Clock, Plugin, access_of, around, found, in_minutes, kubeconfig
from wired_client import Accesses

from picker.errors import ConfigError
from picker.k8s.api import PODS, ApiError, Selection
from picker.k8s.client import KubernetesClient
from picker.k8s.credentials import Access, Credentials, find_credentials

ALL = Selection("default")
LIST_PODS = Rule(("",), ("pods",), ("list",))


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


async def test_a_token_is_read(tmp_path: Path, clock: Clock) -> None:
    """And the slash at the end of a server's address does no harm."""
    path = kubeconfig(tmp_path / "config", {"token": "abc"})
    credentials = found(clock, tmp_path, path)
    assert await credentials.access() == Access("http://10.0.0.1:6443", "Bearer abc")


async def test_a_name_and_a_password_are_basic_authentication(tmp_path: Path, clock: Clock) -> None:
    """As the header says it."""
    access = await access_of(tmp_path, clock, user={"username": "u", "password": "p:w"})
    assert access.authorization == "Basic " + base64.b64encode(b"u:p:w").decode()


async def test_a_user_without_credentials_sends_none(tmp_path: Path, clock: Clock) -> None:
    """Some servers ask for none; the default namespace is `default`."""
    access = await access_of(tmp_path, clock)
    assert access.authorization is None


async def test_the_first_of_several_files_wins(tmp_path: Path, clock: Clock) -> None:
    """Of `KUBECONFIG`: its current context, and for each name what the first file says; files that
    are not there are passed over.
    """
    first = kubeconfig(tmp_path / "first", {"token": "first"}, name="a", current="b")
    second = kubeconfig(tmp_path / "second", {"token": "second"}, name="b", current="a")
    listed = f"{tmp_path / 'missing'}:{first}::{second}"
    places = around(tmp_path, KUBECONFIG=listed, KUBERNETES_SERVICE_HOST="10.0.0.9")
    current = find_credentials(clock=clock, places=places)
    assert (await current.access()).authorization == "Bearer second"
    other = find_credentials(context="a", clock=clock, places=places)
    assert (await other.access()).authorization == "Bearer first"
    named = find_credentials(str(first), "a", clock=clock, places=places)
    assert (await named.access()).authorization == "Bearer first"


def service_account(home: Path, authority: Authority, token: str) -> Path:
    """The files that Kubernetes puts into a Pod."""
    folder = home / "serviceaccount"
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(token + "\n")
    (folder / "ca.crt").write_bytes(authority.path.read_bytes())
    return folder


async def test_a_pod_uses_its_service_account_and_sees_its_token_change(
    tmp_path: Path, clock: Clock
) -> None:
    """The file is read again every minute, and the TLS context stays while the authority does."""
    authority = Authority(tmp_path)
    service_account(tmp_path, authority, "old")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    places = around(tmp_path, **environ)
    kubeconfig_of_home = tmp_path / ".kube"
    kubeconfig_of_home.mkdir()
    kubeconfig(kubeconfig_of_home / "config")
    credentials = find_credentials(clock=clock, places=places)
    before = await credentials.access()
    assert before.url == "https://[fd00::1]:443"
    assert before.authorization == "Bearer old"
    service_account(tmp_path, authority, "new")
    clock.now += 59
    assert await credentials.access() is before
    clock.now += 1
    after = await credentials.access()
    assert after.authorization == "Bearer new"
    assert after.tls is before.tls
    clock.now += 60
    assert await credentials.access() is after


async def test_the_file_at_home_is_the_last_resort(tmp_path: Path, clock: Clock) -> None:
    """Outside a Pod, without flag and variable."""
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube" / "config", {"token": "home"})
    assert (await found(clock, tmp_path).access()).authorization == "Bearer home"


async def test_files_with_tokens_are_read_again(tmp_path: Path, clock: Clock) -> None:
    """A `tokenFile`, and the kubeconfig file itself."""
    token = tmp_path / "token"
    token.write_text("one\n")
    path = kubeconfig(tmp_path / "config", {"tokenFile": "token"})
    credentials = found(clock, tmp_path, path)
    assert (await credentials.access()).authorization == "Bearer one"
    token.write_text("two\n")
    clock.now += 60
    assert (await credentials.access()).authorization == "Bearer two"
    kubeconfig(path, {"token": "three"})
    assert (await credentials.renewed(await credentials.access())).authorization == "Bearer three"


@pytest.mark.parametrize("text", ["", "\n", None])
async def test_a_token_file_without_a_token_changes_nothing(
    tmp_path: Path, clock: Clock, text: str | None
) -> None:
    """As while it is being written: nobody asks without a token meanwhile."""
    token = tmp_path / "token"
    token.write_text("one")
    path = kubeconfig(tmp_path / "config", {"tokenFile": "token"})
    credentials = found(clock, tmp_path, path)
    if text is None:
        token.unlink()
    else:
        token.write_text(text)
    clock.now += 60
    access = await credentials.access()
    assert (await credentials.renewed(access)).authorization == "Bearer one"
    with pytest.raises(ConfigError, match="token"):
        found(clock, tmp_path, path)
    token.write_text("two")
    clock.now += 60
    assert (await credentials.access()).authorization == "Bearer two"


async def test_a_plugin_runs_again_only_when_its_token_expires(
    tmp_path: Path, clock: Clock
) -> None:
    """Or when the server does not take the token, at most once in ten seconds."""
    plugin = Plugin(tmp_path, in_minutes(60))
    credentials = found(clock, tmp_path, kubeconfig(tmp_path / "config", plugin.user))
    first = await credentials.access()
    for _ in range(5):
        clock.now += 60
        assert await credentials.access() is first
    assert plugin.runs == 1
    second = await credentials.renewed(first)
    assert (second.authorization, plugin.runs) == ("Bearer token-2", 2)
    assert await credentials.renewed(first) is second
    assert await credentials.renewed(second) is second
    clock.now += 10
    assert (await credentials.renewed(second)).authorization == "Bearer token-3"


async def test_a_token_that_is_about_to_expire_is_replaced(tmp_path: Path, clock: Clock) -> None:
    """Without the server having refused it."""
    plugin = Plugin(tmp_path, in_minutes(1))
    credentials = found(clock, tmp_path, kubeconfig(tmp_path / "config", plugin.user))
    before = await credentials.access()
    clock.now += 60
    after = await credentials.access()
    assert after.authorization != before.authorization
    assert plugin.runs >= 2


async def test_a_plugin_that_fails_later_leaves_the_old_token_in_use(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and tried again."""
    plugin = Plugin(tmp_path, failing=(2,))
    credentials = found(clock, tmp_path, kubeconfig(tmp_path / "config", plugin.user))
    first = await credentials.access()
    assert await credentials.renewed(first) is first
    assert "are not read again" in caplog.text
    clock.now += 10
    assert (await credentials.renewed(first)).authorization == "Bearer token-3"


def test_a_plugin_that_fails_at_the_start_is_an_error(tmp_path: Path, clock: Clock) -> None:
    """It names the plugin."""
    plugin = Plugin(tmp_path, failing=(1, 2))
    path = kubeconfig(tmp_path / "config", plugin.user)
    with pytest.raises(ConfigError, match=r"plugin '.*python.*' .* gave no credentials"):
        found(clock, tmp_path, path)


async def listed(credentials: Credentials) -> int:
    """How many Pods the API server shows to who has these."""
    async with KubernetesClient(credentials, rng=Random(1)) as client:
        return len((await client.list(PODS, ALL)).items)


async def test_a_token_that_was_replaced_on_disk_is_found_when_it_is_refused(
    tmp_path: Path, clock: Clock
) -> None:
    """The request succeeds, though the minute is not over."""
    api = KubeApi()
    await api.start()
    try:
        api.access.grant("new", "picker", [LIST_PODS])
        path = kubeconfig(tmp_path / "config", {"token": "old"}, {"server": api.url})
        credentials = found(clock, tmp_path, path)
        with pytest.raises(ApiError, match="401"):
            await listed(credentials)
        kubeconfig(path, {"token": "new"}, {"server": api.url})
        clock.now += 10
        assert await listed(credentials) == 0
    finally:
        await api.stop()


async def test_all_who_wait_share_one_reading(clock: Clock) -> None:
    """Of ten requests that are refused at once, one renews."""
    old, new = Access("http://a", "Bearer old"), Access("http://a", "Bearer new")
    source = Accesses(old, new, Access("http://a", "Bearer too new"))
    credentials = Credentials(source, clock)
    renewed = await asyncio.gather(*(credentials.renewed(old) for _ in range(10)))
    assert renewed == [new] * 10
    assert source.loads == [False, True]


class Held(Accesses):
    """A source that after its first load takes its time, until it may `go_on`."""

    def __init__(self, *accesses: Access) -> None:
        super().__init__(*accesses)
        self.go_on = threading.Event()

    def load(self, *, anew: bool) -> Access:
        """The next one, see `Accesses`."""
        if self.loads:
            self.go_on.wait(60)
        return super().load(anew=anew)


async def test_reading_does_not_block_the_event_loop(clock: Clock) -> None:
    """A source that takes its time keeps only those waiting who need it."""
    first, second = Access("http://a"), Access("http://b")
    source = Held(first, second)
    credentials = Credentials(source, clock)
    clock.now += 60
    waiting = asyncio.create_task(credentials.access())
    await asyncio.sleep(0)
    assert not waiting.done()
    source.go_on.set()
    assert await waiting == second


async def test_a_source_that_hangs_leaves_the_old_credentials_in_use(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """One request waits, and only for so long; the next ones do not."""
    source = Held(Access("http://a"), Access("http://b"))
    credentials = Credentials(source, clock, timeout_seconds=0.05)
    before = await credentials.access()
    clock.now += 60
    try:
        assert await credentials.access() is before
        assert await credentials.access() is before
        assert caplog.text.count("not read again in time") == 1
    finally:
        source.go_on.set()
