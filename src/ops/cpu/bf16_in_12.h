// BF16 weights in 12 bits, without loss: trained weights use few of the 256 exponents, and products with few
// rows wait for memory.
//
// A row is runs of 128 columns; the last is filled up with finite numbers, which the kernels multiply by the
// zeros behind an activation row, if at all. The exponents of a run lie in a window of 16 from a base of its
// own: a code is sign, four bits of exponent and seven of mantissa, 12 bits in the places that they have in
// BF16. A run is three times 32 words of 16 bits; word w is that of column w / 2, or, where w is odd, of
// column 16 + w / 2 (so that a shift and a mask make two vectors of 16 floats of 16 words of 32 bits):
//   words of columns 0 to 31    their codes, and at bits 14 to 11 the exponents of columns 96 to 127
//   words of columns 32 to 63   their codes, and there bits 6 to 3 of those columns
//   words of columns 64 to 95   their codes, and there bits 2 to 0 of them at 14 to 12, and the sign at 11
// A run with any exponent outside of every window (zeros beside large numbers), or with infinity or NaN, is
// marked: it holds the distance in bytes, as int64, from itself to a run of 16-bit codes in the same order,
// columns 96 to 127 last.
//
// A matrix is its runs, row after row; the bases of all (exponent << 7 as uint32, in both halves; a marked
// run's is 0xFFFFFFFF); the runs of 16-bit codes. That is 12.25 bits a weight, and for a marked run 28.25.
#pragma once

#include <cstdint>

#include "quant/matrix.h"

namespace nibble::cpu {

// Marked runs among the weight rows [first, last) of a BF16 matrix.
int64_t count_marked_runs(const Matrix& matrix, int64_t first, int64_t last);
// The bytes of an [n, k] matrix in 12 bits with so many marked runs.
int64_t bytes_in_12(int64_t n, int64_t k, int64_t marked);
// Whether it is worth it, which is where it saves 3 bytes of 16: not where more than about one run in 20 is
// marked (pruned weights), or where the last runs are mostly filling.
bool pays_in_12(int64_t n, int64_t k, int64_t marked);
// Where the bases begin among those bytes.
int64_t bases_offset(int64_t n, int64_t k);
// Writes the rows [first, last) to their places in `to`; before them are `marked_before` marked runs.
void put_in_12(const Matrix& matrix, int64_t first, int64_t last, int64_t marked_before, uint8_t* to);

}  // namespace nibble::cpu
