"""Opens every page of the built site in a headless browser: `python check_site.py build/docs`.

- No page is wider than its window, at 1400 and at 390 pixels; no script fails.
- The page follows the system's colour scheme, also when it changes later, and pictures follow the page.
- The search finds terms that people type.
- Nothing is requested from another host.

The browser (Chromium or Chrome) is driven through a pipe by the DevTools protocol, so nothing else is needed.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

WIDTHS = 1400, 390
TERMS = (
    *("fp8_autocast", "migrate", "OOM", "glossary", "troubleshooting", "which recipe", "torchrun", "bitsandbytes"),
    *("delayed scaling", "mxfp8", "nvcc", "cuda graphs"),
)
LIMIT = 60.0


class Browser:
    """A browser with one page. `events` collects what the page reports."""

    def __init__(self, program: str, folder: str):
        (down_read, self.down), (self.up, up_write) = os.pipe(), os.pipe()

        def wire() -> None:
            # The browser reads commands from descriptor 3 and writes answers to 4.
            high = [os.dup2(down_read, 100), os.dup2(up_write, 101)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--hide-scrollbars"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "--disable-background-networking", "about:blank"]
        self.process = subprocess.Popen(
            [program, *options], preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(down_read)
        os.close(up_write)
        self.pending, self.events, self.number, self.session = b"", [], 0, None
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def receive(self) -> dict:
        while b"\0" not in self.pending:
            found = os.read(self.up, 1 << 20)
            if not found:
                raise SystemExit("the browser has ended")
            self.pending += found
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **parameters) -> dict:
        """Sends a command and returns its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        os.write(self.down, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def evaluate(self, expression: str):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise SystemExit(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, address: str) -> None:
        """Opens a page and waits until it is loaded."""
        del self.events[:]
        self.call("Page.navigate", url=address)
        self.until(f"document.readyState == 'complete' && location.href.split('#')[0] == {json.dumps(address)}", address)

    def until(self, condition: str, what: str):
        """Waits until an expression is true, and returns it."""
        end = time.monotonic() + LIMIT
        while not (value := self.evaluate(condition)):
            if time.monotonic() > end:
                raise SystemExit(f"{what}: {condition} doesn't become true")
            time.sleep(0.02)
        return value

    def width(self, pixels: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=pixels < 600)

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])


def problems_of(browser: Browser, host: str) -> list[str]:
    """Requests to other hosts, failed requests and exceptions, since the page was opened."""
    found = []
    for event in browser.events:
        given = event["params"]
        if event["method"] == "Network.requestWillBeSent":
            address = urlsplit(given["request"]["url"])
            if address.scheme not in ("data", "blob") and address.netloc != host:
                found.append(f"requests {given['request']['url']}")
        elif event["method"] == "Network.responseReceived" and given["response"]["status"] >= 400:
            found.append(f"{given['response']['status']} for {given['response']['url']}")
        elif event["method"] == "Runtime.exceptionThrown":
            found.append(f"raises {given['exceptionDetails'].get('exception', {}).get('description')}")
    return found


BRIGHTNESS = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 765"
PICTURES = "getComputedStyle(document.querySelector('article img')).colorScheme"


def check_schemes(browser: Browser, site: str) -> None:
    """Follows the system in both directions after the first visit, and the toggle against the system."""
    for name in ("light", "dark", "light"):
        browser.scheme(name)
        browser.open(f"{site}/choose.html")
        dark = name == "dark"
        browser.until(f"({BRIGHTNESS} < 0.4) == {json.dumps(dark)}", f"choose.html on a {name} system")
        assert (browser.evaluate(PICTURES) == "dark") == dark, f"pictures on a {name} system"
    # From the system's scheme to light, then to dark, while the system stays light.
    for dark in (False, True):
        browser.evaluate("[...document.querySelectorAll('form[data-md-component=palette] label')].find(l => !l.hidden).click()")
        browser.until(f"({BRIGHTNESS} < 0.4) == {json.dumps(dark)}", "the toggle")
    assert browser.evaluate(PICTURES) == "dark", "pictures after the toggle"
    browser.evaluate("localStorage.clear()")


def check_search(browser: Browser, site: str) -> None:
    for term in TERMS:
        browser.open(f"{site}/index.html?q={quote(term)}")
        shown = "document.querySelector('.md-search-result__meta').innerText"
        browser.until(f"/\\d|No/.test({shown}) && !/Initial/.test({shown})", f"search for {term!r}")
        assert browser.evaluate("document.querySelectorAll('.md-search-result__item').length"), (
            f"search finds nothing for {term!r}"
        )


def main() -> None:
    folder = Path(sys.argv[1])
    pages = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 20, f"{folder} has {len(pages)} pages: make docs builds them"
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        print("make site: skipped, because Chromium isn't here")
        return

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"localhost:{server.server_port}"
    failed = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            for page in pages:
                browser.width(WIDTHS[0])
                browser.open(f"http://{host}/{page}")
                for width in WIDTHS:
                    browser.width(width)
                    wide = browser.evaluate("document.documentElement.scrollWidth")
                    if wide > width:
                        failed.append(f"{page}: {wide} pixels wide in a window of {width}")
                failed += [f"{page}: {problem}" for problem in problems_of(browser, host)]
            browser.width(WIDTHS[0])
            check_schemes(browser, f"http://{host}")
            check_search(browser, f"http://{host}")
        finally:
            browser.process.kill()
            browser.process.wait()
    if failed:
        raise SystemExit("\n".join(failed))
    print(
        f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels, in both schemes; the search finds {len(TERMS)} terms"
    )


if __name__ == "__main__":
    main()
