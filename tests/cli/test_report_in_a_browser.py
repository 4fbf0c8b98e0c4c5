"""``embedrock report`` in headless Chromium: what it draws, and that it asks for nothing."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import embedrock as er
from embedrock.cli.main import main
from embedrock.table.numbers import StatsRing

BROWSERS = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"
DARK = {"light": 1, "dark": 0}  # preferredColorScheme of Blink
# Runs in the page once it is drawn, and leaves what it saw.
LOOK = """<script>addEventListener("load", () => {
  const out = [], style = getComputedStyle(document.body);
  for (const svg of document.querySelectorAll("svg")) {
    const room = svg.viewBox.baseVal, frame = svg.getBoundingClientRect();
    for (const shape of svg.children) {
      const box = shape.getBBox(), stroke = getComputedStyle(shape).stroke;
      const fits = box.x >= 0 && box.y >= 0 && box.x + box.width <= room.width && box.y + box.height <= room.height;
      out.push(fits && box.width > 0 && frame.width > 100 && frame.height > 50 && stroke != style.backgroundColor);
    }
  }
  const found = {fit: out, ink: style.color, back: style.backgroundColor, mode: document.compatMode,
    fetched: performance.getEntriesByType("resource").length, text: document.body.innerText,
    overflows: document.documentElement.scrollWidth > innerWidth};
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
})</script>"""


def seen(page: Path, scheme: str, width: int) -> dict[str, Any]:
    """Return what a browser shows of a page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={DARK[scheme]}"]
    done = subprocess.run([browser, *words, page.as_uri()], capture_output=True, text=True, timeout=120)
    return json.loads(html.unescape(re.findall(r"FOUND(.*)END", done.stdout, re.DOTALL)[0]))


def brightness(color: str) -> float:
    return sum(map(int, re.findall(r"\d+", color)[:3])) / (3 * 255)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 1100), ("light", 400)])
def test_a_report_in_chromium(tmp_path: Path, scheme: str, width: int):
    curve = [[1 << 20, 40.0, 1.0], [2 << 20, 20.0, 0.0], [4 << 20, 5.0, 1.0]]
    pool = {"record_bytes": 48, "budget_bytes": 2 << 20, "curve": curve, "rows": 100.0, "new": 2.0, "missed": 20.0}
    member = {"name": "table '<i>x</i>'", "rows": 3, "steps": 5, "curve": [[1 << 20, 9.0], [4 << 20, 1.0]] * 6}
    with er.Group(path=tmp_path / "g.rock", memory="4MiB") as group:
        ring = StatsRing(group)
        for k in range(5):
            numbers = {"time": 100.0 + k, "steps": k * k, "hits": 3 * k, "misses": k, "timed": k / 8, "disk_s": k / 16}
            ring.add(numbers, {"kind": "group", "pools": [pool], "members": [member]})
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    page = tmp_path / "looked_at.html"
    page.write_text((tmp_path / "r.html").read_text().replace("</body>", f"{LOOK}</body>"))
    found = seen(page, scheme, width)
    assert len(found["fit"]) >= 5
    assert all(found["fit"])
    assert (found["mode"], found["fetched"], found["overflows"]) == ("CSS1Compat", 0, False)
    assert (brightness(found["ink"]) < brightness(found["back"])) == (scheme == "light")
    assert "you are here: 2.0 MiB" in found["text"]
    assert "table '<i>x</i>'" in found["text"]
