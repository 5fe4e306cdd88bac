// Functions of all pages: finding and making elements, the theme, numbers as text.

const $ = (id) => document.getElementById(id);

// Creates an element with text and attributes. The text is never parsed as HTML.
function element(tag, text = "", attributes = {}) {
  const node = document.createElement(tag);
  if (text !== "") node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Creates an SVG element; the namespace is taken from the parser, so that the page contains no address.
const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").body.firstChild.namespaceURI;
function shape(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== "") node.textContent = text;
  return node;
}

const data = JSON.parse($("data").textContent);

// Three significant digits, two for small numbers, without an exponent where that is short.
function digits(x) {
  if (x === 0) return "0";
  if (!Number.isFinite(x)) return "undefined";
  const size = Math.abs(x);
  if (size >= 99.95) return x.toFixed(0);
  if (size >= 0.1) return x.toFixed(Math.max(0, 2 - Math.floor(Math.log10(size))));
  if (size >= 1e-5) return x.toFixed(1 - Math.floor(Math.log10(size)));
  return x.toExponential(1).replace("e-", "e\u2212");
}
const percent = (x) => `${digits(100 * x)}\u2009%`;
const whole = (n) => n.toLocaleString("en");

const THEMES = ["auto", "light", "dark"];
const darkMedia = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
const isDark = () => theme === "dark" || (theme === "auto" && darkMedia.matches);

// Calls `changed` whenever the colors change, by the button or by the system.
function followTheme(use) {
  const changed = () => {
    colors.clear();
    use();
  };
  darkMedia.addEventListener("change", changed);
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").textContent = `Theme: ${theme}`;
    changed();
  });
}

// The computed value of a color variable, for canvases.
const colors = new Map();
function cssColor(name) {
  if (!colors.has(name)) {
    const probe = element("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    colors.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colors.get(name);
}
