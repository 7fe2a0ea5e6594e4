#pragma once

/// Exports a symbol from the shared library. All others are hidden.
#define FSDP_API __attribute__((visibility("default")))
