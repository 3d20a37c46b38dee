#include "io/same_file.hpp"

#include <sys/stat.h>

#include <system_error>

namespace embermap {

bool same_file(const std::filesystem::path& a, const std::filesystem::path& b) {
  struct stat first {
  }, second{};
  const bool there = stat(a.c_str(), &first) == 0, other = stat(b.c_str(), &second) == 0;
  if (there && other) return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
  if (there || other || a.empty() || b.empty()) return false;
  std::error_code error_a, error_b;
  const std::filesystem::path p = std::filesystem::weakly_canonical(std::filesystem::absolute(a, error_a), error_a),
                              q = std::filesystem::weakly_canonical(std::filesystem::absolute(b, error_b), error_b);
  return !error_a && !error_b && p == q;
}

}  // namespace embermap
