// Printing. All output of the program goes through this file.
#include "cli/print.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

#include "cli/format.h"
#include "heed/core/error.h"

namespace heed::cli {
namespace {

// A number with three significant digits.
std::string Digits(double x) {
  const double magnitude = std::abs(x);
  const int decimals = magnitude < 9.995 ? 2 : magnitude < 99.95 ? 1 : 0;
  return Format("{:.{}f}", x, decimals);
}

void WriteAll(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      throw FileError(std::string("stdout: cannot write: ") + std::strerror(errno));
    }
    text.remove_prefix(static_cast<size_t>(written));
  }
}

// The number of characters of UTF-8 text: bytes that do not continue a character.
size_t Width(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

// Removes the alignment marks from the names. Returns which columns are aligned left.
std::vector<bool> TakeAlignment(std::vector<std::string>& columns) {
  std::vector<bool> left;
  for (std::string& column : columns) {
    left.push_back(column.starts_with('<'));
    if (left.back()) column.erase(0, 1);
  }
  return left;
}

void Widen(std::vector<size_t>& widths, const std::vector<std::string>& row) {
  for (size_t i = 0; i < row.size(); ++i) {
    widths[i] = std::max(widths[i], Width(row[i]));
  }
}

std::string Line(const std::vector<std::string>& row, const std::vector<size_t>& widths,
                 const std::vector<bool>& left) {
  std::string line;
  for (size_t i = 0; i < row.size(); ++i) {
    const std::string pad(widths[i] - std::min(widths[i], Width(row[i])), ' ');
    if (i > 0) line += "  ";
    line += left[i] ? row[i] + pad : pad + row[i];
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

constexpr auto kBetweenUpdates = std::chrono::milliseconds(100);

}  // namespace

Table::Table(std::vector<std::string> columns) {
  left_ = TakeAlignment(columns);
  rows_.push_back(std::move(columns));
}

void Table::Add(std::vector<std::string> cells) {
  cells.resize(left_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::ToString() const {
  std::vector<size_t> widths(left_.size(), 0);
  for (const auto& row : rows_) Widen(widths, row);
  std::string text;
  for (const auto& row : rows_) text += Line(row, widths, left_);
  return text;
}

StreamedTable::StreamedTable(std::vector<std::string> columns, const std::vector<std::string>& widest)
    : widths_(columns.size(), 0), left_(TakeAlignment(columns)) {
  Widen(widths_, columns);
  Widen(widths_, widest);
  Add(std::move(columns));
}

void StreamedTable::Add(std::vector<std::string> cells) const {
  cells.resize(left_.size());
  Progress("");
  Print(Line(cells, widths_, left_));
}

std::string Seconds(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  if (seconds < 1e-3) return Digits(seconds * 1e6) + " us";
  if (seconds < 1) return Digits(seconds * 1e3) + " ms";
  return Digits(seconds) + " s";
}

std::string Bytes(double num_bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (num_bytes < 1024) return Format("{:.0f} B", num_bytes);
  size_t unit = 0;
  for (num_bytes /= 1024; num_bytes >= 1024 && unit < 3; ++unit) {
    num_bytes /= 1024;
  }
  return Digits(num_bytes) + " " + kUnits[unit];
}

std::string Rate(double per_second, std::string_view unit) {
  if (!std::isfinite(per_second)) return "-";
  if (per_second >= 1e12) return Format("{} T{}", Digits(per_second / 1e12), unit);
  if (per_second >= 1e9) return Format("{} G{}", Digits(per_second / 1e9), unit);
  return Format("{} M{}", Digits(per_second / 1e6), unit);
}

std::string Percent(double fraction) { return std::isfinite(fraction) ? Format("{:.1f} %", 100 * fraction) : "-"; }

std::string ErrorSize(double error) {
  if (!std::isfinite(error)) return "-";
  return error == 0 ? "0" : Format("{:.1e}", error);
}

void Print(std::string_view text) { WriteAll(STDOUT_FILENO, text); }

void PrintJson(const Json& json) { Print(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"); }

void PrintError(std::string_view text) {
  std::string line = "heed: ";
  for (char c : text) {
    const unsigned char u = static_cast<unsigned char>(c);
    line += u < 0x20 || u == 0x7F ? '?' : c;
  }
  line += '\n';
  try {
    WriteAll(STDERR_FILENO, line);
  } catch (const FileError&) {
    // An error here cannot be printed; the exit status still reports it.
  }
}

void Progress(std::string_view text) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\r\033[K%.*s", static_cast<int>(text.size()), text.data());
  std::fflush(stderr);
}

std::string RoughTime(double seconds) {
  const double whole = std::max(1.0, std::round(seconds));
  return whole < 90 ? Format("{:.0f} s", whole) : Format("{:.0f} min", std::round(seconds / 60));
}

Countdown::Countdown(size_t steps) : steps_(steps), start_(std::chrono::steady_clock::now()) {}

Countdown::~Countdown() { Progress(""); }

void Countdown::Next(std::string_view text) {
  const auto now = std::chrono::steady_clock::now();
  const size_t done = begun_++;
  if (done > 0 && now - shown_ < kBetweenUpdates) return;
  shown_ = now;
  std::string left;
  if (done > 0 && done < steps_) {
    const std::chrono::duration<double> passed = now - start_;
    left = ", " + RoughTime(passed.count() * static_cast<double>(steps_ - done) / static_cast<double>(done)) + " left";
  }
  Progress(Format("{} of {}{}: {}", begun_, steps_, left, text));
}

}  // namespace heed::cli
