// How a command opens a store: --memory, --io, --direct, --policy, --allow-adopted.
#pragma once

#include <initializer_list>

#include "store/store.hpp"
#include "tools/command.hpp"

namespace embermap::tools {

// Adds --io, --direct and --no-direct, --durability, --verify-reads, --log-limit, --allow-adopted, --policy: for commands that
// open a store.
void add_store_options(CLI::App& command, Common& common);

// Options that change nothing in this command are taken as before, but not listed by --help.
void hide_options(CLI::App& command, std::initializer_list<const char*> names);

// What the command line asks for. Throws UsageError.
StoreOptions store_options(const Common& common, StoreOptions::Mode mode);

}  // namespace embermap::tools
