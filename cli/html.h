// One table as a self-contained page.
#ifndef CLI_HTML_H_
#define CLI_HTML_H_

#include <string>
#include <vector>

namespace heed::cli {

// Columns as for Table: a leading '<' aligns left. The file appears complete or
// not at all. Throws FileError.
void WriteHtmlTable(const std::string& path, const std::string& title,
                    const std::string& caption,
                    const std::vector<std::string>& columns,
                    const std::vector<std::vector<std::string>>& rows);

}  // namespace heed::cli

#endif  // CLI_HTML_H_
