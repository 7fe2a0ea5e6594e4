"""Opens a report in headless Chromium, wide and narrow, light and dark.

    report_page.py REPORT.html [FOLDER for pictures]

Exit code 0: no errors on the console, all plots are there, hovering and zooming
work, nothing is wider than the window. 1: says what is wrong. 77: no Chromium.
"""

import html
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

WIDTHS = (1280, 400)
FIGURES = ("loss", "throughput", "exposed", "norm", "rate", "timeline", "memory")

# The page inside frames of the widths, which a window may be too wide for, and
# what is to be found in them, as text of the outer page.
CHECK = """<!doctype html><meta charset="utf-8"><body style="margin:0"><pre id="result"></pre><script>
const page = %(page)s, widths = %(widths)s, figures = %(figures)s;
const found = [];
const pause = () => new Promise((resolve) => setTimeout(resolve, 50));
async function look(width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border:0;width:${width}px;height:900px`;
  document.body.append(frame);
  const errors = [], inside = frame.contentWindow;
  const complain = (text) => found.push(`${width} px: ${text}`);
  inside.console.error = (...words) => complain("console: " + words.join(" "));
  inside.console.warn = inside.console.error;
  inside.onerror = (message) => complain("error: " + message);
  inside.document.open();
  inside.document.write(page);
  inside.document.close();
  inside.onerror = (message) => complain("error: " + message);
  await pause();
  const doc = frame.contentDocument, root = doc.documentElement;
  if (root.dataset.ready !== "yes") return complain("the script did not run to its end");
  if (root.scrollWidth > width) complain(`the page is ${root.scrollWidth} px wide`);
  for (const node of doc.querySelectorAll("main *")) {
    const box = node.getBoundingClientRect();
    if (box.right > width + 1 && !node.closest(".scroll, clipPath, g[clip-path]")) complain(`${node.tagName} ${node.id || node.textContent.slice(0, 30)} ends at ${box.right}`);
  }
  for (const id of figures) {
    const marks = doc.querySelectorAll(`#${id} svg path, #${id} svg g rect`).length;
    if (marks === 0) complain(`figure ${id} is empty`);
  }
  for (const svg of doc.querySelectorAll("svg")) {
    if (/NaN|Infinity|undefined/.test(svg.outerHTML)) complain("a figure has no number: " + svg.getAttribute("aria-label"));
    for (const text of svg.querySelectorAll("text")) {
      if (/NaN|undefined|-0$/.test(text.textContent)) complain("axis text " + text.textContent);
    }
  }
  for (const category of ["shards", "gathered", "gradients", "communication", "other"]) {
    if (!doc.querySelector(`#memory path[data-category=${category}]`)) complain("no memory of " + category);
  }
  if (doc.querySelectorAll("#groups tbody tr").length === 0) complain("no groups");
  const event = (type, node, x, y = 5) => {
    const box = node.getBoundingClientRect();
    node.dispatchEvent(new inside.PointerEvent(type, {bubbles: true, pointerType: "mouse", button: 0,
      clientX: box.left + x * box.width, clientY: box.top + y}));
  };
  const tip = doc.getElementById("tip");
  for (const id of ["loss", "memory"]) {
    event("pointermove", doc.querySelector(`#${id} svg > rect:last-of-type`), 0.5);
    if (tip.style.display !== "block" || !tip.textContent) complain("no tooltip over " + id);
    event("pointerleave", doc.querySelector(`#${id} svg > rect:last-of-type`), 0.5);
    if (tip.style.display !== "none") complain("the tooltip stays over " + id);
  }
  event("pointermove", doc.querySelector("#timeline svg g rect"), 0.5);
  if (tip.style.display !== "block") complain("no tooltip over the timeline");
  const timeline = doc.querySelector("#timeline svg");
  event("pointerdown", timeline, 0.4);
  event("pointermove", timeline, 0.6);
  event("pointerup", timeline, 0.6);
  const whole = [...doc.querySelectorAll("#timeline-tools button")].find((button) => button.textContent === "Whole step");
  if (!whole) return complain("dragging does not zoom");
  whole.click();
  const other = doc.querySelectorAll("#memory-tools button")[1];
  if (other) {
    other.click();
    if (!doc.getElementById("memory-lede").textContent.includes(other.textContent)) complain("no memory of another rank");
  }
}
(async () => {
  for (const width of widths) {
    try { await look(width); } catch (error) { found.push(`${width} px: ${error.stack}`); }
  }
  document.getElementById("result").textContent = "done\\n" + found.join("\\n");
})();
</script>"""


def browser():
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if shutil.which(name):
            return shutil.which(name)
    return None


def chromium(page, *options, dark=False, width=1300, height=1000):
    scheme = 0 if dark else 1
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-extensions", "--disable-background-networking", "--no-first-run",
             f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={scheme}",
             f"--window-size={width},{height}", "--virtual-time-budget=4000", *options,
             page.as_uri()],
            capture_output=True, text=True, timeout=90)


def problems(report, folder):
    text = report.read_text()
    outside = [link for link in re.findall(r"https?://[^\"'\s<)]+", text)
               if not link.startswith("http://www.w3.org/")]
    found = [f"the page names {link}" for link in outside]
    check = folder / "check.html"
    script = CHECK % {"page": json.dumps(text).replace("<", "\\u003c"),
                      "widths": json.dumps(WIDTHS), "figures": json.dumps(FIGURES)}
    check.write_text(script)
    for dark in (False, True):
        ended = chromium(check, "--dump-dom", dark=dark)
        result = re.search(r'<pre id="result">(.*?)</pre>', ended.stdout, re.DOTALL)
        if not result or not result[1].startswith("done"):
            found.append(f"Chromium said nothing: {ended.stderr[-2000:]}")
            break
        found += html.unescape(result[1]).splitlines()[1:]
    # What the page itself writes on the console, opened as people open it.
    ended = chromium(report, "--dump-dom", "--enable-logging=stderr", "--v=0")
    found += [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    for part in ('data-ready="yes"', "<svg"):
        if part not in ended.stdout:
            found.append(f"the opened page has no {part}")
    return found


def pictures(report, target):
    target.mkdir(parents=True, exist_ok=True)
    for width, height in ((1280, 2850), (400, 4150)):
        for dark in (False, True):
            frame = target / "frame.html"
            frame.write_text(
                f'<body style="margin:0"><iframe src="{report.as_uri()}" '
                f'style="border:0;display:block;width:{width}px;height:{height}px">')
            name = f"report_{width}_{'dark' if dark else 'light'}.png"
            chromium(frame, f"--screenshot={target / name}", dark=dark,
                     width=max(width, 500), height=height)
            frame.unlink()


if __name__ == "__main__":
    if not browser():
        print("skipped: there is no Chromium (apt-get install chromium)")
        sys.exit(77)
    path = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        wrong = problems(path, pathlib.Path(scratch))
    if len(sys.argv) > 2:
        pictures(path, pathlib.Path(sys.argv[2]).resolve())
    print("\n".join(wrong) or "good")
    sys.exit(1 if wrong else 0)
