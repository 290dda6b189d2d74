// From parts of paths to BSR rows: whose KV list each row is, and of which pieces the list consists.
//
// shared_parts of attention/paths/heavy_paths.py, kv_lists.py, and decompose of attention/bsr.py.
//
// pieces   a piece is a node, or nodes of a run that follow each other.  Each piece begins with one node, so a prefix
//          sum along the order of paths numbers the pieces.  A thread writes each piece of a part; the row's thread
//          writes what a row inherits.
// limits   of a part, a query sees the tokens up to the end of the part's lowest node above the query's own.  LIMIT[n]
//          is where these end for all queries that reach a part through node n, their own node or the head of a part
//          further down; UP[n] is the head of the part that they reach.  So a query's limits are found along the chain
//          that also numbers its partials.
#pragma once
#include "planner/plan_paths.cuh"

namespace prefixkit {

// Whether queries see only a part of the text; tiles then begin where their queries begin to see.
DEVICE bool some_unseen() { return p.a.window | p.a.chunk | p.a.first; }

// ---- parts ----
// Whether a shared node is the first of a part: the first of its path's, or the first after missing tokens.
DEVICE bool is_head(int n) {
    const int leaf = leaf_of(n), place = at(PLACE)[n], above = at(PARENT)[n];
    if (!is_shared(leaf, place)) return false;
    return place == at(LOW)[leaf] || p.a.start[n] != p.a.start[above] + at(LENGTH)[above];
}
// head_place: the place of the head of the part with this place.  last_place: that of the last node of the part with
// this head.
DEVICE int head_place(int place) { return at(HEAD_PLACE)[at(HEADS)[place + 1] - 1]; }
DEVICE int last_place(int head) {
    return min(at(HIGH)[leaf_of(at(ORDER)[head])], at(HEAD_PLACE)[at(HEADS)[head] + 1] - 1);
}

DEVICE void find_heads() {
    bool head;
    const auto look = [&](int place) { return u64(head = is_head(at(ORDER)[place])); };
    const u64 total = scan_each(p.nodes, look, [&](int place, u64 before) {
        at(HEADS)[place] = low_of(before);
        if (head) at(HEAD_PLACE)[low_of(before)] = place;
    });
    if (threadIdx.x == 0) at(HEADS)[p.nodes] = low_of(total), at(HEAD_PLACE)[low_of(total)] = NOWHERE;
    __syncthreads();
}

// ---- pieces ----
DEVICE bool follows_in_run(int n) {
    const int run = p.a.run[n], above = at(PARENT)[n];
    return run >= 0 && above >= 0 && p.a.run[above] == run;
}

// Finds where pieces begin, and the tokens before each place, over nodes with queries below them.
DEVICE void find_pieces() {
    bool begins;
    const auto look = [&](int place) {
        const int n = at(ORDER)[place], leaf = leaf_of(n), length = queries_below(n) > 0 ? at(LENGTH)[n] : 0;
        const bool follows = follows_in_run(n), shared = is_shared(leaf, place);
        if (!follows && p.a.run[n] >= 0) at(RUN_START)[p.a.run[n]] = p.a.start[n];
        begins = length && !(follows && (shared ? !is_head(n) : !is_shared(leaf, place - 1)));
        return join(length, begins);
    };
    const u64 total = scan_each(p.nodes, look, [&](int place, u64 before) {
        at(TOKENS_TO)[place] = high_of(before), at(BEGINS)[place] = low_of(before);
        if (begins) at(BEGIN_PLACE)[low_of(before)] = place;
    });
    if (threadIdx.x == 0) {
        at(TOKENS_TO)[p.nodes] = high_of(total), at(BEGINS)[p.nodes] = low_of(total);
        at(BEGIN_PLACE)[low_of(total)] = NOWHERE;
    }
    __syncthreads();
}

CALLED void write_piece(int to, int n, int tokens, int before) {
    if (to >= p.a.segment_capacity) return;
    const bool several = tokens > at(LENGTH)[n];
    const int run = several ? p.a.run[n] : 0, begin = several ? p.a.start[n] - at(RUN_START)[run] : 0;
    int* s = p.a.segments + 3 * to;
    s[0] = several ? p.nodes + run : n, s[1] = begin, s[2] = begin + tokens;
    at(SEGMENT_BEFORE)[to] = before;
}

// ---- rows ----
// Calls visit(first place, last place) for each stretch of a path that a node inherits, from below.  Returns the
// nearest shared ancestor, or -1.
template <class V> DEVICE int walk_up(int n, V visit) {
    ROLLED for (int above = at(PARENT)[n]; above >= 0;) {
        const int leaf = leaf_of(above), place = at(PLACE)[above];
        int from = path_begin(leaf);
        const int top = at(ORDER)[from];
        const bool shared = at(LOW)[leaf] <= place;
        if (shared) from = min(at(HIGH)[leaf], place) + 1;
        visit(from, place);
        if (shared) return at(ORDER)[from - 1];
        above = at(PARENT)[top];
    }
    return -1;
}

// Writes what a row inherits, the last piece first, and its own node, if it is an own-node row.
CALLED void write_inherited(int end, int node, int tokens, bool own) {
    if (own && end < p.a.segment_capacity) {
        int* s = p.a.segments + 3 * end;
        s[0] = node, s[1] = 0, s[2] = OPEN_END;
        at(SEGMENT_BEFORE)[end] = tokens;
    }
    int to = end, before = tokens;
    walk_up(node, [&](int first, int last) {
        const int first_piece = at(BEGINS)[first];
        int stop = last + 1;
        ROLLED for (int piece = at(BEGINS)[last + 1] - 1; piece >= first_piece; --piece) {
            const int place = at(BEGIN_PLACE)[piece], size = at(TOKENS_TO)[stop] - at(TOKENS_TO)[place];
            write_piece(--to, at(ORDER)[place], size, before -= size);
            stop = place;
        }
    });
}

DEVICE void write_parts() {
    ROLLED for (int place = threadIdx.x; place < p.nodes; place += THREADS) {
        const int n = at(ORDER)[place];
        if (!is_shared(leaf_of(n), place)) continue;
        const int head = head_place(place), last = last_place(head), h = at(ORDER)[head];
        const int base = at(SEGMENT_BASE)[h] + at(INHERITED)[h], inherited = at(TOKENS)[h] - at(LENGTH)[h];
        const int piece = at(BEGINS)[place], first = at(BEGINS)[head], begin = at(TOKENS_TO)[place];
        const int stop = min(at(BEGIN_PLACE)[piece + (at(BEGINS)[place + 1] > piece)], last + 1);
        const int before = inherited + begin - at(TOKENS_TO)[head];
        if (at(BEGINS)[place + 1] > piece) write_piece(base + piece - first, n, at(TOKENS_TO)[stop] - begin, before);
        else if (place == head && at(BEGINS)[last + 1] == first) write_piece(base, n, 0, before);  // no tokens
    }
}

DEVICE bool make_rows_by_paths() {
    bool head, own;
    const auto read = [&](int n) {
        head = is_head(n), own = own_queries(n) > 0;
        int inherited = 0, tokens = 0, above = -1, pieces = 0;
        if (head || own)
            above = walk_up(n, [&](int first, int last) {
                inherited += at(BEGINS)[last + 1] - at(BEGINS)[first];
                tokens += at(TOKENS_TO)[last + 1] - at(TOKENS_TO)[first];
            });
        if (head) {
            const int place = at(PLACE)[n], last = last_place(place);
            pieces = max(1, at(BEGINS)[last + 1] - at(BEGINS)[place]);
            const bool leave = at(FIRST_ROW)[at(ORDER)[last] + 1] > at(FIRST_ROW)[n + 1];
            at(SHARED)[n] = leave || some_unseen() ? 3 : 1;
        } else at(SHARED)[n] = 0;
        at(UP)[n] = above < 0 ? -1 : at(ORDER)[head_place(at(PLACE)[above])];
        at(LIMIT)[n] = above < 0 ? 0 : p.a.start[above] + at(LENGTH)[above] - 1;
        at(INHERITED)[n] = inherited, at(TOKENS)[n] = tokens + at(LENGTH)[n];
        const int segments = (head ? inherited + pieces : 0) + (own ? inherited + 1 : 0);
        return join(segments, shared_tiles(n) + tiles_of(own_queries(n)));
    };
    const u64 total = scan_each(p.nodes, read, [&](int n, u64 before) {
        at(SEGMENT_BASE)[n] = high_of(before), at(TILE_BASE)[n] = low_of(before);
    });
    if (threadIdx.x == 0) at(SEGMENT_BASE)[p.nodes] = high_of(total);
    __syncthreads();
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        const int tokens = at(TOKENS)[n] - at(LENGTH)[n], inherited = at(INHERITED)[n];
        if (at(SHARED)[n]) write_inherited(at(SEGMENT_BASE)[n] + inherited, n, tokens, false);
        if (own_queries(n)) write_inherited(at(SEGMENT_BASE)[n + 1] - 1, n, tokens, true);
    }
    write_parts();
    __syncthreads();
    free_path_arrays();
    return keep_rows(total);
}

DEVICE bool rows_by_paths() {
    find_heads();
    find_pieces();
    return make_rows_by_paths();
}

// The number of tokens of a head's list up to where a query leaves the part.
CALLED int tokens_until(int head, int query) {
    int n = find(at(FIRST_ROW), p.nodes, query);
    while (at(UP)[n] != head) n = at(UP)[n];
    return at(TOKENS)[head] - at(LENGTH)[head] + at(LIMIT)[n] + 1 - p.a.start[head];
}

// The first position that some of these queries see: Visible.begin of attention/visible.py for the lowest of them.
DEVICE int first_seen(int begin, int end) {
    int lowest = NOWHERE;
    ROLLED for (int n = find(at(FIRST_ROW), p.nodes, begin); n < p.nodes && at(FIRST_ROW)[n] < end; ++n) {
        const int rows = own_queries(n), before = max(begin - at(FIRST_ROW)[n], 0);
        if (rows > 0) lowest = min(lowest, p.a.start[n] + at(LENGTH)[n] - rows + before);
    }
    int first = p.a.first;
    if (p.a.window) first = max(first, lowest - p.a.window + 1);
    if (p.a.chunk) first = max(first, lowest - lowest % p.a.chunk);
    return first;
}

// Sets which tokens a tile reads.  A shared-prefix tile reads up to where its last query leaves the part; an own-node
// tile reads its own node whole.  Tokens before the first one seen are skipped; returns their number.
DEVICE int measure(Tile& x) {
    if (!x.own) x.tokens = tokens_until(x.node, x.end - 1);
    if (!some_unseen()) return 0;
    const int inherited = at(TOKENS)[x.node] - at(LENGTH)[x.node], own = at(FIRST_ROW)[x.node];
    const int most = x.own ? inherited : tokens_until(x.node, at(FIRST_ROW)[at(SUBTREE_END)[x.node]] - 1);
    const int seen = x.own ? first_seen(own, own + 1) : first_seen(x.begin, x.end);
    const int skipped = min(max(inherited + seen - p.a.start[x.node], 0), most);
    x.tokens = max(x.tokens - skipped, 0);
    return skipped;
}

}  // namespace prefixkit
