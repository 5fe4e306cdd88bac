# examples/browser: the program, compiled to WebAssembly, in a headless Chromium.
"""Without build/wasm32-wasi/bin/heed.wasm (scripts/cross wasm32-wasi --build) these tests are skipped."""

import functools
import http.server
import shutil
import threading

import pytest
from browser import click, needs_browser, write
from cli_program import ROOT, SHIPPED

PROGRAM = ROOT / "build/wasm32-wasi/bin/heed.wasm"
pytestmark = [needs_browser, pytest.mark.skipif(not PROGRAM.exists(), reason=f"no program at {PROGRAM}")]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The page's address, and what its server is asked for: browsers fetch no modules from files."""
    folder, requests = tmp_path_factory.mktemp("browser") / "page", []
    shutil.copytree(ROOT / "examples/browser", folder)
    shutil.copy(PROGRAM, folder)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_request(self, *args):
            requests.append(self.requestline)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", requests
    server.shutdown()
    thread.join()


@pytest.fixture
def page(one_browser, served):
    """The page without a file; the console stays empty, and all that the page sends is requests of its own files."""
    one_browser.fresh()
    one_browser.driver.get(served[0])
    one_browser.wait("return document.documentElement.dataset.state === 'empty'")
    yield one_browser
    assert one_browser.console() == []
    assert {line.rsplit(" ", 1)[0] for line in served[1]} <= {
        f"GET /{name}" for name in ("", "page.js", "worker.js", "wasi.js", "heed.wasm")}


def choose(page, path):
    page.driver.find_element("id", "file").send_keys(str(path))


def run(page, verb, options):
    """The final state of the page and its text."""
    page.wait("return document.documentElement.dataset.state === 'ready'")
    write(page, "options", options)
    click(page, verb)
    page.wait("return ['done', 'failed'].includes(document.documentElement.dataset.state)")
    return page.js("return document.documentElement.dataset.state"), page.text("output")


def test_compare_prints_its_table(page):
    choose(page, SHIPPED)
    state, text = run(page, "compare", "--layer 3 -m attention,gla")
    assert state == "done", text
    assert "attention" in text and "gla" in text and "WebAssembly, WASM, 1 thread" in text


def test_view_shows_its_page_of_a_dropped_file(page):
    choose(page, SHIPPED)
    page.wait("return document.documentElement.dataset.state === 'ready'")
    page.js("""
        const data = new DataTransfer(), [file] = document.getElementById('file').files;
        data.items.add(new File([file], 'dropped here.safetensors'));
        document.dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true }));""")
    page.wait("return document.getElementById('name').textContent.startsWith('dropped here.safetensors, ')")
    state, text = run(page, "view", "--layer 3")
    assert state == "done", text
    page.driver.switch_to.frame("page")
    page.wait("return document.documentElement.dataset.ready === 'true'")
    assert page.js("return heed.layers.length") == 1
    page.driver.switch_to.default_content()


def test_a_mistake_is_one_line_of_text(page):
    choose(page, SHIPPED)
    state, text = run(page, "compare", "--layer 99")
    assert state == "failed"
    assert text.startswith("heed: ") and text.count("\n") == 1


def test_a_file_of_2_gib_is_refused(page, tmp_path):
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(2**31)  # of a sparse file
    choose(page, path)
    page.wait("return document.getElementById('output').textContent !== ''")
    assert page.text("output") == ("large.safetensors: has 2147483648 bytes, expected fewer than 2147483648 "
                                   "in WebAssembly, whose memory has 32-bit addresses\n")
    assert page.js("return document.documentElement.dataset.state") == "empty"
