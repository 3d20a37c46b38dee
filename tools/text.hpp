// Aligned lines for people.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace embermap::tools {

// "name    value" lines with the values in one column.
class Facts {
 public:
  void add(std::string name, std::string value) { lines_.emplace_back(std::move(name), std::move(value)); }

  std::string text() const {
    std::size_t width = 12;
    for (const auto& [name, value] : lines_) width = std::max(width, name.size());
    std::string out;
    for (const auto& [name, value] : lines_) {
      out += name;
      out.append(width + 2 - name.size(), ' ');
      out += value;
      out += '\n';
    }
    return out;
  }

 private:
  std::vector<std::pair<std::string, std::string>> lines_;
};

}  // namespace embermap::tools
