// The part of WASI (preview 1) that the program heed needs: arguments, clocks, and files, which are in memory, in one
// folder.

const SUCCESS = 0, BAD_DESCRIPTOR = 8, EXISTS = 20, INVALID = 28, NO_ENTRY = 44, NOT_IMPLEMENTED = 52;
const FOLDER = 3, REGULAR = 4;  // types of a descriptor
const CREATE = 1, MUST_BE_FOLDER = 2, EXCLUSIVE = 4, TRUNCATE = 8;  // flags of path_open
const ROOT = 3;  // the descriptor of the folder "/"; those of the standard streams are below

class File {
  constructor(bytes = new Uint8Array(0)) {
    this.memory = bytes;
    this.size = bytes.length;
  }

  bytes() { return this.memory.subarray(0, this.size); }

  resize(size) {
    if (size > this.memory.length) {
      const larger = new Uint8Array(Math.max(size, 2 * this.memory.length));
      larger.set(this.bytes());
      this.memory = larger;
    }
    this.size = size;
  }
}

export class Exit {  // thrown through the program, which ends
  constructor(code) { this.code = code; }
}

export class Wasi {
  // `files` is a Map from names to Uint8Array; `write(stream, bytes)` gets what is written to streams 1 and 2.
  constructor(programArguments, files, write) {
    this.arguments = programArguments.map((text) => new TextEncoder().encode(text + "\0"));
    this.files = new Map([...files].map(([name, bytes]) => [name, new File(bytes)]));
    this.write = write;
    this.open = new Map();
  }

  // The program's exit status.
  run(module) {
    const imports = {};
    for (const { module: from, name } of WebAssembly.Module.imports(module)) {
      (imports[from] ??= {})[name] = this[name]?.bind(this) ?? (() => NOT_IMPLEMENTED);
    }
    const instance = new WebAssembly.Instance(module, imports);
    this.memory = instance.exports.memory;
    try {
      instance.exports._start();
    } catch (thrown) {
      if (!(thrown instanceof Exit)) throw thrown;
      return thrown.code;
    }
    return 0;
  }

  // --- memory of the program, whose buffer changes when it grows

  view() { return new DataView(this.memory.buffer); }
  part(at, size) { return new Uint8Array(this.memory.buffer, at, size); }
  put32(at, value) { this.view().setUint32(at, value, true); return SUCCESS; }
  put64(at, value) { this.view().setBigUint64(at, BigInt(value), true); return SUCCESS; }
  text(at, size) { return new TextDecoder().decode(this.part(at, size)); }
  name(at, size) { return this.text(at, size).replace(/^(\.?\/)+/, "").replace(/^\.$/, ""); }

  vectors(at, count) {
    const view = this.view(), vectors = [];
    for (let i = 0; i < count; ++i) {
      vectors.push(this.part(view.getUint32(at + 8 * i, true), view.getUint32(at + 8 * i + 4, true)));
    }
    return vectors;
  }

  strings(strings, table, text) {
    strings.forEach((bytes, i) => {
      this.put32(table + 4 * i, text);
      this.part(text, bytes.length).set(bytes);
      text += bytes.length;
    });
    return SUCCESS;
  }

  // --- the process

  args_sizes_get(count, bytes) {
    this.put32(count, this.arguments.length);
    return this.put32(bytes, this.arguments.reduce((sum, text) => sum + text.length, 0));
  }
  args_get(table, text) { return this.strings(this.arguments, table, text); }
  environ_sizes_get(count, bytes) { this.put32(count, 0); return this.put32(bytes, 0); }
  environ_get() { return SUCCESS; }
  proc_exit(code) { throw new Exit(code); }
  sched_yield() { return SUCCESS; }
  random_get(at, size) { crypto.getRandomValues(this.part(at, size)); return SUCCESS; }

  clock_res_get(clock, at) { return this.put64(at, 1000); }
  clock_time_get(clock, precision, at) {  // clock 0 is the time of day
    return this.put64(at, Math.round(1e6 * (performance.now() + (clock === 0 ? performance.timeOrigin : 0))));
  }

  // --- descriptors

  fd_prestat_get(fd, at) {
    if (fd !== ROOT) return BAD_DESCRIPTOR;
    this.put32(at, 0);  // a folder
    return this.put32(at + 4, 1);  // the length of its name
  }
  fd_prestat_dir_name(fd, at) { this.part(at, 1).set([47]); return SUCCESS; }

  fd_fdstat_get(fd, at) {
    if (fd > ROOT && !this.open.has(fd)) return BAD_DESCRIPTOR;
    this.part(at, 24).fill(0);
    this.part(at, 1).set([fd === ROOT ? FOLDER : fd > ROOT ? REGULAR : 0]);
    this.put64(at + 8, 0xffffffffn);  // rights: all
    return this.put64(at + 16, 0xffffffffn);
  }
  fd_fdstat_set_flags() { return SUCCESS; }

  fd_filestat_get(fd, at) {
    if (fd < ROOT) return this.status(at, 0, 0);
    if (fd === ROOT) return this.status(at, FOLDER, 0);
    return this.open.has(fd) ? this.status(at, REGULAR, this.open.get(fd).file.size) : BAD_DESCRIPTOR;
  }

  status(at, type, size) {
    this.part(at, 64).fill(0);
    this.part(at + 16, 1).set([type]);
    this.put64(at + 24, 1);  // links
    return this.put64(at + 32, size);
  }

  fd_read(fd, vectors, count, read) {
    if (fd === 0) return this.put32(read, 0);
    const open = this.open.get(fd);
    if (!open) return BAD_DESCRIPTOR;
    const begin = open.at;
    for (const target of this.vectors(vectors, count)) {
      const source = open.file.bytes().subarray(open.at, open.at + target.length);
      target.set(source);
      open.at += source.length;
    }
    return this.put32(read, open.at - begin);
  }

  fd_write(fd, vectors, count, written) {
    const open = this.open.get(fd);
    if (!open && (fd < 1 || fd > 2)) return BAD_DESCRIPTOR;
    let total = 0;
    for (const source of this.vectors(vectors, count)) {
      total += source.length;
      if (!open) {
        this.write(fd, source.slice());
        continue;
      }
      open.file.resize(Math.max(open.file.size, open.at + source.length));
      open.file.memory.set(source, open.at);
      open.at += source.length;
    }
    return this.put32(written, total);
  }

  fd_seek(fd, offset, whence, at) {  // from the begin, from here, from the end
    const open = this.open.get(fd);
    if (!open) return BAD_DESCRIPTOR;
    const to = [0, open.at, open.file.size][whence] + Number(offset);
    if (!(to >= 0)) return INVALID;
    open.at = to;
    return this.put64(at, to);
  }

  fd_close(fd) { return this.open.delete(fd) || fd <= ROOT ? SUCCESS : BAD_DESCRIPTOR; }

  // --- names in the folder

  path_open(folder, lookup, path, size, flags, rights, inherited, status, at) {
    const name = this.name(path, size);
    if (flags & MUST_BE_FOLDER) return NOT_IMPLEMENTED;
    let file = this.files.get(name);
    if (file && flags & EXCLUSIVE) return EXISTS;
    if (!file && !(flags & CREATE)) return NO_ENTRY;
    if (!file) this.files.set(name, file = new File());
    if (flags & TRUNCATE) file.size = 0;
    let fd = ROOT + 1;
    while (this.open.has(fd)) ++fd;
    this.open.set(fd, { file, at: 0 });
    return this.put32(at, fd);
  }

  path_filestat_get(folder, lookup, path, size, at) {
    const name = this.name(path, size);
    if (name === "") return this.status(at, FOLDER, 0);
    return this.files.has(name) ? this.status(at, REGULAR, this.files.get(name).size) : NO_ENTRY;
  }

  path_rename(folder, from, fromSize, toFolder, to, toSize) {
    const name = this.name(from, fromSize);
    if (!this.files.has(name)) return NO_ENTRY;
    this.files.set(this.name(to, toSize), this.files.get(name));
    this.files.delete(name);
    return SUCCESS;
  }

  path_unlink_file(folder, path, size) { return this.files.delete(this.name(path, size)) ? SUCCESS : NO_ENTRY; }
}
