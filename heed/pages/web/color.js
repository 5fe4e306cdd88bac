// Colors of probabilities: a ramp of even steps in lightness, from the background to the strongest, for light and dark
// themes.

// Converts OKLCH, in which equal steps look equal, to 8-bit sRGB.
// Source: Ottosson, "A perceptual color space for image processing", 2020.
function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos(hue * Math.PI / 180), b = chroma * Math.sin(hue * Math.PI / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3;
  const linear = [4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s];
  return linear.map((x) => {
    const y = Math.min(1, Math.max(0, x));
    return Math.round(255 * (y <= 0.0031308 ? 12.92 * y : 1.055 * y ** (1 / 2.4) - 0.055));
  });
}

// 256 colors, { rgb: [[r, g, b]], packed: Uint32Array for ImageData, dark: whether text on it is light }.
function makeRamp(darkTheme) {
  const rgb = [], packed = new Uint32Array(256);
  for (let i = 0; i < 256; ++i) {
    const t = i / 255;
    // Light: paper, amber, red, plum. Dark: night, plum, red, amber, cream.
    const color = darkTheme
      ? oklch(0.205 + 0.745 * t, 0.012 + 0.165 * Math.sin(Math.PI * Math.min(1, 0.03 + 0.97 * t) ** 0.9), 295 + 165 * t ** 0.8)
      : oklch(0.992 - 0.732 * t, 0.004 + 0.165 * Math.sin(Math.PI * t ** 0.78 * 0.86), 88 - 140 * t ** 1.05);
    rgb.push(color);
    packed[i] = (255 << 24 | color[2] << 16 | color[1] << 8 | color[0]) >>> 0;
  }
  return { rgb, packed, isLightText: (i) => (0.3 * rgb[i][0] + 0.59 * rgb[i][1] + 0.11 * rgb[i][2]) < 140 };
}

let ramp = makeRamp(false);

const LOG_DECADES = 4;  // decades below the strongest, on the logarithmic scale

// The position of a probability between 0 and `strongest`, from 0 to 1.
function tone(value, strongest, scale) {
  if (!(value > 0) || !(strongest > 0)) return 0;
  const x = Math.min(1, value / strongest);
  if (scale === "linear") return x;
  if (scale === "sqrt") return Math.sqrt(x);
  return Math.max(0, 1 + Math.log10(x) / LOG_DECADES);
}
const toneIndex = (value, strongest, scale) => Math.round(255 * tone(value, strongest, scale));

const css = (rgb) => `rgb(${rgb.join(" ")})`;

// Mixes two colors of ImageData, with weight `share` for the second.
function mixed(a, b, share) {
  let color = 0xff000000;
  for (let shift = 0; shift < 24; shift += 8) {
    const x = a >> shift & 255, y = b >> shift & 255;
    color |= Math.round(x + share * (y - x)) << shift;
  }
  return color >>> 0;
}

// Converts a CSS color to the format of ImageData.
function packedColor(cssText) {
  const [r, g, b] = cssText.match(/[\d.]+/g).map(Number);
  return (255 << 24 | Math.round(b) << 16 | Math.round(g) << 8 | Math.round(r)) >>> 0;
}
