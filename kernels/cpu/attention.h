/* Attention of a step's tokens over a paged cache. kernels/attention.py and attention_batch.py say what the fields mean
 * to Python; strides count elements, and the last dimension is contiguous everywhere.
 */

#ifndef ATTENTION_H
#define ATTENTION_H

#include "codes.h"
#include "team.h"

/* Rows that go through some keys together: of each token, some of the heads that share a KV head, for some KV heads. */
typedef struct {
    int64_t request;       /* whose block table says where the keys are */
    int64_t first, tokens; /* in the batch, or where `is_listed` in its list */
    int64_t is_listed;
    int64_t member_begin, member_end; /* of the heads that share a KV head */
    int64_t kv_begin, kv_end;
    int64_t key_begin, key_end;
    int64_t part; /* where its results go, from its tokens' first part on; -1: they are the output */
} AttentionTask;

/* A step for layers with such heads that see `window` keys back. The second half is what `plan_attention` works out. */
typedef struct {
    const int64_t *query_start_loc; /* [num_requests + 1] */
    const int64_t *seq_lens;        /* [num_requests] */
    const int64_t *block_tables;    /* [num_requests, table_stride] */
    const int64_t *visible_to;      /* [num_tokens], or NULL: no token sees a later one */
    const int64_t *prefix_of;       /* [num_requests], which prefix each shares with others, -1: none; NULL: nobody */
    const int64_t *prefix_lens;     /* [num_prefixes] */
    int64_t num_requests, num_tokens, num_prefixes, table_stride, block_size;
    int64_t window; /* how many keys are seen, the token's own included */
    int64_t num_heads, num_kv_heads, head_dim, value_dim;
    int64_t num_threads; /* that are to be kept busy */

    AttentionTask *tasks; /* [max_tasks] */
    int64_t max_tasks, num_tasks;
    int64_t *first_seen, *end_seen; /* [num_tokens], the keys that a token sees */
    int64_t *own_parts;             /* [num_tokens], where the parts of its own keys begin */
    int64_t *prefix_parts;          /* [num_tokens], and those of the keys it shares */
    int64_t *part_counts;           /* [num_tokens], of both together; they lie one behind the other */
    int64_t *listed;                /* [num_tokens], whose prefix is shared, prefix by prefix */
    int64_t *merged;                /* [num_tokens], those that have parts */
    int64_t num_listed, num_merged, num_parts;
    int64_t work; /* of all tasks: products */
    float *parts; /* [num_parts, num_heads, part_floats(value_dim)] */
} AttentionBatch;

/* A layer's keys or values: elements, or codes with a scale for each slot and KV head. */
typedef struct {
    void *rows; /* [num_blocks * block_size, num_kv_heads, head_dim or value_dim] */
    int64_t slot_stride, head_stride;
    float *scales; /* [num_blocks * block_size, num_kv_heads], contiguous; NULL for elements */
} Cache;

typedef struct {
    Cache keys, values;
    CacheType type;
} KVCache;

/* One layer's attention. */
typedef struct {
    const AttentionBatch *batch;
    const element *query; /* [num_tokens, num_heads, head_dim] */
    int64_t query_token_stride, query_head_stride;
    KVCache cache;
    element *output; /* [num_tokens, num_heads, value_dim], contiguous */
    float scaling, softcap; /* 0: none */
    const float *sinks;     /* [num_heads], or NULL */
} Attention;

enum {
    PANEL_KEYS = 32, /* one panel's */
    MAX_BLOCK_KEYS = 128,
    MAX_HEAD_DIM = 512,
    MAX_ROWS = 144,
    FEW_ROWS = 9, /* of a KV head: so few that keys and values are not packed; at least GROUP_ROWS */
    /* What a thread keeps of rows and of a block of keys, in the second-level cache together. */
    QUERY_BYTES = MAX_ROWS * 256 * 2,
    MAX_SUMS = MAX_ROWS * 256,
    MAX_SUM_FLOATS = MAX_HEAD_DIM,
    BLOCK_BYTES = MAX_BLOCK_KEYS * 256 * 2
};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Where a slot has what is of a KV head. */
INLINE char *slot_of(const Cache *c, CacheType type, int64_t slot, int64_t kv_head) {
    return (char *)c->rows + (slot * c->slot_stride + kv_head * c->head_stride) * bytes_of(type);
}

/* How many elements a query and a row of sums take. */
INLINE int64_t query_elements(int64_t head_dim) { return rounded_up(head_dim, INPUTS_PER_STEP); }
INLINE int64_t sum_floats(int64_t value_dim) { return rounded_up(value_dim, PANEL); }

/* Sums, their largest score and the sum of their weights; whole cache lines. */
INLINE int64_t part_floats(int64_t value_dim) { return sum_floats(value_dim) + 16; }

/* How many rows a task may have, for all its KV heads together. */
INLINE int64_t most_rows(int64_t head_dim, int64_t value_dim) {
    const int64_t queries = QUERY_BYTES / (query_elements(head_dim) * (int64_t)sizeof(element));
    return smaller(MAX_ROWS, smaller(queries, MAX_SUMS / sum_floats(value_dim)));
}

/* Two phases, or one where nothing has parts. */
void attend(Worker *w, const Attention *a);

#endif
