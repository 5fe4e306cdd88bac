# A headless Chromium for the tests of pages: opens a file, points, types, reads the page and the console.
"""Without Chromium and its driver (Debian: chromium, chromium-driver) or selenium these tests are skipped."""

import base64
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from cli_program import SHIPPED, document

try:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys as Keys  # for the tests
except ImportError:
    webdriver = None

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (webdriver and CHROMIUM and DRIVER),
                                   reason="no chromium, chromedriver or selenium")

SECONDS_TO_READY = 60  # on a slow machine, with thumbnails


class Browser:
    """One window; every test begins with a fresh page in it."""

    def __init__(self):
        os.environ["SE_OFFLINE"] = os.environ["SE_AVOID_STATS"] = "true"  # selenium looks for nothing in the network
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars",
                         *(["--no-sandbox"] if os.geteuid() == 0 else [])):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_script_timeout(SECONDS_TO_READY)

    def quit(self):
        self.driver.quit()

    def fresh(self):
        """Resets the browser: an empty page of usual size, light, scripts allowed, an empty log."""
        self.driver.get("about:blank")
        self.size(1400, 1000)
        self.prefer("light")
        self.scripts(True)
        self.console()

    def size(self, width, height, scale=1):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": scale, "mobile": False})

    def prefer(self, theme):
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": theme}]})

    def scripts(self, allowed):
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not allowed})

    def open(self, path, fragment="", ready=True):
        """Seconds until the page shows its first map, whether or not it waits for all of them."""
        self.driver.get("about:blank")  # another fragment alone would not load again
        start = time.monotonic()
        self.driver.get(Path(path).resolve().as_uri() + fragment)
        seconds = time.monotonic() - start
        if ready:
            self.wait("return document.documentElement.dataset.ready === 'true'")
        return seconds

    def wait(self, condition):
        end = time.monotonic() + SECONDS_TO_READY
        while not self.js(condition):
            assert time.monotonic() < end, f"still not so: {condition}"
            time.sleep(0.02)

    def js(self, script, *args):
        return self.driver.execute_script(script, *args)

    def text(self, name):
        return self.js("return document.getElementById(arguments[0]).textContent", name)

    def attribute(self, name, attribute):
        return self.js("return document.getElementById(arguments[0]).getAttribute(arguments[1])", name, attribute)

    def point(self, x, y):
        """A real mouse event."""
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def type(self, *keys):
        actions = ActionChains(self.driver, duration=0)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def chord(self, modifier, key):
        ActionChains(self.driver, duration=0).key_down(modifier).send_keys(key).key_up(modifier).perform()

    def downloads(self, folder):
        """The folder of files that a page saves."""
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})

    def saved(self, folder, name):
        """The bytes of a file of this name once it is there whole, which is then removed."""
        end, path = time.monotonic() + SECONDS_TO_READY, Path(folder) / name
        while not path.exists() or list(Path(folder).glob("*.crdownload")):
            assert time.monotonic() < end, f"no {name} but {[x.name for x in Path(folder).iterdir()]}"
            time.sleep(0.02)
        data = path.read_bytes()
        path.unlink()
        return data

    def console(self):
        """The console's messages since the last call."""
        return self.driver.get_log("browser")

    def screenshot(self, path):
        """The whole page, below the fold too."""
        box = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {
            "captureBeyondViewport": True,
            "clip": {**{side: box[side] for side in ("x", "y", "width", "height")}, "scale": 1}})
        Path(path).write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture(scope="session")
def one_browser():
    browser = Browser()
    yield browser
    browser.quit()


@pytest.fixture
def browser(one_browser):
    """A fresh page; afterwards the console must be empty."""
    one_browser.fresh()
    yield one_browser
    assert one_browser.console() == []


# The page of `heed view`.

@pytest.fixture(scope="session")
def shipped(tmp_path_factory):
    page = tmp_path_factory.mktemp("view") / "view.html"
    document("view", SHIPPED, "--html", page)
    return page


def shown_map(browser, layer, head):
    """The whole map that the page computed; -1 where it shows that a pair is masked."""
    values = browser.js("""
        const [l, h] = arguments, layer = heed.layers[l], out = [];
        for (let q = 0; q < layer.rows; ++q) for (let k = 0; k < layer.cols; ++k)
          out.push(k >= layer.low[q] && k < layer.high[q] ? heed.probability(l, h, q, k) : -1);
        return [layer.rows, layer.cols, out];""", layer, head)
    return np.array(values[2]).reshape(values[:2])


def places(browser, pairs):
    """Points of the window, one for each pair."""
    return browser.js("""
        const box = document.getElementById('overlay').getBoundingClientRect();
        return arguments[0].map(([q, k]) => heed.centre(q, k)).map(([x, y]) => [box.left + x, box.top + y]);""", pairs)


def point_at(browser, q, k):
    """Moves the mouse to a pair and reads what the page says of it."""
    browser.point(*places(browser, [[q, k]])[0])
    return readout(browser)


def readout(browser):
    return browser.js("""
        const { query, key, value } = document.getElementById('readout').dataset;
        return { pair: [+query, +key], value: +value, text: document.getElementById('value').textContent,
                 tip: document.getElementById('tip').hidden
                     ? null : document.getElementById('tip-value').textContent };""")


def choose(browser, name, value):
    browser.js("const select = document.getElementById(arguments[0]); select.value = arguments[1];"
               "select.dispatchEvent(new Event('change'))", name, value)


def write(browser, name, text):
    """Sets a field as if the text were typed."""
    browser.js("const field = document.getElementById(arguments[0]); field.value = arguments[1];"
               "field.dispatchEvent(new Event('input'))", name, text)


def click(browser, name):
    browser.js("document.getElementById(arguments[0]).click()", name)


def number(text):
    """0.123 of "12.3 %"."""
    assert text.endswith("%")
    return float(text[:-1].replace("\u2212", "-")) / 100
