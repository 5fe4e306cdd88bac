// Runs the program heed once per message, beside the page, which stays responsive: { arguments, files } in; lines of
// output while it runs, then { status, files } out.
import { Wasi } from "./wasi.js";

const module = WebAssembly.compileStreaming(fetch("heed.wasm"));

onmessage = async ({ data }) => {
  const decoders = [null, new TextDecoder(), new TextDecoder()];
  try {
    const wasi = new Wasi(["heed", ...data.arguments], data.files,
        (stream, bytes) => postMessage({ text: decoders[stream].decode(bytes, { stream: true }) }));
    const status = wasi.run(await module);
    const written = [...wasi.files].filter(([name]) => !data.files.has(name));
    postMessage({ status, files: new Map(written.map(([name, file]) => [name, file.bytes().slice()])) });
  } catch (error) {
    postMessage({ text: `${error}\n` });
    postMessage({ status: 1, files: new Map() });
  }
};
