// The page: takes a dropped file, runs a verb of heed on it in a worker, shows its text and, of `view`, its page.
const element = (name) => document.getElementById(name);
const worker = new Worker("worker.js", { type: "module" });
const MOST_BYTES = 2 ** 31;  // as in heed/core/os_wasi.cc
let file = null;

function show(state) {
  document.documentElement.dataset.state = state;
  const running = state === "running";
  for (const button of document.querySelectorAll("button")) button.disabled = running || file === null;
  element("file").disabled = running;
}

async function take(given) {
  if (!given || document.documentElement.dataset.state === "running") return;
  element("output").textContent = "";
  if (given.size >= MOST_BYTES) {
    element("output").textContent = `${given.name}: has ${given.size} bytes, expected fewer than ${MOST_BYTES} ` +
        "in WebAssembly, whose memory has 32-bit addresses\n";
    return;
  }
  try {
    file = { name: given.name, bytes: new Uint8Array(await given.arrayBuffer()) };
  } catch (error) {
    element("output").textContent = `${given.name}: cannot read: ${error.message}\n`;
    return;
  }
  element("name").textContent = `${file.name}, ${file.bytes.length.toLocaleString()} bytes`;
  show("ready");
}

function run(verb) {
  const options = element("options").value.split(" ").filter(Boolean);
  element("output").textContent = "";
  element("page").hidden = true;
  show("running");
  worker.postMessage({
    arguments: [verb, "/" + file.name, ...(verb === "view" ? ["--html", "/page of heed.html"] : []), ...options],
    files: new Map([[file.name, file.bytes]]),
  });
}

worker.onmessage = ({ data }) => {
  if (data.text !== undefined) {
    element("output").textContent += data.text;
    return;
  }
  for (const bytes of data.files.values()) {
    element("page").srcdoc = new TextDecoder().decode(bytes);
    element("page").hidden = false;
  }
  show(data.status === 0 ? "done" : "failed");
};
worker.onerror = (event) => {
  element("output").textContent += `${event.message}\n`;
  show("failed");
};

element("file").onchange = ({ target }) => take(target.files[0]);
for (const verb of ["compare", "view"]) element(verb).onclick = () => run(verb);
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
  event.preventDefault();
  take(event.dataTransfer.files[0]);
};
show("empty");
