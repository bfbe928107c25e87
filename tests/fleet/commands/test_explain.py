"""`pointsman explain` describes the outcome of a request, and its reasons, in plain words."""

import io
import json
from datetime import UTC
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from fleet.commands.cli import main
from fleet.commands.explain import ExplainOptions, explain
from fleet.commands.explain_text import Layout, explained
from fleet.commands.top_text import ASCII
from fleet.errors import FleetError
from fleet.http_client import HttpAnswer
from picker.decisions.showing import reasons
from picker.decisions.views import (
    CandidateView,
    FilterView,
    ProfileView,
    RecordSummary,
    RecordView,
    RefusalView,
    ScoreView,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "explain"
URL = "http://picker:9090"


def candidate(name: str, *raw: float, load: int | None = 1) -> CandidateView:
    names = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")
    scores = tuple(
        ScoreView(scorer, float(weight), one, one * weight)
        for (weight, scorer), one in zip(enumerate(names, 1), raw, strict=False)
    )
    return CandidateView(
        name,
        f"10.0.0.{name[-1]}:8000",
        sum(score.weighted for score in scores),
        scores,
        2,
        load,
        load,
        None if load is None else 0.5,
        0.0123,
    )


def profile(*candidates: CandidateView, name: str = "default", **fields: object) -> ProfileView:
    best = candidates[0].total if candidates else 0.0
    known: dict[str, object] = {
        "is_primary": True,
        "picker": "max-score-picker",
        "picked": (candidates[0].endpoint,) if candidates else (),
        "num_candidates": len(candidates),
        "num_scored": len(candidates),
        "num_tied": sum(one.total == best for one in candidates),
        "candidates": candidates,
    }
    return ProfileView(name=name, **(known | fields))  # type: ignore[arg-type]


def record(*profiles: ProfileView, **fields: object) -> RecordView:
    picked = profiles[0].picked[0] if profiles and profiles[0].picked else None
    summary = RecordSummary(
        request_id="7f3a",
        received_unix_seconds=1_800_000_000.25,
        model="chat",
        fairness_id="tenant-a",
        priority=1,
        outcome="completed",
        endpoint=picked,
        status=200,
        queue_seconds=0.012,
        decision_seconds=0.0123,
        ttft_seconds=0.08,
        seconds=1.5,
    )
    known: dict[str, object] = {
        "summary": summary,
        "incoming_model": "chat",
        "target_model": "chat",
        "size_bytes": 2048,
        "destination": None if picked is None else f"10.0.0.{picked[-1]}:8000",
        "profiles": profiles,
    }
    made = RecordView(**(known | fields))  # type: ignore[arg-type]
    return msgspec.structs.replace(made, reasons=tuple(reasons(made)))


WON = record(
    profile(
        candidate("w-2", 0.5, 1.0, 0.9),
        candidate("w-1", 0.9, 1.0, 0.0),
        candidate("w-3", 0.0, 0.25, 0.0, load=None),
        num_candidates=5,
        filters=(FilterView("decode-filter", 5, 3, ("p-1", "p-2")),),
    ),
    target_model="chat-v2",
    rewritten_by="canary",
    objective="interactive",
    prompt_tokens=640,
    cached_tokens=256,
    completion_tokens=96,
    matched_prefix_tokens=320,
    stages={"prefill": "prefix-based-pd-decider said no: the prompt has 3 tokens, fewer than 64"},
)
REFUSED = record(
    profile(
        picker="", num_candidates=2, filters=(FilterView("lora-filter", 2, 0, ("w-1", "w-2")),)
    ),
    refusal=RefusalView(429, "ResourceExhausted", "no endpoints", "rejected-saturated", 3),
    summary=msgspec.structs.replace(
        WON.summary, outcome="refused", status=429, endpoint=None, ttft_seconds=None, seconds=0.5
    ),
)


def printed(view: RecordView, page: Layout | None = None, width: int = 80) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    for part in explained(view, page or Layout(zone=UTC)):
        console.print(part, highlight=False, markup=False)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


@pytest.mark.parametrize(("name", "view"), [("won", WON), ("refused", REFUSED)])
def test_the_text_matches_the_golden_file(name: str, view: RecordView) -> None:
    assert printed(view) == (GOLDEN / f"{name}.out.txt").read_text()
    assert all(len(line) <= 80 for line in printed(view).splitlines())


def test_the_documentation_shows_what_is_printed() -> None:
    document = Path(__file__).parents[3] / "docs" / "explain.md"
    assert f"```text\n{printed(WON)}```" in document.read_text(encoding="utf-8")


def test_an_ascii_terminal_gets_only_ascii() -> None:
    """The lines of tables are excepted: the console replaces them itself."""
    text = printed(WON, Layout(ASCII, UTC))
    assert "0.900x3=2.700" in text
    assert text.replace("─", "-").isascii()


def test_a_score_that_is_no_number_is_a_question_mark() -> None:
    """A scorer may divide by zero; its score then counts 0."""
    odd = msgspec.structs.replace(
        candidate("w-1"), scores=(ScoreView("queue-scorer", 2.0, None, 0.0),)
    )
    assert "?×2=0.000" in printed(record(profile(odd)))


def test_names_from_clients_move_no_cursor_and_are_no_markup() -> None:
    text = printed(record(incoming_model="\x1b[2J[bold]x[/bold]", target_model="y"))
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text


CLEAR = profile(candidate("w-1", 0.5), candidate("w-2", 0.1))
WON_BY = "w-1 won by 0.400 over w-2: queue-scorer gave it 0.400 more."
BY_CHANCE = profile(
    candidate("w-1", 0.75), candidate("w-2", 0.5), picked=("w-2",), picker="random-picker"
)


def ending(outcome: str) -> RecordSummary:
    return msgspec.structs.replace(WON.summary, outcome=outcome)


SENTENCES = {
    "w-1 tied with w-2 at 0.500: chance chose among them.": record(
        profile(candidate("w-1", 0.5), candidate("w-2", 0.5), candidate("w-3", 0.1))
    ),
    "All 2 totals are 0, because no scorer favoured any endpoint: chance chose w-1.": record(
        profile(candidate("w-1", 0.0, 0.0), candidate("w-2", 0.0, 0.0))
    ),
    "No scorer is configured: chance chose w-1.": record(
        profile(candidate("w-1"), candidate("w-2"))
    ),
    "w-1 was the only candidate.": record(profile(candidate("w-1", 0.5))),
    "w-1 was the only candidate that the filters left.": record(
        profile(candidate("w-1", 0.5), num_candidates=4)
    ),
    "random-picker leaves it to chance: it chose w-2, although w-1 had 0.250 more.": record(
        BY_CHANCE
    ),
    "w-1 won by 1.0e-06 over w-2: queue-scorer gave it 1.0e-06 more.": record(
        profile(candidate("w-1", 0.5), candidate("w-2", 0.499999))
    ),
    f"{WON_BY} The proxy says that 10.0.0.2:8000 served it, not a requested endpoint.": record(
        CLEAR, served_by="10.0.0.2:8000"
    ),
    f"{WON_BY} The proxy says that 10.0.0.2:8000 served it, the next in line.": record(
        CLEAR, served_by="10.0.0.2:8000", destination="10.0.0.1:8000,10.0.0.2:8000"
    ),
    "It is not decided yet.": record(summary=ending("waiting")),
    "w-1 was the only candidate. Flow control stopped it in favour of others while it was "
    "under way.": record(profile(candidate("w-1", 0.5)), summary=ending("evicted")),
    "It ended before an endpoint was chosen.": record(),
    "It has no body, so any endpoint will do: chance chose w-1.": record(
        destination="10.0.0.1:8000",
        size_bytes=0,
        summary=msgspec.structs.replace(WON.summary, endpoint="w-1"),
    ),
}


@pytest.mark.parametrize(("sentence", "view"), SENTENCES.items(), ids=SENTENCES)
def test_the_reason_is_a_sentence(sentence: str, view: RecordView) -> None:
    assert " ".join(reasons(view)) == sentence


def test_only_the_best_are_shown_unless_all_are_wanted() -> None:
    many = [candidate(f"w-{index}", index / 20) for index in range(15, 0, -1)]
    view = record(profile(*many, num_scored=40))
    text = printed(view)
    assert "w-6 " in text
    assert "w-5 " not in text
    assert "and 5 more, which --all shows" in text
    assert "and 25 with lower totals, which are not stored" in text
    assert "w-5 " in printed(view, Layout(zone=UTC, limit=None))


def asked(status: int, body: object, **wishes: object) -> tuple[str, str]:
    paths = []

    def fetch(url: str) -> HttpAnswer:
        paths.append(url.removeprefix(URL))
        return HttpAnswer(status, msgspec.json.encode(body))

    file = io.StringIO()
    console = Console(file=file, width=80)
    explain(ExplainOptions(URL, **wishes), console, fetch)  # type: ignore[arg-type]
    return file.getvalue(), paths[0]


def test_the_last_request_or_one_by_its_id_is_asked_for() -> None:
    assert asked(200, WON)[1] == "/decisions/last"
    assert asked(200, WON, request_id="a/b c?")[1] == "/decisions/a%2Fb%20c%3F"
    assert asked(200, WON, request_id="..")[1] == "/decisions/%2E%2E"
    assert asked(200, WON, request_id="\udcff")[1] == "/decisions/%FF"
    with pytest.raises(FleetError, match="not empty"):
        asked(200, WON, request_id="")


def test_json_is_the_whole_record() -> None:
    text, _ = asked(200, WON, as_json=True)
    assert msgspec.json.decode(text, type=RecordView) == WON
    assert "profiles" in json.loads(text)


def test_a_request_that_is_not_known_any_more_is_an_error_with_the_pickers_words() -> None:
    with pytest.raises(FleetError, match="no longer stored"):
        asked(404, {"error": "request 'x' is unknown or no longer stored"}, request_id="x")
    with pytest.raises(FleetError, match="is not this picker"):
        asked(200, {"something": "else"})
    with pytest.raises(FleetError, match="answers 500"):
        asked(500, ["no object"])


def test_a_missing_picker_is_reported_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for arguments in (["--last"], []):
        assert main(["explain", *arguments, "--picker", "http://127.0.0.1:1"]) == 1
        assert "pointsman up" in capsys.readouterr().err
