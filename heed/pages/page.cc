// Pages: templates, escaping, the content security policy.
#include "heed/pages/page.h"

#include "heed/pages/embedded_file.h"
#include "heed/pages/sha256.h"
#include "heed/core/error.h"
#include "heed/io/atomic_file_internal.h"

namespace heed::pages {
namespace {

std::string_view FileOf(std::string_view name) {
  for (size_t i = 0; i < kNumPageFiles; ++i) {
    if (kPageFiles[i].name == name) return kPageFiles[i].bytes;
  }
  throw InternalError("no page file " + std::string(name));
}

std::string Join(const std::vector<std::string_view>& names) {
  std::string text = "\n";
  for (const std::string_view name : names) text += FileOf(name);
  return text;
}

std::string_view AsText(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const uint8_t> AsBytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// The hash by which a policy allows a script or a style in the page.
std::string Fingerprint(std::string_view text) {
  const std::string hex = Sha256(AsBytes(text));
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  }
  return "'sha256-" + Base64(bytes) + "'";
}

struct Parts {
  std::string style, script, policy;
};

Parts PartsOf(const Page& page) {
  Parts parts;
  parts.style = Join(page.styles);
  // One scope for all scripts, which elements of the page cannot reach.
  parts.script = "\n\"use strict\";\n(() => {" + Join(page.scripts) + "})();\n";
  parts.policy =
      "default-src 'none'; base-uri 'none'; form-action 'none'; "
      "img-src data: blob:; style-src " +
      Fingerprint(parts.style) + "; script-src " + Fingerprint(parts.script);
  return parts;
}

}  // namespace

std::string Base64(std::span<const uint8_t> bytes) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const std::string_view in = AsText(bytes);
  const auto byte = [&](size_t i) { return i < in.size() ? static_cast<uint8_t>(in[i]) : uint32_t{0}; };
  std::string text;
  text.reserve((in.size() + 2) / 3 * 4);
  for (size_t i = 0; i < in.size(); i += 3) {
    const uint32_t x = byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
    text += kDigits[x >> 18];
    text += kDigits[x >> 12 & 63];
    text += i + 1 < in.size() ? kDigits[x >> 6 & 63] : '=';
    text += i + 2 < in.size() ? kDigits[x & 63] : '=';
  }
  return text;
}

std::string InertJson(const Json& json) {
  // '<', '>' and '&' occur only in strings of JSON.
  std::string text;
  for (const char c : json.dump(-1, ' ', true, Json::error_handler_t::replace)) {
    if (c == '<') {
      text += "\\u003c";
    } else if (c == '>') {
      text += "\\u003e";
    } else if (c == '&') {
      text += "\\u0026";
    } else {
      text += c;
    }
  }
  return text;
}

std::string EscapeHtml(const std::string& text) {
  const std::string valid =
      Json::parse(Json(text).dump(-1, ' ', true, Json::error_handler_t::replace)).get<std::string>();
  std::string escaped;
  for (const char c : valid) {
    switch (c) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      case '\'': escaped += "&#39;"; break;
      case '\0': escaped += "\xEF\xBF\xBD"; break;
      default: escaped += c;
    }
  }
  return escaped;
}

std::string ComposePage(const Page& page) {
  const Parts parts = PartsOf(page);
  std::string data = "<script type=\"application/json\" id=\"data\">" + InertJson(page.data) + "</script>\n";
  for (const auto& [id, base64] : page.blobs) {
    data += "<script type=\"application/octet-stream\" id=\"" + EscapeHtml(id) + "\">";
    data += base64;
    data += "</script>\n";
  }
  const std::string title = EscapeHtml(page.title);
  const std::pair<std::string_view, const std::string*> slots[] = {
      {"@TITLE@", &title},    {"@POLICY@", &parts.policy}, {"@STYLE@", &parts.style},
      {"@BODY@", &page.body}, {"@SCRIPT@", &parts.script}, {"@DATA@", &data}};
  // Only the template is searched for slots, not the texts that fill them.
  std::string html;
  std::string_view rest = FileOf(page.name);
  while (!rest.empty()) {
    const size_t at = rest.find('@');
    html += rest.substr(0, at);
    if (at == std::string_view::npos) break;
    rest.remove_prefix(at);
    size_t used = 1;
    for (const auto& [slot, text] : slots) {
      if (!rest.starts_with(slot)) continue;
      html += *text;
      used = slot.size();
      break;
    }
    if (used == 1) html += '@';
    rest.remove_prefix(used);
  }
  return html;
}

void CheckWritable(const std::string& path) { const AtomicFile probe(path); }

void WriteText(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.Write(text);
  file.Commit();
}

}  // namespace heed::pages
