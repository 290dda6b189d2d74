// The next decode step of rows that append to leaves of their own: positions, slots, and leaves one token longer.
//
// shapes     leaf [rows], of each row its node, or -1 for a row that pads; nodes as tree_attention takes them, but
//            length [nodes] counts the tokens that have KV, and grows; sampled, tokens, positions, slots [rows] int64.
// tiling     a thread per row; no two rows have one leaf.
// cost       some tens of bytes per row: the time of a launch.
// limits     a row without a page for its token gets slot -1 and does not grow, so a graph may run on when a row has
//            ended; a row that could not be sampled (-1) runs as token 0.
#include "layouts/advance.h"

namespace prefixkit {

extern "C" __global__ void __launch_bounds__(128) advance(const __grid_constant__ Advance a) {
    const int row = blockIdx.x * 128 + threadIdx.x;
    if (row >= a.rows) return;
    const int node = a.leaf[row];
    long long position = 0, slot = -1;
    if (node >= 0) {
        const int offset = a.length[node], within = a.first_slot[node] + offset;
        const int page = a.page_indptr[node] + within / a.page_size;
        const bool there = page < a.page_indptr[node + 1];
        position = a.start[node] + offset - !there;
        if (there) slot = (long long)a.pages[page] * a.page_size + within % a.page_size, a.length[node] = offset + 1;
    }
    a.tokens[row] = node >= 0 ? max(a.sampled[row], 0ll) : 0;
    a.positions[row] = position, a.slots[row] = slot;
}

}  // namespace prefixkit
