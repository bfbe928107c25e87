"""Commands whose address is that of a picker of several pools."""

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rich.console import Console

from fleet.command_lines import parser_of
from fleet.commands.explain import ExplainOptions, explain
from fleet.commands.top import top
from fleet.doctor.command import WRONG, doctor_command
from fleet.errors import FleetError
from fleet.http_client import Fetch, HttpAnswer
from fleet.picker_views import PickerViews
from fleet.several_pools import (
    PoolAddress,
    SeveralPoolsError,
    list_of,
    pools_of,
    refuse_several,
    which_to_name,
)
from tests.support.fleet.terminal import LIMIT_SECONDS, terminal
from tests.support.picker.pools_port import whole_pools
from tests.support.picker.pools_scene import SeveralPools

POOLS = {"here/qwen": {"one": 1}, "there/qwen": {"two": 2}, "here/llama": {"three": 3}}
KEYS = ("here/qwen", "there/qwen", "llama")
ROOT = "http://picker:9090"


@pytest.fixture
async def whole(tmp_path: Path) -> AsyncIterator[SeveralPools]:
    """A picker of three pools; one request was for `there/qwen`, and a later one for `llama`."""
    async with whole_pools(tmp_path, POOLS) as one:
        await one.ask("there/qwen", "r-1")
        await one.ask("llama", "r-2")
        yield one


def _addresses(url: str) -> str:
    return ", ".join(f"--picker {url}/pools/{key}" for key in KEYS)


async def _printed(command: Callable[[Console], object]) -> str:
    file = io.StringIO()
    await asyncio.to_thread(command, Console(file=file, width=100, color_system=None))
    return file.getvalue()


async def _explained(url: str, request_id: str | None, **wishes: bool) -> str:
    options = ExplainOptions(url, request_id, **wishes)
    return await _printed(lambda console: explain(options, console))


async def _topped(url: str) -> str:
    return await _printed(lambda console: top(url, console, sys.stdin, once=True))


async def _diagnosed(url: str) -> tuple[int, str]:
    lines: list[str] = []
    given = parser_of("doctor").parse_args(["--picker", url])
    status = await asyncio.to_thread(doctor_command, given, {}, lines.append)
    return status, " ".join(" ".join(lines).split())


async def test_each_command_takes_the_address_of_a_pool(whole: SeveralPools) -> None:
    url = f"{whole.url}/pools/there/qwen"
    shown = await _topped(url)
    assert "0 of 1 endpoints usable" in shown  # no picker has answered yet
    assert "two" in shown
    assert "one" not in shown.split()
    text = await _explained(url, "r-1")
    assert text.startswith("request r-1: ")
    assert "127.0.0.1:2" in text
    status, found = await _diagnosed(url)
    assert status == WRONG  # no server is at port 2
    assert "default/two" in found
    assert "default/one" not in found
    assert "name one of them" not in found


@pytest.mark.parametrize(
    ("path", "words"),
    [("", "it serves several pools"), ("/pools/nobody", "it serves no such pool")],
)
async def test_top_and_doctor_say_which_addresses_there_are(
    whole: SeveralPools, path: str, words: str
) -> None:
    url = f"{whole.url}{path}"
    message = f"{url}: {words}; name one of them: {_addresses(whole.url)}"
    with pytest.raises(SeveralPoolsError) as caught:
        await _topped(url)
    assert str(caught.value) == message
    status, found = await _diagnosed(url)
    assert status == WRONG
    assert message in found.replace("- ", "-")


async def test_top_does_not_wait_for_a_picker_to_become_another(whole: SeveralPools) -> None:
    """In a terminal it would wait for a picker that does not answer."""
    async with terminal(
        "-m", "fleet.commands.cli", "top", "--picker", whole.url, columns=300
    ) as screen:
        assert await asyncio.wait_for(screen.process.wait(), LIMIT_SECONDS) == 1
        await screen.until(lambda output: _addresses(whole.url) in output)
        assert "Traceback" not in screen.output
        assert screen.output.rindex("\x1b[?1049l") < screen.output.index("name one of them")


async def test_explain_finds_a_request_in_whichever_pool_it_is(whole: SeveralPools) -> None:
    for request_id, key in (("r-1", "there/qwen"), ("r-2", "llama"), (None, "llama")):
        text = await _explained(whole.url, request_id)
        first, second = text.splitlines()[:2]
        assert first == f"pool {key} ({whole.url}/pools/{key})"
        assert second.startswith(f"request {request_id or 'r-2'}: ")
    record = json.loads(await _explained(whole.url, "r-1", as_json=True))
    assert record["summary"]["request_id"] == "r-1"


async def test_the_newest_of_two_requests_with_the_same_id_is_shown(whole: SeveralPools) -> None:
    await whole.ask("here/qwen", "r-1")
    lines = (await _explained(whole.url, "r-1")).splitlines()
    here, there = (f"{key} ({whole.url}/pools/{key})" for key in KEYS[:2])
    assert lines[:2] == [f"pool {here}", f"also known to pool {there}"]
    assert "127.0.0.1:1" in "".join(lines)
    assert "127.0.0.1:2" not in "".join(lines)


async def test_explain_says_that_no_pool_knows_of_a_request(whole: SeveralPools) -> None:
    with pytest.raises(FleetError) as caught:
        await _explained(whole.url, "r/3")
    names = ", ".join(KEYS)
    assert str(caught.value) == f"none of the pools {names} knows of request 'r/3', or not any more"
    with pytest.raises(FleetError) as caught:
        await _explained(f"{whole.url}/pools/llama", "r-1")
    assert str(caught.value) == "request 'r-1' is unknown or no longer stored"
    with pytest.raises(FleetError) as caught:
        await _explained(f"{whole.url}/pools/nobody", "r-1")
    assert str(caught.value).endswith(
        f"it serves no such pool; name one of them: {_addresses(whole.url)}"
    )


async def test_explain_says_that_there_was_no_request_yet(tmp_path: Path) -> None:
    async with whole_pools(tmp_path, POOLS) as idle:
        with pytest.raises(FleetError, match="had a request yet"):
            await _explained(idle.url, None)


def _answers(**of_pools: HttpAnswer) -> Fetch:
    listed = [{"name": name, "path": f"/pools/{name}/", "ready": True} for name in of_pools]

    def fetch(url: str) -> HttpAnswer:
        path = url.removeprefix(ROOT)
        if path == "/pools":
            return HttpAnswer(200, json.dumps({"pools": listed}).encode())
        parts = path.split("/")
        return of_pools[parts[2]] if parts[1] == "pools" else HttpAnswer(404, b"{}")

    return fetch


def test_errors_of_a_pool_matter_if_no_other_knows() -> None:
    lost = HttpAnswer(404, b'{"error": "nothing is known"}')
    broken = HttpAnswer(500, b'{"error": "the log says why"}')
    with pytest.raises(FleetError, match=r"^the log says why$"):
        explain(ExplainOptions(ROOT, "x"), Console(file=io.StringIO()), _answers(a=broken, b=lost))
    with pytest.raises(FleetError, match=r"^none of the pools a, b knows"):
        explain(ExplainOptions(ROOT, "x"), Console(file=io.StringIO()), _answers(a=lost, b=lost))


def test_addresses_are_made_of_the_one_that_was_named() -> None:
    content = b'{"pools": [{"name": "a/b", "path": "/pools/a/b/", "ready": false}]}'
    for root in (ROOT, "https://gateway/some/place"):
        for url in (root, f"{root}/pools/x", f"{root}/pools"):
            assert list_of(url) == f"{root}/pools"
            assert pools_of(url, content) == (PoolAddress("a/b", f"{root}/pools/a/b"),)


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"pools": 7}', b'{"error": "no"}'])
def test_another_page_is_no_list_of_pools(content: bytes) -> None:
    assert pools_of(ROOT, content) == ()
    assert which_to_name(ROOT, ()) is None
    refuse_several(ROOT, lambda _: content)
    refuse_several(ROOT, lambda _: None)


def test_a_pool_that_is_there_is_not_refused() -> None:
    """If one of its pages is missing, the page's own words are shown."""
    content = b'{"pools": [{"name": "a", "path": "/pools/a/", "ready": true}]}'
    refuse_several(f"{ROOT}/pools/a", lambda _: content)
    with pytest.raises(SeveralPoolsError):
        refuse_several(f"{ROOT}/pools/b", lambda _: content)
    views = PickerViews(f"{ROOT}/pools/a", _answers(a=HttpAnswer(404, b"")))
    with pytest.raises(FleetError, match=r"answers 404$"):
        views.look(1, 1)
