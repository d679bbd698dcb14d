"""A headless Chromium over its debugging pipe (file descriptors 3 and 4): no driver package, no port."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium():
    """Path of a browser: ``$CHROMIUM``, or one of ``NAMES`` on the path; None without one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser without a network.

    ``events`` holds everything that the page did, as the DevTools protocol names it.
    """

    def __init__(self, chromium):
        self._profile = tempfile.mkdtemp()
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
        flags += ("--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking")
        flags += ("--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe")
        flags += (f"--user-data-dir={self._profile}",)
        high = [os.dup(fd) if fd < 5 else fd for fd in (to_browser, from_browser)]
        script = f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, chromium, *flags, "about:blank"], pass_fds=high, stderr=subprocess.DEVNULL
        )
        for fd in {to_browser, from_browser, *high}:
            os.close(fd)
        self._buffer, self._number, self.events = b"", 0, []
        self._session = None
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._write)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method, **parameters):
        """One command; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        number = self._number
        answer = self._until(lambda m: m.get("id") == number, method)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _until(self, wanted, what, seconds=300):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while b"\0" in self._buffer:
                line, self._buffer = self._buffer.split(b"\0", 1)
                message = json.loads(line)
                if "method" in message:
                    self.events.append(message)
                if wanted(message):
                    return message
            if select.select([self._read], [], [], 1)[0]:
                chunk = os.read(self._read, 1 << 20)
                assert chunk, f"the browser ended during {what}"
                self._buffer += chunk
        raise TimeoutError(f"the browser did not answer {what} in {seconds} s")

    def open(self, file, width, height=900, dark=False):
        """Load a file at a width in CSS pixels, in light or dark."""
        self.events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=Path(file).resolve().as_uri())
        self._until(lambda m: m.get("method") == "Page.loadEventFired", "loading")

    def run(self, expression):
        """The value of a JavaScript expression; promises are awaited."""
        got = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def screenshot(self, path):
        """The whole page as a PNG."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def complaints(self):
        """Errors on the console and exceptions."""
        found = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        found = [entry for entry in found if entry["level"] in ("error", "warning")]
        found += [e["params"] for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        calls = [e["params"] for e in self.events if e["method"] == "Runtime.consoleAPICalled"]
        return found + [call for call in calls if call["type"] in ("error", "warning", "assert")]

    def requests(self):
        """Addresses that were asked for; data URIs left out."""
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")]
