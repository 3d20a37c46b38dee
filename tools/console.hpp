// Standard output, standard error and signals of the tool.
#pragma once

#include <string>
#include <string_view>

#include "tools/command.hpp"

namespace embermap::tools {

// Makes sure that descriptors 0, 1, 2 are open, so that no file of ours gets one of them. A closed standard output stays one that
// cannot be written to.
void claim_standard_descriptors();

// Whether standard output was open when the tool began.
bool can_print();

// Writes all of `text` to standard output, at once. Throws IoError.
void print(std::string_view text);

// One JSON object and a newline.
void print_json(const Json& object);

// "embermap: warning: ..." and "embermap: error: ..." on standard error, always one line.
void warn(std::string_view message);
void report_error(std::string_view message);

// A path or name for JSON: its bytes if they are UTF-8, else with \xNN for those that are not.
std::string json_text(std::string_view bytes);

// "1,234,567".
std::string grouped(std::uint64_t number);

// SIGINT, SIGTERM and SIGHUP ask the tool to stop: seen by check_interrupt(). A third one ends it at once. Signals that were
// ignored when the tool began stay ignored. SIGPIPE and SIGXFSZ are ignored: a write to a closed pipe or past the largest file
// allowed is an error like any other.
void catch_signals();

// Not derived from std::exception: nothing on the way takes it for a failure of its own.
struct Interrupted {
  int signal;
};

// Throws Interrupted if the tool was asked to stop.
void check_interrupt();

}  // namespace embermap::tools
