// How a command opens a store: --memory, --io, --direct, --policy, --allow-adopted.
#pragma once

#include "store/store.hpp"
#include "tools/command.hpp"

namespace embermap::tools {

// Adds --io, --direct and --no-direct, --allow-adopted, --policy: for commands that open a store.
void add_store_options(CLI::App& command, Common& common);

// What the command line asks for. Throws UsageError.
StoreOptions store_options(const Common& common, StoreOptions::Mode mode);

}  // namespace embermap::tools
