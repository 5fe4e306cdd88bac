// Readable labels of tokens. A token is always shown as text: invisible characters are made visible.

const SHOWN = { "\n": "\u21b5", "\r": "\u240d", "\t": "\u21e5", " ": "\u2423" };

// Replaces invisible characters, and those that XML does not allow, by visible names.
const visible = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\u010a\ufffe\uffff]/gu, (c) => {
  if (c === "\u200d") return c;  // joins emoji
  if (c === "\u010a") return "\u21b5";  // GPT's line break
  return SHOWN[c] ?? `\\u{${c.codePointAt(0).toString(16)}}`;
});

// A token on its own: on an axis, in a list, in a sentence.
function plain(token) {
  // Leading space of GPT and sentencepiece tokens.
  const word = visible(/^[\u0120\u2581]/u.test(token) && [...token].length > 1 ? token.slice(1) : token);
  if (word === "") return "(empty)";
  return word.trim() === "" ? "\u2423".repeat([...word].length) : word;
}

const position = (first, end) => (end - first === 1 ? whole(first) : `${whole(first)}\u2013${whole(end - 1)}`);

function keyToken(layer, key) {
  return layer.tokens && key >= 0 && key < layer.tokens.length ? layer.tokens[key] : null;
}

// The label on an axis: the token, else the position. On a pooled axis, the first position of each range.
function axisLabel(layer, [first, end], start) {
  if (pooled) return whole(first);
  const token = keyToken(layer, first + start);
  return token === null ? whole(first) : plain(token);
}
const rowLabel = (layer, q) => axisLabel(layer, layer.rowRange(q), layer.start);
const colLabel = (layer, k) => axisLabel(layer, layer.colRange(k), 0);

// The name in a sentence: [words, position] such as ["alice", "1"] or ["tokens 390-779", "from 'the'"].
function named(layer, [first, end], start, words) {
  if (!pooled) {
    const token = keyToken(layer, first + start);
    return token === null ? [`token ${whole(first)}`, ""] : [plain(token), whole(first)];
  }
  return [`${end - first === 1 ? "token" : "tokens"} ${position(first, end)}`, words ? `from \u201c${plain(words)}\u201d` : ""];
}
const rowName = (layer, q) => named(layer, layer.rowRange(q), layer.start, layer.rowWords?.[q]);
const colName = (layer, k) => named(layer, layer.colRange(k), 0, layer.colWords?.[k]);
const joined = ([words, where]) => (where === "" ? words : `${words} (${where})`);

const layerName = (layer) => layer.name.replace(/^(model\.)?(layers?|blocks?|h)\.(\d+)$/i, "$3") || "0";

// How tokens join to words: by "##" pieces, tokens with their own space, or a space between all.
function spacing(tokens) {
  if (tokens.some((t) => t.startsWith("##"))) return "wordpiece";
  if (tokens.some((t) => /^[\u0120\u2581]/u.test(t))) return "marked";
  return "spaced";
}

// [space before, text] of each token, for running text.
function running(tokens) {
  const kind = spacing(tokens);
  let quoted = false, glue = true;
  return tokens.map((token) => {
    if (kind === "marked") {
      const starts = /^[\u0120\u2581]/u.test(token);
      return [starts ? " " : "", plain(token)];
    }
    if (kind === "wordpiece" && token.startsWith("##") && token.length > 2) {
      glue = false;
      return ["", plain(token.slice(2))];
    }
    let before = glue ? "" : " ";
    glue = false;
    if (/^[.,:;!?)\]}%\u2019\u201d]+$/u.test(token)) before = "";
    if (/^[([{\u201c\u2018]+$/u.test(token)) glue = true;
    if (token === "'" || token === "-") [before, glue] = ["", true];
    if (token === "\"") {
      if (quoted) before = "";
      else glue = true;
      quoted = !quoted;
    }
    return [before, plain(token)];
  });
}
