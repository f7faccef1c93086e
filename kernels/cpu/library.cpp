// One library: everything as one translation unit, compiled once per instruction set.
//
// What depends on the instruction set lies in files that end with its name; a new one (NEON, say)
// adds files, and a branch where they are included.

#if defined(__GNUC__) && !defined(__clang__)
// Vectors wider than the machine's registers change how functions receive them; all of these are in
// this unit.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#include "dequantise.hpp"
#include "multiply.hpp"
#include "pack.hpp"

#include "abi.cpp"
#include "abi_experts.cpp"
#include "abi_model.cpp"
#include "abi_recurrent.cpp"
#include "abi_single.cpp"
