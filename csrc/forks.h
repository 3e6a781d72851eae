// What fork() leaves of us in a child: all memory, no thread but the caller's, and locks as they happened to be.
#pragma once

#include <mutex>

namespace cofire {

// Forks between the process that loaded us and this one: whoever remembers another number is in a child, and the
// threads it had are gone.
unsigned forks();

// No fork happens while it is held, so that no child finds it locked. For moments only: it is everyone's.
std::mutex& unforked();

}  // namespace cofire
