# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium without a network, driven over a pipe (the Chrome DevTools Protocol)."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60  # deadline of every answer


def find():
    """The program, or None."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


class Browser:
    """One page. events: what the browser told so far, in order."""

    def __init__(self, program, profile):
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4. It needs no sandbox
        # for a file of our own, and would not start as root with one.
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--no-first-run", "--disable-extensions", "--disable-background-networking",
                   "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
                   "--force-color-profile=srgb", f"--user-data-dir={profile}"]
        # The descriptors go past 9 first, since 3 and 4 may be among them.
        script = f'exec 30<&{commands} 31>&{answers}; exec "$0" "$@" 3<&30 4>&31'
        self._process = subprocess.Popen(["bash", "-c", script, program, *options, "about:blank"],
                                         pass_fds=(commands, answers), stderr=subprocess.DEVNULL,
                                         stdout=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self._next, self._pending, self._session, self.events = 0, b"", None, []

    def _receive(self, deadline):
        while b"\0" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            read = os.read(self._in, 1 << 16)
            if not read:
                raise EOFError("the browser has ended")
            self._pending += read
        message, self._pending = self._pending.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **parameters):
        """The result of a command."""
        self._next += 1
        command = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            message = self._receive(deadline)
            if message.get("id") == self._next:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def wait(self, event):
        """Wait for an event that has not been there yet."""
        deadline = time.monotonic() + SECONDS
        while not any(e.get("method") == event for e in self.events):
            self.events.append(self._receive(deadline))

    def open(self, url, width, scheme):
        """Load a page, with colours for a light or a dark screen."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target,
                                  flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0,
                  downloadThroughput=-1, uploadThroughput=-1)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("Page.loadEventFired")

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def named(self, *methods):
        return [event["params"] for event in self.events if event.get("method") in methods]

    def close(self):
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._out)
        os.close(self._in)
