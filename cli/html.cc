// A table as a page: no script, no link, nothing to load.
#include "cli/html.h"

#include "heed/io/atomic_file_internal.h"

namespace heed::cli {
namespace {

constexpr char kHead[] =
    "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width\">\n"
    "<style>\n"
    "  body { font: 15px/1.5 system-ui, sans-serif; margin: 2em; }\n"
    "  table { border-collapse: collapse; font-variant-numeric: tabular-nums; "
    "}\n"
    "  th, td { padding: .25em .8em; text-align: right; white-space: nowrap; "
    "}\n"
    "  th { border-bottom: 2px solid currentColor; }\n"
    "  td { border-bottom: 1px solid #8886; }\n"
    "  .left { text-align: left; }\n"
    "</style>\n";

std::string Escape(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

}  // namespace

void WriteHtmlTable(const std::string& path, const std::string& title,
                    const std::string& caption,
                    const std::vector<std::string>& columns,
                    const std::vector<std::vector<std::string>>& rows) {
  const auto cell = [&](const char* tag, size_t column,
                        const std::string& text) {
    const bool left = columns[column].starts_with('<');
    return std::string("<") + tag + (left ? " class=\"left\">" : ">") +
           Escape(text) + "</" + tag + ">";
  };
  std::string html = kHead;
  html += "<title>" + Escape(title) + "</title>\n<h1>" + Escape(title) +
          "</h1>\n<p>" + Escape(caption) + "</p>\n<table>\n<tr>";
  for (size_t i = 0; i < columns.size(); ++i) {
    html += cell("th", i, columns[i].substr(columns[i].starts_with('<')));
  }
  for (const std::vector<std::string>& row : rows) {
    html += "\n<tr>";
    for (size_t i = 0; i < row.size(); ++i) html += cell("td", i, row[i]);
  }
  html += "\n</table>\n</html>\n";
  AtomicFile file(path);
  file.Write(html);
  file.Commit();
}

}  // namespace heed::cli
