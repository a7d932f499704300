#include "write_kv.h"

#include "rows.h"

/* A step's keys and values for one layer, and where they go. */
typedef struct {
    KVCache cache;
    const element *key, *value; /* [num_tokens, num_kv_heads, key_dim or value_dim] */
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    const int64_t *slots; /* [num_tokens]; -1 is nowhere */
    int64_t num_tokens, num_kv_heads, key_dim, value_dim;
} Written;

enum { MIN_PARALLEL_VALUES = 1 << 16 /* about what starting the threads takes */ };

static void write_all(Worker *w, const Written *x) {
    FOR_ROWS(w, x->num_tokens, token) {
        const int64_t slot = x->slots[token];
        if (slot < 0)
            continue;
        write_slot(&x->cache.keys, x->cache.type, slot, x->key + token * x->key_token_stride, x->key_head_stride,
                   x->num_kv_heads, x->key_dim);
        write_slot(&x->cache.values, x->cache.type, slot, x->value + token * x->value_token_stride,
                   x->value_head_stride, x->num_kv_heads, x->value_dim);
    }
    end_phase(w);
}

/* For Python. */
EXPORT void write_kv(const Written *x, int num_threads) {
    if (x->num_tokens * x->num_kv_heads * (x->key_dim + x->value_dim) < MIN_PARALLEL_VALUES)
        num_threads = 1;
    WITH_TEAM(num_threads, worker, write_all(&worker, x));
}
