// What a variant's mask returns over ranges of queries and keys: interval arithmetic for the text of `Variant::decide`.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

// Range: an integer lies from low to high, both included.  Maybe: whether a bool may be true, and whether it may be
// false.
struct Range { int low, high; };
struct Maybe { bool yes, no; };

DEVICE Range operator+(Range x, Range y) { return {x.low + y.low, x.high + y.high}; }
DEVICE Range operator-(Range x) { return {-x.high, -x.low}; }
DEVICE Range operator-(Range x, Range y) { return x + -y; }
DEVICE Range range_min(Range x, Range y) { return {min(x.low, y.low), min(x.high, y.high)}; }
DEVICE Range range_max(Range x, Range y) { return {max(x.low, y.low), max(x.high, y.high)}; }
DEVICE Range range_abs(Range x) {
    return {x.low > 0 ? x.low : x.high < 0 ? -x.high : 0, max(-x.low, x.high)};
}
// Multiplication by a number.
DEVICE Range operator*(Range x, int y) {
    return y < 0 ? Range{x.high * y, x.low * y} : Range{x.low * y, x.high * y};
}
DEVICE int floor_quotient(int x, int y) { return x < 0 ? ~(~x / y) : x / y; }
// Division by a positive number, rounded down.
DEVICE Range floor_quotients(Range x, int y) { return {floor_quotient(x.low, y), floor_quotient(x.high, y)}; }
DEVICE Range floor_remainders(Range x, int y) {
    const int turns = floor_quotient(x.low, y);
    if (turns != floor_quotient(x.high, y)) return {0, y - 1};
    return {x.low - turns * y, x.high - turns * y};
}

DEVICE Maybe operator<(Range x, Range y) { return {x.low < y.high, x.high >= y.low}; }
DEVICE Maybe operator<=(Range x, Range y) { return {x.low <= y.high, x.high > y.low}; }
DEVICE Maybe operator>(Range x, Range y) { return y < x; }
DEVICE Maybe operator>=(Range x, Range y) { return y <= x; }
DEVICE Maybe operator==(Range x, Range y) {
    const bool one = x.low == x.high && y.low == y.high && x.low == y.low;
    return {x.low <= y.high && y.low <= x.high, !one};
}
DEVICE Maybe operator!(Maybe x) { return {x.no, x.yes}; }
DEVICE Maybe operator!=(Range x, Range y) { return !(x == y); }
DEVICE Maybe operator&(Maybe x, Maybe y) { return {x.yes && y.yes, x.no || y.no}; }
DEVICE Maybe operator|(Maybe x, Maybe y) { return {x.yes || y.yes, x.no && y.no}; }
DEVICE Maybe operator^(Maybe x, Maybe y) {
    return {(x.yes && y.no) || (x.no && y.yes), (x.yes && y.yes) || (x.no && y.no)};
}

}  // namespace prefixkit
