"""The page at `/` in a real browser: small, live, silent, readable at both widths, requesting only its own server."""

import asyncio
import os
import re
import signal

import pytest

from .chromium import CHROMIUM, opened
from .test_loading import held_up

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
KEY = "the key"
SHOWN = "document.querySelectorAll('svg').length === 6 && document.querySelectorAll('#figures td').length > 20"


@pytest.fixture(scope="module")
def busy(server):
    """A server that has answered a few requests."""
    for prompt in ("a", "b c d", "the quick brown fox"):
        assert server.complete({"prompt": prompt, "max_tokens": 20, "n": 2, "ignore_eos": True}).status == 200
    return server


def browse(url, look, **size):
    async def visit():
        async with opened(url, **size) as page:
            return await look(page)

    return asyncio.run(visit())


def test_it_is_small_updates_and_has_nothing_to_complain(busy):
    async def look(page):
        await page.until(SHOWN)
        size = await page.value("performance.getEntriesByType('navigation')[0].transferSize")
        before = await page.value("document.getElementById('span').textContent")
        await asyncio.to_thread(busy.complete, {"prompt": "a", "max_tokens": 5})
        await page.until(f"document.getElementById('span').textContent !== {before!r}")
        return size, page.complaints(), page.asked_for()

    size, complaints, asked = browse(f"{busy.url}/", look)
    assert 0 < size < 50_000  # Bytes, and nothing else is asked for: a tenth of a second on a quiet machine.
    assert complaints == []
    assert set(asked) <= {f"{busy.url}/", f"{busy.url}/dashboard", "data:,"}
    assert asked.count(f"{busy.url}/dashboard") >= 2


def test_few_arrivals_are_named_as_the_limit(busy):
    async def look(page):
        await page.until(SHOWN)
        shown = """fetch('/dashboard').then((r) => r.json()).then((d) => {
            figures({...d, predicted: {...d.predicted, throughput: 1000}, waiting: WAITING});
            return document.getElementById('load').textContent;
        })"""
        return [await page.value(shown.replace("WAITING", str(waiting))) for waiting in (0, 3)]

    few, many = browse(f"{busy.url}/", look)
    assert few.startswith("Arrivals are the limit, not the schedule: nothing waits, and ")
    assert many == ""


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_readable(busy, width, dark, tmp_path):
    async def look(page):
        await page.resize(width, 900, dark=dark)
        await page.until(SHOWN)
        await page.value("draw()")
        await page.screenshot(tmp_path / "page.png")
        return await page.value(
            """({
            wide: document.documentElement.scrollWidth,
            table: document.querySelector('.scroll').scrollWidth - document.querySelector('.scroll').clientWidth,
            cut: [...document.querySelectorAll('svg text')].filter((t) => {
                const b = t.getBoundingClientRect(), s = t.ownerSVGElement.getBoundingClientRect();
                return b.left < s.left - 6 || b.right > s.right + 6;
            }).map((t) => t.textContent),
            small: [...document.querySelectorAll('svg text, td, p')]
                .filter((t) => parseFloat(getComputedStyle(t).fontSize) < 12).length,
            labels: [...document.querySelectorAll('svg')].map((s) => s.getAttribute('aria-label')),
            colours: [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor],
        })"""
        )

    found = browse(f"{busy.url}/", look, width=width)
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert (found["wide"], found["table"], found["cut"], found["small"]) == (width, 0, [], 0)
    assert len(found["labels"]) == 6
    assert all(len(label) > 20 for label in found["labels"])
    assert contrast(*found["colours"]) > 7


def contrast(one, other):
    """By the definition of WCAG 2."""

    def luminance(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_it_asks_for_the_key_where_there_is_one_and_a_users_names_are_text_and_nothing_else(launch):
    name = "<img src=x onerror=alert(1)>"

    async def look(page):
        await page.until("!document.getElementById('ask').hidden")
        assert await page.value("document.getElementById('main').hidden")
        for key in ("wrong", KEY):
            await page.value(
                f"document.getElementById('key').value = {key!r}; document.getElementById('ask').requestSubmit()"
            )
            expected = SHOWN if key == KEY else "document.getElementById('wrong').textContent !== ''"
            await page.until(expected)
        assert await page.value("document.querySelectorAll('img').length") == 0
        assert await page.value("document.getElementById('title').textContent") == name
        return await page.value("document.getElementById('main').hidden"), await page.value("location.search")

    with launch(api_key=KEY, served_model_name=name) as server:
        hidden, search = browse(f"{server.url}/", look)
        assert (hidden, search) == (False, "")


def test_the_page_may_run_nothing_but_its_own_script(busy):
    policy = busy.call("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy

    async def look(page):
        await page.until(SHOWN)
        await page.value(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.bad = 1'}))"
        )
        evaluated = await page.value(
            "(() => { try { return new Function('return 1')(); } catch (e) { return e.name; } })()"
        )
        foreign = await page.value("fetch('https://example.org/').then(() => 'sent', () => 'refused')")
        return await page.value("window.bad"), evaluated, foreign

    assert browse(f"{busy.url}/", look) == (None, "EvalError", "refused")


def test_it_says_that_the_model_is_being_loaded_and_goes_on_by_itself(launch, tmp_path):
    async def look(page):
        await page.until("document.getElementById('status').textContent === 'loading …'")
        seen = []
        for width in (1280, 400):
            await page.resize(width, 900)
            seen.append(
                await page.value(
                    """({
                    wide: document.documentElement.scrollWidth,
                    sections: [...document.querySelectorAll('section')].filter((s) => s.offsetParent).map((s) => s.id),
                    stage: document.getElementById('stage').textContent,
                })"""
                )
            )
        os.kill(server.fork_server_pid, signal.SIGCONT)
        await page.until("document.getElementById('status').textContent === 'ok'")
        await page.until(SHOWN)
        return seen, await page.value("document.getElementById('loading').hidden"), page.complaints()

    with held_up(launch, tmp_path / "log") as server:
        seen, hidden, complaints = browse(f"{server.url}/", look)
    stage = "starting the engine; requests get 503 until it is done"
    assert seen == [{"wide": width, "sections": ["loading"], "stage": stage} for width in (1280, 400)]
    assert (hidden, complaints) == (True, [])
