"""Every figure of README and docs is that of a record: marks agree and name their record, and no figure has none."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.lib.record import RECORDS
from docs import figures
from docs.figures import FIGURES, FigureError, is_dirty, middle, percent, secs, share_of, signed, span, text_of
from docs.make_results import PAGE
from docs.marks import ROOT, marks, pages, prose, rewritten, sections

_UNIT = r"%|x|ms|us|s|min|h|times|percent|seconds|minutes|hours|[KMGT]i?B|bytes|(?:requests|req|tokens|tok)/s"
_WORDS = "half|two|three|four|five|six|seven|eight|nine|ten|twelve|fifteen|twenty|thirty|forty|fifty|sixty|hundred"
_FIGURE = re.compile(
    rf"(?<![\w.])[-+]?\d[\d,.]*\s?(?:{_UNIT})(?!\w)"
    r"|(?<![\w.-])\d+\.\d+(?![\w.])|\d{1,3},\d{3}|\d+ of (?:the )?\d+"
    rf"|\b(?:{_WORDS})\s(?:{_UNIT})(?!\w)"
)
"""A number with a unit, with a fraction, with thousands, or out of another one."""

# Numbers that are no measurement. Code and what commands print are not looked at: they are examples of a form.
ALLOWED = {
    "README.md": {
        "at most 11.5 s for an output": "the bound, an input",
        "95 % intervals": "the confidence",
        "Python 3.11 or newer": "a version",
        "52.5, 14.7 and 15.0 % on its dense runs": "the source's own figures",
    },
    "docs/how-to/calibrate.md": {
        "52.5, 14.7 and 15.0 % on its dense runs": "the source's own figures",
        "at seven times: of two earlier forms": "the protocol",
    },
    "benchmarks/README.md": {
        "ExeGPT section 5.2": "a section",
        "to four times as many": "the range of a sweep",
    },
    "docs/how-to/serve-in-production.md": {
        "more than 1.5 times as long": "a limit",
        "256 KiB of the kernel, 64 KiB of the server and 16,384 tokens": "limits",
        "reads nothing for 30 s": "a limit",
        "for its turn, at most 10 s": "a limit",
        "at most 4,096": "a limit",
        "TLS 1.2 and newer; a handshake has 10 s": "a version and a limit",
    },
    "docs/how-to/other-engines.md": {
        "vLLM 0.31 to 0.33": "versions",
        "before 0.33": "a version",
        "1.3 times or more apart": "a constant of the code",
        "LMDeploy 0.18": "a version",
        "Inference 3.0 to 3.3": "versions",
        " (1.1) take": "a version",
        "1 ms and 5 us a row": "inputs, from the datasheets",
    },
    "docs/reference/http.md": {
        "A schema may have 64 KiB and a regex 16,384 characters": "limits",
        "at most 262,144": "a limit",
        "more than 50 ms to compile": "a limit",
        "Qwen 2.5": "a model",
        "Llama 3.1 to 3.3": "models",
        "up to Small 3.1": "a model",
        "from Small 3.2": "a model",
        "GLM 4.5, 4.6": "models",
    },
    "docs/findings.md": {
        "Intervals in brackets hold 95 %": "the confidence",
        "10,000 requests through": "an input",
        "Llama-3.1-8B": "a model",
        "ten minutes at five times the planned rate": "inputs",
        "was made five times while": "the protocol",
        "intervals of 90 %": "the confidence",
        "bound of 3 s": "an input",
    },
    "docs/how-to/several-hosts.md": {
        "after three seconds": "a constant of the code",
        "(60 s)": "the default of an option",
        "within ten seconds": "a constant of the code",
    },
    "docs/reference/bounds.md": {
        "at least 99 % of the requests": "the value of an option",
        "until exactly 99 % keep them": "the value of an option",
        "a 90 % interval": "the confidence",
        "latency from 4,812 gaps: 8.9 s (8.7 s to 9.1 s)": "an example of a sentence that is printed",
        "a fixed sample of 2,048 requests": "a constant of the code",
        "at 0.5 to 0.95 of a schedule's capacity": "inputs",
    },
    "docs/reference/command-line.md": {
        "longer than two seconds": "a constant of the code",
        "every ten seconds": "a constant of the code",
        "below 1 %": "a constant of the code",
        "hold at five times the rate": "a constant of the code",
    },
    "docs/reference/files.md": {"at most 40,000": "a constant of the code", "may be in use | 0.9 |": "a default"},
    "docs/reference/risk.md": {
        "at most 1 %, by the laws": "the value of an option",
        "reweighted 40 times": "a constant of the code",
        "drawn 20 times": "a constant of the code",
        "were looked at seven times": "the protocol",
        "at most 1.5 % of broken bounds": "what was asked",
        "85 % of the best throughput kept without own runs, 90 % with three": "what was asked",
        "were to be within 5 % of the best": "what was asked",
    },
    "docs/reference/machine-speed.md": {
        "with a 90 % interval": "the confidence",
        "to the power of 0.9": "a constant of the code",
        "by more than 5 %, they are repeated up to three times": "constants of the code",
    },
    "docs/reference/search.md": {
        "5 % too low": "a constant of the code",
        "95 % confidence": "a constant of the code",
        "40,000 requests were added": "a constant of the code",
        "the longest replay has 40,000 requests, of all replicas": "a constant of the code",
        "above its tolerance of 2 %": "a constant of the code",
        "the first 10,000 of them (of several replicas 40,000)": "constants of the code",
        "the longest replay, 30,000 requests": "a constant of the code",
    },
}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_marked_figures_are_those_of_their_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == rewritten(text, text_of), "run python -m docs.make_results"


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_a_section_that_quotes_a_record_says_which_and_whether_its_tree_was_dirty(page: Path) -> None:
    for section in sections(page.read_text(encoding="utf-8")):
        found = marks(section)
        named = {mark.record for mark in found if mark.figure == "record"}
        assert {mark.record for mark in found} == named, section.splitlines()[0]
        assert all("dirty tree" in text_of(name, "record") for name in named if is_dirty(figures.read(name)))


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_a_mark_begins_no_line_of_a_paragraph(page: Path) -> None:
    """Markdown would take the line for HTML; a table stands between two comments on lines of their own."""
    begun = [line for line in page.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("<!--")]
    assert [line for line in begun if not re.fullmatch(r"<!-- [\w/-]+ -->|<!--/-->", line)] == []


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_no_figure_is_without_a_record(page: Path) -> None:
    left = " ".join(prose(page.read_text(encoding="utf-8")).split())
    for allowed in ALLOWED.get(_name(page), {}):
        assert allowed in left, f"{allowed!r} is no longer there: take it off ALLOWED"
        left = left.replace(allowed, "")
    assert _FIGURE.findall(left) == [], "mark it (docs/marks.py), remove it, or give a reason in ALLOWED"


def test_the_finder_finds_figures_and_leaves_names() -> None:
    found = "5.4 % off, 2 ms, 3 times, about four minutes, +12.1 %, 43 of 45 cases, 66,300 answers, 0.98, 1.2 to 3 GiB"
    assert len(_FIGURE.findall(found)) == 10
    assert (
        _FIGURE.findall("OPT-13B on 4 GPUs, sm_90, azure-2023-conv, section 7, float32, two workers, 2026-11-22") == []
    )


def test_every_figure_is_quoted() -> None:
    quoted = {(mark.record, mark.figure) for page in pages() for mark in marks(page.read_text(encoding="utf-8"))}
    assert {(record, figure) for record, own in FIGURES.items() for figure in own} - quoted == set()


def test_results_call_every_record_of_a_dirty_tree_so() -> None:
    page = PAGE.read_text(encoding="utf-8")
    head, *own = page.split("\n## ")
    dirty = {path.stem for path in RECORDS.glob("*.json") if is_dirty(json.loads(path.read_text(encoding="utf-8")))}
    assert set(re.findall(r"\]\(#([\w-]+)\)", head)) == dirty
    assert {section.split("\n")[0] for section in own if "**Dirty tree**" in section} == dirty


def test_an_unknown_record_or_figure_is_named() -> None:
    with pytest.raises(
        FigureError, match="no record 'kill' in benchmarks/records; there are a100, adjusted-plans, adjustment"
    ):
        text_of("kill", "answers")
    with pytest.raises(FigureError, match="no figure 'answer' of the record 'kills'; it has record, kills, answers"):
        text_of("kills", "answer")


def test_a_record_that_lacks_a_key_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"benchmark": "kills", "command": "python -m benchmarks.service.kills", "commit": "1a2b3c4"}
    monkeypatch.setattr(figures, "read", lambda name: body)
    with pytest.raises(
        FigureError, match=r"cannot make 'kills' of benchmarks/records/kills.json, which has benchmark, "
    ):
        text_of("kills", "kills")
    with pytest.raises(
        FigureError, match=r"KeyError 'rows'\. Change the function, or write the record again with `python"
    ):
        text_of("fidelity-demo", "throughput-even")


def test_marks_are_written_anew_and_nothing_else() -> None:
    text = "after <!-- kills/time -->22 ms\nat most<!--/-->, and\n\n<!-- kills/table -->-<!--/-->\n"
    assert rewritten(text, lambda _, name: {"time": "22 ms at most", "table": "| a |\n|---|"}[name]) == (
        "after <!-- kills/time -->22 ms\nat most<!--/-->, and\n\n<!-- kills/table -->\n\n| a |\n|---|\n\n<!--/-->\n"
    )
    assert "-->9 ms<!--/-->, and" in rewritten(text, lambda *_: "9 ms")


@pytest.mark.parametrize("text", ["<!-- kills/time -->22 ms", "<!-- a note -->", "<!-- a/b -->1 <!-- a/c -->2<!--/-->"])
def test_a_comment_that_is_no_mark_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a mark"):
        marks(text)


def test_words_of_figures() -> None:
    assert span(0.012, 0.034, percent) == "1.2 to 3.4 %"
    assert span(0.039, 0.165, secs) == "39 ms to 0.165 s"
    assert span(-0.05, 0.2, signed) == "-5.0 to +20.0 %"
    assert middle([0.01, 0.02, 0.03], percent) == "2.0 % (of 3, too few for an interval)"
    assert middle([n / 100 for n in range(12)], percent) == "5.5 % (2.0 to 9.0 %)"
    assert share_of(0, 420) == "0 of 420 (0.0 to 0.9 %)"
