from __future__ import annotations

import re

import pytest

CONTRAST = r"""
(() => {
  const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const parse = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName)) continue;
    const front = light(parse(getComputedStyle(element).color)), back = light(behind(element));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (ratio < 4.5) bad.push(`${element.tagName} ${element.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return bad;
})()
"""


async def open_page(demo, page, *, width=1200, height=900, dark=False):
    await page.size(width, height, dark=dark)
    await page.open(demo.url + "/fleet/ui")
    await page.until("document.getElementById('link') && document.getElementById('link').textContent === 'live'")
    await page.until("document.querySelectorAll('#engine-rows tr').length === 3")


def said(text):
    return f"document.body.innerText.includes({text!r})"


async def test_running(demo, page, pictures):
    demo.roll(12)
    await open_page(demo, page)
    await page.until("/^[1-9]/.test(document.getElementById('rate').textContent)")
    await page.until("document.getElementById('inflight').textContent === '12'")
    text = await page.text()
    assert text.count("● ready") == 3
    assert "3 of 3" in text
    assert await page.js("document.getElementById('gate').textContent") == "open"
    await page.picture(pictures / "live-running.png")
    assert page.messages == []


async def test_nothing_comes_from_outside(demo, page):
    await open_page(demo, page)
    outside = [url for url in page.requests if not url.startswith((demo.url, "data:"))]
    assert outside == []


async def test_in_the_middle_of_a_sync_it_names_the_holder_and_the_held(demo, page, pictures):
    await demo.join()
    demo.roll(6)
    await open_page(demo, page)
    await demo.end(await demo.begin(), "step-1")
    update = await demo.begin()
    demo.roll(5, max_tokens=5)
    await page.until("document.getElementById('phase').textContent === 'updating'")
    await page.until("document.getElementById('held').textContent.startsWith('5')")
    await page.until("document.getElementById('holder').textContent.startsWith('/update_weights')")
    await page.until("document.querySelectorAll('.sync rect.now').length === 3")
    await page.picture(pictures / "live-sync.png")
    await demo.end(update, "step-2")
    await page.until("document.getElementById('version').textContent === 'step-2'")
    await page.until(said("→ step-2"))
    await page.until("document.getElementById('phase').textContent === 'open'")
    lanes = await page.js(
        "[...document.querySelector('.sync').querySelectorAll('svg')].map((svg) => svg.getAttribute('aria-label'))"
    )
    assert len(lanes) == 3
    for label in lanes:
        assert re.search(r"pause .*start .*update .*finish .*resume ", label)
    events = await page.js("document.getElementById('events').innerText")
    assert "gate closed by /pause" in events
    assert "finish_weight_update answered 200" in events
    assert page.messages == []


async def test_a_fenced_engine_is_told_with_its_reason(demo, page, pictures):
    await demo.join()
    await open_page(demo, page)
    await demo.end(await demo.begin(), "step-1")
    engine = demo.app.fleet.engines[demo.engines[1].url.removeprefix("http://")]
    status, _ = await demo.post(f"/fleet/engines/{engine.id}/fence")
    assert status == 200
    await page.until(said("▲ fenced"))
    await page.until("document.getElementById('ready').textContent === '2 of 3'")
    await page.until(f"document.getElementById('events').innerText.includes('{engine.id}: ready → fenced')")
    await page.picture(pictures / "live-fenced.png")
    assert page.messages == []


async def test_what_comes_from_outside_is_text(demo, page):
    nasty = "<img src=x onerror=\"document.title='broken in'\">"
    await open_page(demo, page)
    status, _ = await demo.post("/update_weight_version", {"new_version": nasty, "weight_version": nasty})
    assert status == 200
    await page.until(f"document.getElementById('version').textContent === {nasty!r}")
    assert await page.js("document.images.length") == 0
    assert "broken in" not in await page.js("document.title")


async def test_the_policy_forbids_any_other_script(demo, page):
    await open_page(demo, page)
    await page.js(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.in = 1'; document.body.append(s); })()"
    )
    assert await page.js("window.in === undefined") is True


async def test_a_proxy_that_goes_away_and_comes_back_is_noticed(demo, page):
    await open_page(demo, page)
    demo.app.control._api.close()
    await page.until("document.getElementById('link').textContent !== 'live'")
    await page.until("document.getElementById('link').textContent === 'live'")


@pytest.mark.parametrize("dark", [False, True])
async def test_on_a_phone_nothing_needs_sideways_scrolling_and_all_text_has_contrast(demo, page, pictures, dark):
    await demo.join()
    await open_page(demo, page, width=390, height=844, dark=dark)
    await demo.end(await demo.begin(), "step-1")
    await page.until(said("→ step-1"))
    assert await page.js("document.documentElement.scrollWidth") <= 390
    assert await page.js(CONTRAST) == []
    await page.picture(pictures / f"live-phone{'-dark' if dark else ''}.png")


async def test_it_can_be_used_by_keyboard_and_read_aloud(demo, page):
    await demo.join()
    await open_page(demo, page)
    await demo.end(await demo.begin(), "step-1")
    await page.until(said("→ step-1"))
    tree = (await page.send("Accessibility.getFullAXTree"))["nodes"]
    roles = {}
    for node in tree:
        if not node.get("ignored"):
            roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("main", "banner", "contentinfo", "log", "table"):
        assert role in roles, role
    for role in ("button", "link", "image", "region", "log", "heading", "columnheader"):
        assert [name for name in roles.get(role, []) if not name] == [], role
    reached = []
    for _ in range(14):
        await page.key("Tab", 9)
        reached.append(await page.js("document.activeElement.id || document.activeElement.tagName"))
    assert reached[0] == "A", "the skip link comes first"
    assert {"SUMMARY", "hold", "events"} <= set(reached)
    await page.js("document.getElementById('hold').focus()")
    await page.key("Enter", 13)
    assert await page.js("document.getElementById('hold').getAttribute('aria-pressed')") == "true"
    before = await page.js("document.getElementById('events').children.length")
    await demo.post("/pause?mode=keep")
    await demo.post("/resume")
    await page.until("/waiting/.test(document.getElementById('hold').textContent)")
    assert await page.js("document.getElementById('events').children.length") == before
    await page.key("Enter", 13)
    await page.until(f"document.getElementById('events').children.length > {before}")
